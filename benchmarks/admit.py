"""`python -m benchmarks admit TARGET ...`: qualifies providers at the shapes that a benchmark uses, each in a process of its own.

Most of a qualification is just-in-time compilation, so targets side by side take little longer than the slowest one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.common import in_parallel
from zoo.common import qualification
from zoo.common.fingerprint import toolchain
from zoo.common.program import Program
from zoo.verify.qualify import Target, qualify, running

ROWS = 8192


def spelled(target: Target) -> str:
    """op:NxK..., the same on the command line."""
    return f"{target.op}:{'x'.join(map(str, target.shape))}"


def parsed(text: str) -> Target:
    """ValueError unless it is op:NxK..."""
    op, _, shape = text.partition(":")
    if not shape or not all(part.isdigit() for part in shape.split("x")):
        raise ValueError(f"{text!r} is not op:NxK...")
    return Target(op, tuple(int(part) for part in shape.split("x")))


def admit(targets: Iterable[Target], program: Program, seconds: float, rows: int = ROWS) -> list[str]:
    """Verdicts for targets that have none yet; then one line per target: which provider runs it and why no other does."""
    wanted = sorted(set(targets), key=spelled)
    missing = [
        t for t in wanted if any(not qualification.tried(t.op, p, t.shape) for p in qualification.candidates(t.op, t.shape))
    ]
    with tempfile.TemporaryDirectory() as folder:
        stores = [Path(folder) / f"{i}.json" for i in range(len(missing))]
        calls = [[spelled(t), "--store", str(store), "--rows", str(rows)] for t, store in zip(missing, stores)]
        in_parallel("benchmarks.admit", calls, seconds)
        verdicts = [v for store in stores for v in qualification.read(store)]
    if verdicts:
        about = {"toolchain": toolchain(torch.device(program.device))}
        qualification.write(qualification.path_for_this_machine(), verdicts, about)
    return [f"{target}: {name}{f' ({why})' if why else ''}" for target, name, why in running(wanted, program)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks admit", description=__doc__)
    parser.add_argument("target", nargs="+", help="op:NxK..., e.g. linear:6144x4096x1")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=ROWS)
    given = parser.parse_args(argv)
    qualification.use(given.store)
    qualify([parsed(text) for text in given.target], rows=given.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
