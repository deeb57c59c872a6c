"""`python -m benchmarks.ops [OP ...]`: each op at published shapes, ours against the fastest unaligned way, in one run.

Times are medians of interleaved CUDA-graph replays over weights that rotate beyond the cache (prefill of attention and Gated
DeltaNet: eager calls between events). Before a ratio is reported a quick row law is put to the op at that very shape.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from benchmarks.admit import admit
from benchmarks.common import (
    Budget,
    EventTimer,
    GraphTimer,
    Recorder,
    Timer,
    WallClock,
    about,
    first_line,
    in_parallel,
    launches_of,
    numbers,
    rates,
    relative_error,
    table,
    verdict,
)
from benchmarks.work import OPS, Place, Work
from benchmarks.work.shapes import CONTEXTS, HEADS_OF_VOCABULARY, LINEARS, MIXTURES
from zoo.common.ops import CONTRACTS
from zoo.common.ops.log_prob import VOCABULARY_CHUNK
from zoo.common.program import Program, resolve, split_k
from zoo.testing import LawBroken, assert_same_bytes
from zoo.verify.qualify import Target

ROWS = (1, 8, 32, 64, 256, 4096)
GEMM_ROWS = (*ROWS, 8192)
AIM = 1.02  # a slower row is profiled


def measure(work: Work, timer: Timer, program: Program) -> dict[str, Any]:
    """One row: times, ratio and errors. A rival that fails is named in `failed` and left out; ours failing raises."""
    first = next(iter(work.ours))
    broken = ""
    failed = {}
    try:
        work.law()
    except LawBroken as error:
        broken = str(error)[:200]
    outs = {name: work.picked(call(0)) for name, call in work.ours.items()}
    contenders = dict(work.ours)
    for name, call in work.rivals.items():
        try:
            outs[name] = work.picked(call(0))
            contenders[name] = call
        except Exception as error:  # whatever a rival fails with
            failed[name] = first_line(error)
    for name in list(work.ours)[1:]:
        try:
            assert_same_bytes(outs[name], outs[first], f"{name} against {first}")
        except LawBroken as error:
            broken = broken or str(error)[:200]
    calls = {name: [lambda i=i, f=call: f(i) for i in range(work.sets)] for name, call in contenders.items()}
    times = timer.compare(calls)
    row = {"kind": "op", "op": work.op, "shape": work.shape, "rows": work.rows}
    row |= verdict(times[first], {name: times[name] for name in work.rivals if name in times}, broken)
    row |= rates(times[first], work.flops, work.nbytes)
    row["error_vs_fp64"] = row["rival_error_vs_fp64"] = None
    if work.exact is not None:
        exact = work.exact()
        outs |= {name: call() for name, call in work.last.items() if name in outs}
        row["error_vs_fp64"] = relative_error(outs[first], exact)
        if row["rival"]:
            row["rival_error_vs_fp64"] = relative_error(outs[row["rival"]], exact)
    row["provider"] = "/".join(CONTRACTS[t.op].provider(program, t.shape).name for t in work.targets) or program.byte_class(work.op)
    row["timing"] = "events" if work.eager else "graph"
    row["others"] = {name: us for name, us in times.items() if name not in (first, row["rival"])}
    if program.device == "cuda" and (row["ratio"] or 0) > AIM:  # where the time goes that the aim misses
        row["profile"] = {name: launches_of(calls[name][0]) for name in (first, row["rival"])}
    return row | ({"failed": failed} if failed else {})


def lines(rows: Sequence[dict[str, Any]]) -> str:
    keys = ("op", "shape", "rows", "us", "tflops", "gbps", "rival", "rival_us", "ratio", "provider")
    body = [[*(row.get(key) for key in keys), "" if row.get("bytes") == "equal" else row.get("bytes", row.get("error"))] for row in rows]
    return table(body, ("op", "shape", "rows", "us", "TFLOP/s", "GB/s", "rival", "rival us", "ratio", "ours by", ""))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__)
    made.add_argument("op", nargs="*", help=f"of {', '.join(OPS)}; all by default")
    made.add_argument("--rows", help="row counts, e.g. 1,64,4096")
    made.add_argument("--shapes", default="", help="regular expression on the shape's name, e.g. qwen3-8b")
    made.add_argument("--out", type=Path, help="append JSON rows to this file")
    made.add_argument("--budget", type=float, default=600, help="seconds in all")
    made.add_argument("--warm", type=int, default=0, help="compile in so many processes first")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--smoke", action="store_true", help="tiny shapes and a wall clock: proves plumbing, writes nothing")
    made.add_argument("--compile-only", metavar="I/N", help="run every N-th shape once, untimed")
    return made


def main(argv: Sequence[str] | None = None, timer: Timer | None = None) -> int:
    given = parser().parse_args(argv)
    names = given.op or list(OPS)
    unknown = [name for name in names if name not in OPS]
    if unknown:
        print(f"error: there is no op {unknown[0]!r}; there are {', '.join(OPS)}", file=sys.stderr)
        return 2
    if given.device == "cpu" and not given.smoke:
        print("error: --device cpu runs references on a wall clock: add --smoke", file=sys.stderr)
        return 2
    device = torch.device(given.device)
    budget = Budget(given.budget)
    try:
        record = Recorder(given.out, about(device, given.smoke), given.smoke)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    dtype = torch.bfloat16
    cuda = device.type == "cuda"
    theirs = resolve("unaligned", device, dtype) if cuda else None
    place = Place(device, resolve("aligned", device, dtype), theirs, contexts=(70,) if given.smoke else CONTEXTS, tiny=given.smoke)
    graph, events = (timer, timer) if timer else (WallClock(), WallClock()) if not cuda else (GraphTimer(), EventTimer())
    asked = numbers(given.rows) if given.rows else None
    plan = [(name, rows) for name in names for rows in asked or ((1, 8) if given.smoke else GEMM_ROWS if name == "linear" else ROWS)]
    if given.warm and cuda:
        passed = [*names, "--shapes", given.shapes, *(["--rows", given.rows] if given.rows else [])]
        in_parallel("benchmarks.ops", [[*passed, "--compile-only", f"{i}/{given.warm}"] for i in range(given.warm)], budget.left / 2)
    part, parts = map(int, given.compile_only.split("/")) if given.compile_only else (0, 1)
    torch.manual_seed(0)
    # compiled rivals get a kernel of their own for every shape
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=8192):
        if cuda and not given.compile_only:
            _admit(place, names, given.shapes, budget)
        for number, (name, rows) in enumerate(plan):
            if number % parts != part or not budget.allows(f"{name}, {rows} rows", 2.0):
                continue
            for work in OPS[name](place, rows):
                if not re.search(given.shapes, work.shape) or not budget.allows(f"{name} {work.shape}, {rows} rows"):
                    continue
                if given.compile_only:
                    _once(work)
                    continue
                try:
                    record.add(measure(work, events if work.eager else graph, place.ours))
                except Exception as error:  # one shape that fails leaves the others their rows
                    record.add({"kind": "op", "op": name, "shape": work.shape, "rows": rows, "error": first_line(error)})
                del work
            if cuda:
                torch.cuda.empty_cache()
    if not given.compile_only:
        print(("smoke run: these times mean nothing\n" if given.smoke else "") + lines(record.rows))
        if budget.skipped:
            print(f"skipped: budget: {len(budget.skipped)} of the plan")
    return 0


def _once(work: Work) -> None:
    for call in (*work.ours.values(), *work.rivals.values()):
        try:
            call(0)
        except Exception as error:  # whatever fails here fails again, with a row, in the timed run
            print(f"{work.op} {work.shape}: {first_line(error)}")


def _admit(place: Place, names: Sequence[str], shapes: str, budget: Budget) -> None:
    """Qualifies what `linear` and `experts` are about to use, from the tables alone."""
    targets = []
    if "linear" in names:
        for model, each in LINEARS.items():
            for name, (n, k, wide) in each.items():
                if re.search(shapes, f"{model} {name} {n}x{k}" + (" fp32" if wide else "")):
                    targets.append(Target("linear", (n, k, split_k(n, k))))
    if "log_prob" in names:
        for model, (v, k) in HEADS_OF_VOCABULARY.items():
            if re.search(shapes, f"{model} {v}x{k}"):
                targets += [Target("linear", (n, k, 1)) for n in (v, VOCABULARY_CHUNK, v % VOCABULARY_CHUNK or VOCABULARY_CHUNK)]
    if "experts" in names:
        targets += [Target("experts", (x, d, f)) for m, (x, d, f, k) in MIXTURES.items() if re.search(shapes, f"{m} {x}x{d}x{f} top {k}")]
    if targets:
        print("\n".join(admit(targets, place.ours, budget.left / 3)), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
