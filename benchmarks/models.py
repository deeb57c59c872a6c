"""`python -m benchmarks.models ARCH`: a whole model on the `aligned` program against the `unaligned` one.

Same drivers, same parameters (one copy), same GPU, same run, turn by turn. A few documents are first scored, prefilled and
decoded by CUDA graph: if those bytes differ, times are shown and no ratio is. A document's log-probabilities under both programs are
also held against the same model in float64.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.admit import admit
from benchmarks.common import USUAL_HELP, USUAL_SIZES, Budget, Recorder, about, first_line, geometry, has_slots, in_parallel, numbers
from benchmarks.models_ablation import ablate, mixed, shares, switchable
from benchmarks.models_accuracy import accuracy
from benchmarks.models_bench import Bench, free, lines, twin
from benchmarks.models_parts import decode, ladder, prefill, prove, score, train
from zoo.common.family import Family
from zoo.common.ops import CONTRACTS
from zoo.common.program import Program, resolve
from zoo.common.registry import architectures
from zoo.verify.qualify import targets_of

__all__ = ["Bench", "main", "mixed", "prove", "shares", "switchable", "twin"]

PARTS = ("ladder", "accuracy", "decode", "prefill", "score", "train", "long")
LONG = 32768
PROOF = (130, 65, 600)
# what --smoke takes where nothing else is asked for: on one core the references need seconds for it, hours for a published size
SMOKE = {"size": "tiny", "batches": "1,2", "contexts": "100", "documents": 2, "length": 130, "lengths": "70,33", "tokens": 70}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    made.add_argument("arch", choices=tuple(architectures()))
    made.add_argument("--size", help=USUAL_HELP)
    made.add_argument("--layers", type=int)
    made.add_argument("--what", default="ladder,accuracy,decode,prefill,score", help=f"of {','.join(PARTS)}")
    made.add_argument("--batches", help="sequences of a decode step; 1,8,64, or 1,8,32 where a sequence has a state")
    made.add_argument("--contexts", default="600,4096")
    made.add_argument("--documents", type=int, default=8, help="documents scored, prefilled and trained at once")
    made.add_argument("--length", type=int, default=4096, help="tokens of each")
    made.add_argument("--lengths", help="documents whose bytes are compared before anything is timed")
    made.add_argument("--tokens", type=int, default=600, help="of the document that is held against float64")
    made.add_argument("--ablate", action="store_true", help="added time per aligned op, of decode and score where asked for")
    made.add_argument("--profile", action="store_true", help="the kernels of a decode step, and of a train step")
    made.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, help="append JSON rows to this file")
    made.add_argument("--budget", type=float, default=600, help="seconds in all")
    made.add_argument("--warm", action="store_true", help="first compile everything with few layers, part by part in parallel")
    made.add_argument("--compile-only", action="store_true", help="run everything once with few layers, untimed")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--smoke", action="store_true", help="for the CPU: a tiny model and few tokens; proves plumbing, writes nothing")
    return made


def _rival(config: Any, family: Family) -> Program:
    """`unaligned`, or, where a library that it needs is missing, the same with our own kernel for that op, and said so."""
    program = resolve("unaligned", "cuda", torch.bfloat16, family.contributors)
    used = family.used_ops(config)
    ours = [op for op in ("select", "sparse_attention") if op in used]
    if ours:
        kernel = "FlashMLA's in both where it serves" if "sparse_attention" in ours else "ours"
        print(f"rival: {' and '.join(ours)} have one class in both programs (attention over lists is {kernel})", flush=True)
    if "gated_delta" in used:
        wanted = program.byte_class("gated_delta")
        provider = next(p for p in CONTRACTS["gated_delta"].providers if p.byte_class == wanted)
        try:
            provider.load()
        except ImportError as error:
            print(f"rival: gated_delta stays aligned ({first_line(error)})", flush=True)
            return mixed(["gated_delta"], family.contributors)
    return program


def _warm(arch: str, given: argparse.Namespace, parts: Sequence[str], batches: Sequence[int], seconds: float) -> None:
    """A process per part and decode batch, so that compilers run side by side."""
    shared = [arch, "--size", given.size, "--documents", str(given.documents), "--length", str(given.length)]
    shared += ["--tokens", str(given.tokens), "--compile-only"]
    calls = [[*shared, "--what", part] for part in parts if part not in ("decode", "long")]
    if "decode" in parts:
        calls += [[*shared, "--what", "decode", "--batches", str(b), "--contexts", given.contexts] for b in batches]
    in_parallel("benchmarks.models", calls, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parser()
    given = options.parse_args(argv)
    if given.smoke:
        options.set_defaults(**SMOKE)
        given = options.parse_args(argv)
    given.size = USUAL_SIZES[given.arch] if given.size is None else given.size
    if given.engine == "sglang":  # a server of its own: its own program
        layers = [] if given.layers is None else ["--layers", str(given.layers)]
        out = [] if given.out is None else ["--out", str(given.out)]
        profile = ["--profile"] if given.profile else []
        passed = [given.arch, "--size", given.size, "--budget", str(given.budget), *layers, *profile, *out]
        return int(importlib.import_module("benchmarks.sglang").main(passed) or 0)
    parts = given.what.split(",")
    try:
        unknown = [part for part in parts if part not in PARTS]
        if unknown:
            raise ValueError(f"--what {unknown[0]}: there are {', '.join(PARTS)}")
        if given.device == "cpu" and not given.smoke:
            raise ValueError("--device cpu runs references on a wall clock: add --smoke")
        if given.tokens < 2:
            raise ValueError(f"--tokens {given.tokens}: the last token has no next one, so 2 are needed")
        few = 4  # every kind of layer of every family
        config, trainer, server = geometry(given.arch, given.size, few if given.compile_only else given.layers)
        batches = numbers(given.batches or ("1,8,32" if has_slots(config) else "1,8,64"))
        contexts = numbers(given.contexts)
        lengths = numbers(given.lengths) if given.lengths else PROOF
        record = Recorder(given.out, about(torch.device(given.device), given.smoke), given.smoke)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    budget = Budget(given.budget)
    device = torch.device(given.device)
    aligned = resolve("aligned", device, torch.bfloat16, trainer.family.contributors)
    cuda = device.type == "cuda"
    bench_rival = _rival(config, trainer.family) if cuda else None
    providers: dict[str, str] = {}
    if cuda:
        with torch.device("meta"):
            targets = targets_of(server(config, aligned))
        if not given.compile_only:
            found = admit(targets, aligned, budget.left / 3)
            print("\n".join(found), flush=True)
            providers = dict(line.split(": ", 1) for line in found)
            if given.warm:
                _warm(given.arch, given, parts, batches, budget.left / 2)
    torch.manual_seed(given.seed)
    source = trainer.from_config(config, seed=given.seed, device=device, program="aligned")
    bench = Bench(given.arch, given.size, config, aligned, bench_rival, source, trainer, server, budget, record, providers=providers)
    if given.compile_only or not cuda:
        bench.rounds = 1
    for what, run in _plan(bench, given, parts, batches, contexts, lengths):
        try:
            run()
        except Exception as error:  # one part that fails leaves the others their rows
            record.add({"kind": "model", "arch": given.arch, "size": given.size, "what": what, "error": first_line(error)})
            print(f"{what}: {first_line(error)}", flush=True)
            free(bench)
    print(("smoke run: these times mean nothing\n" if given.smoke else "") + lines(record.rows))
    return 1 if bench.broken else 0


def _plan(
    bench: Bench, given: argparse.Namespace, parts: Sequence[str], batches: list[int], contexts: list[int], lengths: Sequence[int]
) -> Iterator[tuple[str, Callable[[], None]]]:
    size = (given.documents, given.length)
    if not given.compile_only or "ladder" in parts:
        crossing = (4096, 2100) if "ladder" in parts and not given.lengths and not given.smoke else ()
        yield "ladder", lambda: ladder(bench, (*lengths, *crossing))
    if "accuracy" in parts:
        yield "accuracy", lambda: accuracy(bench, given.tokens)
    if "decode" in parts:
        yield "decode", lambda: decode(bench, batches, contexts, given.profile)
    if "prefill" in parts:
        yield "prefill", lambda: prefill(bench, *size)
    if "score" in parts:
        yield "score", lambda: score(bench, *size)
    if given.ablate and bench.rival is not None:
        yield "ablate", lambda: ablate(bench, sorted({batches[0], batches[-1]}), contexts[0], *size, parts)
    if "train" in parts:
        yield "train", lambda: train(bench, *size, profiled=given.profile)
    if "long" in parts:
        yield "long", lambda: train(bench, 1, LONG, "long", (True,), rounds=2)


if __name__ == "__main__":
    raise SystemExit(main())
