"""Which providers this machine has admitted: a stored qualification per GPU and toolchain, written by `zoo qualify`.

The store is read once; `reload` after it was written. It knows no op: whoever asks gives the versions that a verdict must be about.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.common.files import check_parents, write_file
from zoo.common.toolchain import toolchain

FOLDER = "~/.cache/aligned-zoo/qualification"
FORMAT = 1


@dataclass(frozen=True)
class Verdict:
    """One provider at one shape. reason: why it was not admitted, empty if it was. checks: comparisons made."""

    op: str
    provider: str
    shape: tuple[int, ...]
    contract_version: int
    checks: int
    reason: str = ""
    provider_version: int = 1

    @property
    def admitted(self) -> bool:
        return not self.reason


@dataclass
class _Where:
    """The store in use; `use` names another one for the whole process, before models are built."""

    path: Path | None = None
    reads: int = 0


_where = _Where()


def use(path: Path | None) -> None:
    """Reads and writes the store at `path` instead of the user's cache folder; None: the folder again. ValueError, and the store
    stays the one it was, for a file that can't be read or a path where none can lie."""
    if path is not None:
        if os.path.isdir(path):
            raise ValueError(f"{path} is a folder, qualifications are kept in a file")
        check_parents(path.absolute())
        read(path)
    _where.path = path
    reload()


def in_use() -> Path | None:
    """What `use` named, for a process that is started to do the same."""
    return _where.path


def path_for_this_machine() -> Path:
    """~/.cache/aligned-zoo/qualification/<gpu>-<hash of the toolchain>.json, or what `use` named. ValueError without a home."""
    if _where.path is not None:
        return _where.path
    versions = toolchain(torch.device("cuda"))
    digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()[:12]
    gpu = re.sub(r"[^a-z0-9]+", "-", versions["gpu"].lower()).strip("-")
    if not _has_home():
        raise ValueError(f"there is no home folder for {FOLDER}: set HOME, or name a store")
    return Path(FOLDER).expanduser() / f"{gpu}-{digest}.json"


def _has_home() -> bool:
    return os.path.expanduser(FOLDER) != FOLDER


def read(path: Path) -> list[Verdict]:
    """All verdicts of a store. ValueError naming the file if it can't be read."""
    try:
        if not path.exists():
            return []
        fields = json.loads(path.read_text())
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, this version reads {FORMAT}")
        verdicts = [Verdict(**{**v, "shape": tuple(v["shape"])}) for v in fields["verdicts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"qualifications in {path} can't be read ({error}): delete the file, run `zoo qualify`") from error
    return verdicts


def write(path: Path, verdicts: Iterable[Verdict], about: dict[str, Any]) -> None:
    """Merges verdicts into the store, whole or not at all, and lets this process use them. `about`: GPU, toolchain."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # two processes that merge at once would lose one another's verdicts; a file that is there already is locked as it is
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = {(v.op, v.provider, v.shape): v for v in read(path)}
        merged |= {(v.op, v.provider, v.shape): v for v in verdicts}
        body = {"format": FORMAT, **about, "verdicts": [asdict(v) for v in merged.values()]}
        write_file(path, json.dumps(body, indent=1))
    finally:
        os.close(lock)
    reload()


@functools.cache
def _verdicts() -> dict[tuple[str, str, tuple[int, ...]], Verdict]:
    if _where.path is None and not (torch.cuda.is_available() and _has_home()):
        return {}
    return {(v.op, v.provider, v.shape): v for v in read(path_for_this_machine())}


def reload() -> None:
    """Forgets what was read; what was chosen from it is chosen anew."""
    _verdicts.cache_clear()
    _where.reads += 1


def generation() -> int:
    """How often the store was forgotten: what was chosen before is of another one."""
    return _where.reads


def verdict(op: str, provider: str, shape: tuple[int, ...]) -> Verdict | None:
    """What the store says of a provider at a shape, of whichever versions."""
    return _verdicts().get((op, provider, shape))
