"""Kernels that are compiled while a process runs: by Triton, DeepGEMM and FlashAttention 4, which all compile when a variant is first met.

A server that compiles while it serves stands still for seconds, for everyone. So what was compiled is counted, with what was being done:
`watch()` begins, `look(doing)` takes what is new since the last look. Triton tells by its own listener, and only what no cache on disk
had; DeepGEMM by the folder that it compiles into, FlashAttention 4 by its tables in memory. A look at all three takes a few microseconds.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger("zoo.compilations")

FA4_FOLDER = "~/.cache/aligned-zoo/flash-attention"
FA4_MODULE = "flash_attn.cute.interface"


@dataclass(frozen=True)
class Compilation:
    """One kernel variant that was compiled.

    compiler  triton, deep_gemm or flash_attn
    kernel    its name, as the compiler knows it
    doing     what the process was doing, in the words of who looked
    """

    compiler: str
    kernel: str
    doing: str


class Compilations:
    """What was compiled since `watch()`; `ready()` says from when on nothing should be.

    The counts are of this process, over all engines in it.
    """

    def __init__(self) -> None:
        self.found: list[Compilation] = []
        self._before_ready = 0
        self._ready = False
        self._from_triton: deque[str] = deque()
        self._lock = threading.Lock()
        self._sources: tuple[Callable[[], list[tuple[str, str]]], ...] = (self._triton, _Folder(deep_gemm_folder), _Tables())

    @property
    def after_ready(self) -> int:
        """Variants that were compiled since the last `ready()`; 0 before the first."""
        return len(self.found) - self._before_ready if self._ready else 0

    def look(self, doing: str) -> list[Compilation]:
        """What is new since the last look; after `ready()` each is logged as a warning, with what was being done."""
        with self._lock:
            fresh = [Compilation(compiler, kernel, doing) for source in self._sources for compiler, kernel in source()]
            self.found += fresh
        if self._ready:
            for one in fresh:
                LOGGER.warning("%s compiled %s after ready: %s", one.compiler, one.kernel, doing)
        return fresh

    def unready(self) -> None:
        """What is compiled from here on is expected again, until `ready`."""
        self._ready = False

    def ready(self) -> None:
        """From here on a compilation is one too many."""
        self.look("getting ready")
        self._before_ready = len(self.found)
        self._ready = True

    def heard(self, name: str) -> None:
        """Triton compiled the kernel of this name, in whatever thread."""
        self._from_triton.append(name)

    def _triton(self) -> list[tuple[str, str]]:
        found = []
        while self._from_triton:
            found.append(("triton", self._from_triton.popleft()))
        return found


class _Folder:
    """DeepGEMM's compiled kernels, a folder each."""

    def __init__(self, where: Callable[[], Path]) -> None:
        self._where = where
        self._changed = -1
        self._known: set[str] | None = None

    def __call__(self) -> list[tuple[str, str]]:
        folder = self._where()
        try:
            changed = folder.stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed == self._changed:
            return []
        self._changed = changed
        names = {entry.name for entry in os.scandir(folder)} if changed else set()
        fresh = set() if self._known is None else names - self._known  # the first look takes what earlier processes left
        self._known = names
        return [("deep_gemm", name) for name in sorted(fresh)]


class _Tables:
    """FlashAttention 4's compiled functions, a table for each of its launches. What a cache on disk gave is counted too."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def __call__(self) -> list[tuple[str, str]]:
        found = []
        for name, size in self._now():
            known = self._sizes.get(name, 0)
            found += [("flash_attn", name)] * (size - known)
            self._sizes[name] = size
        return found

    @staticmethod
    def _now() -> Iterator[tuple[str, int]]:
        interface = sys.modules.get(FA4_MODULE)
        for name in ("_flash_attn_fwd", "_flash_attn_bwd") if interface else ():
            table = vars(getattr(interface, name)).get("compile_cache")
            if table is not None:
                yield name, len(table.cache)


def deep_gemm_folder() -> Path:
    """Where DeepGEMM puts what it compiled: a folder each."""
    named = os.environ.get("DG_JIT_CACHE_DIR")  # noqa: TID251 (where a library writes; no number depends on it)
    return (Path(named) if named else Path.home() / ".deep_gemm") / "cache"


def keep() -> None:
    """Lets FlashAttention 4 keep what it compiles on disk, beside the qualifications, as Triton and DeepGEMM do without being asked.

    It reads that when it is first imported. What a user has set stays.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # noqa: TID251 (no number depends on it)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(FA4_FOLDER).expanduser()))  # noqa: TID251


@cache
def watch() -> Compilations:
    """The process's compilations; the first call begins to count. A listener that Triton had before is called as before."""
    found = Compilations()
    try:
        from triton import knobs
    except ImportError:
        pass
    else:
        before: Any = knobs.compilation.listener

        def listen(*, src: Any, cache_hit: bool, **told: Any) -> None:
            if not cache_hit:
                found.heard(getattr(src, "name", type(src).__name__))
            if before is not None:
                before(src=src, cache_hit=cache_hit, **told)

        knobs.compilation.listener = listen
    found.look("beginning")
    return found
