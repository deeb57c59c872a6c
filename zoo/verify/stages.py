"""How long each stage of a command took, for its last line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Seconds by stage, in the order in which stages began; one that comes again is added to."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What runs inside it is this stage, also where it fails."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begin)

    def __str__(self) -> str:
        """Such as "took 9.1 s: building 2.0, rung 1 3.5, rung 3 3.1"."""
        listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"took {time.monotonic() - self._begin:.1f} s: {listed}"
