"""Qualification before a benchmark, and which provider runs each shape: lines for its rows."""

from __future__ import annotations

from collections.abc import Iterable

from zoo.common.program import Program
from zoo.verify.qualify import Target, qualify, running


def admit(targets: Iterable[Target], program: Program, seconds: float) -> list[str]:
    """Qualifies what has no verdict yet; then one line per target: which provider runs it and why no other does."""
    wanted = sorted(set(targets), key=str)
    qualify(wanted, lambda text: print(f"# {text}", flush=True), program=program, seconds=seconds)
    return [f"{target}: {name}{f' ({why})' if why else ''}" for target, name, why in running(wanted, program)]
