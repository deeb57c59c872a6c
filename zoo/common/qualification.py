"""Which providers this machine has admitted: a stored qualification per GPU and toolchain, written by `zoo qualify`.

A provider that does not define its byte class runs a shape only where its bytes were found equal to the defining provider's on
this GPU and toolchain. The store is read once; `reload` after it was written.
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
from zoo.common.ops.contract import CONTRACTS, Contract, choices_changed

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
    from zoo.common.fingerprint import toolchain

    versions = toolchain(torch.device("cuda"))
    digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()[:12]
    gpu = re.sub(r"[^a-z0-9]+", "-", versions["gpu"].lower()).strip("-")
    if not _has_home():
        raise ValueError(f"there is no home folder for {FOLDER}: set HOME, or name a store")
    return Path(FOLDER).expanduser() / f"{gpu}-{digest}.json"


def _has_home() -> bool:
    return os.path.expanduser(FOLDER) != FOLDER


def read(path: Path) -> list[Verdict]:
    """The verdicts of a store; those of older contracts or kernels are left out. ValueError naming the file if it can't be read."""
    try:
        if not path.exists():
            return []
        fields = json.loads(path.read_text())
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, this version reads {FORMAT}")
        verdicts = [Verdict(**{**v, "shape": tuple(v["shape"])}) for v in fields["verdicts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"qualifications in {path} can't be read ({error}): delete the file, run `zoo qualify`") from error
    return [v for v in verdicts if v.op in CONTRACTS and _holds(v, CONTRACTS[v.op])]


def _holds(verdict: Verdict, contract: Contract) -> bool:
    """Whether it is about the contract and the kernels of today."""
    versions = [p.version for p in contract.providers if p.name == verdict.provider]
    return contract.version == verdict.contract_version and versions in ([], [verdict.provider_version])


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
    """Forgets what was read, and with it every choice of a provider made so far."""
    _verdicts.cache_clear()
    choices_changed()


def admitted(op: str, provider: str, shape: tuple[int, ...]) -> bool:
    """Whether the provider's bytes were found equal to the defining one's at this shape, here."""
    verdict = _verdicts().get((op, provider, shape))
    return verdict is not None and verdict.admitted


def tried(op: str, provider: str, shape: tuple[int, ...]) -> bool:
    """Whether the store has a verdict, whichever it is."""
    return (op, provider, shape) in _verdicts()


def reason(op: str, provider: str, shape: tuple[int, ...]) -> str:
    """Why a candidate does not run a shape here."""
    verdict = _verdicts().get((op, provider, shape))
    return "not qualified yet" if verdict is None else verdict.reason or "admitted"


def state(chosen: Iterable[tuple[str, tuple[int, ...]]], device: str) -> str:
    """For fingerprints: "qualified" if every candidate of every (op, shape) has a verdict; else, and on a CPU, "unqualified"."""
    found = device == "cuda" and all(tried(op, p, shape) for op, shape in chosen for p in candidates(op, shape))
    return "qualified" if found else "unqualified"


def candidates(op: str, shape: tuple[int, ...]) -> list[str]:
    """Providers of `aligned`'s class on a GPU that could run a shape besides the defining one."""
    from zoo.common.program import ALIGNED_CUDA

    members = [p for p in CONTRACTS[op].providers if p.device == "cuda" and p.byte_class == ALIGNED_CUDA[op] and not p.defining]
    return [p.name for p in members if p.installed() and p.serves(*shape)]
