"""The FP8 selector beside DeepGEMM's scorer alone: a decode step and a whole prefill, and what each part of it takes.

  python -m benchmarks.selector [--keys 4096,32768] [--rows 1,8,32,64] [--out rows.jsonl]

32 heads of 128, the best 2048, pages of 64, as GLM-5.2 has them. Decode is timed as a CUDA graph, prefill is not captured. "order" lines
say how many scores of our Triton scorer differ from DeepGEMM's. Needs an NVIDIA GPU of the Hopper class and `deep_gemm`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Recorder, about
from zoo.common import ops
from zoo.common.history import CodedRows
from zoo.common.ops.fp8_select import kernels
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import as_integers

HEADS = 32
WIDTH = 128
TOP_K = 2048
PAGE = 64


def operands(rows: int, keys: int, sequences: int) -> tuple[Tensor, Tensor, CodedRows]:
    """Queries, their heads' weights and a memory of pages, every sequence's own and in any order."""
    draw = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(rows, HEADS, WIDTH, device="cuda", generator=draw).bfloat16()
    gates = torch.randn(rows, HEADS, device="cuda", generator=draw).bfloat16()
    blocks = keys // PAGE
    block = torch.empty(sequences * blocks + 1, PAGE * (WIDTH + 4), dtype=torch.uint8, device="cuda")
    codes = block[:, : PAGE * WIDTH].view(torch.float8_e4m3fn).unflatten(1, (PAGE, WIDTH))
    scales = block[:, PAGE * WIDTH :].view(torch.float32).unflatten(1, (PAGE, 1))
    codes.copy_((torch.randn(codes.shape, device="cuda", generator=draw) * 150).clamp(-448, 448))
    scales.copy_(torch.rand(scales.shape, device="cuda", generator=draw) * 0.01 + 0.005)
    table = (1 + torch.randperm(sequences * blocks, device="cuda", generator=draw)).int().view(sequences, blocks)
    return q, gates, CodedRows(codes, scales, table)


def captured(run: Callable[[], Any]) -> float:
    """Microseconds of one call of a captured graph."""
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()  # it begins on a stream of its own, which waits for nothing
    return 1000.0 * float(do_bench_cudagraph(run, rep=50))


def timed(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return 1000.0 * float(do_bench(run, warmup=50, rep=300))


def decode(record: Recorder, rows: int, keys: int) -> None:
    import deep_gemm

    q, gates, memory = operands(rows, keys, rows)
    at = torch.full((rows,), keys - 1, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    step = Rows(at, starts[:-1].long(), starts, (at + 1).int(), max_rows=1, max_length=keys)
    program = resolve("aligned", "cuda", torch.bfloat16, 16)
    codes, folded = kernels.fold_queries(q, gates)
    lengths = (at + 1).int()[:, None]
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
    pages = kernels.joined_pages(memory)

    def alone() -> Tensor:
        return deep_gemm.fp8_paged_mqa_logits(codes[:, None], pages, folded, lengths, memory.page_table_NB, plan, keys)

    scores = alone()
    out = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")
    step_of_layer = lambda: ops.fp8_select(q, gates, memory, step, TOP_K, program=program)  # noqa: E731
    _line(
        record,
        "decode",
        rows,
        keys,
        captured(step_of_layer),
        captured(alone),
        queries_us=captured(lambda: kernels.fold_queries(q, gates)),
        choice_us=captured(lambda: kernels.choose(scores, 0, out, step)),
    )


def prefill(record: Recorder, keys: int) -> None:
    """One document of so many tokens, against one call of DeepGEMM for as many rows as the selector scores at a time."""
    import deep_gemm

    q, gates, memory = operands(keys, keys, 1)
    codes_TE = memory.codes.view(torch.uint8)[1:].flatten(0, 1).contiguous().view(torch.float8_e4m3fn)
    scales_T1 = memory.scales[1:].flatten(0, 1).contiguous()
    rows = Rows.packed(torch.tensor([0, keys], device="cuda"))
    program = resolve("aligned", "cuda", torch.bfloat16, 16)
    codes, folded = kernels.fold_queries(q, gates)
    begin = torch.zeros(keys, dtype=torch.int32, device="cuda")
    end = torch.arange(1, keys + 1, dtype=torch.int32, device="cuda")
    blocks = list(kernels._blocks(keys, keys, 128 // HEADS * deep_gemm.get_num_sms()))

    def alone() -> None:
        for first, count in blocks:
            mine = slice(first, first + count)
            deep_gemm.fp8_mqa_logits(codes[mine], (codes_TE, scales_T1[:, 0]), folded[mine], begin[mine], end[mine], False, keys)

    def choice() -> None:
        for first, count in blocks:
            kernels.choose(held[:count], first, out, rows)

    held = torch.randn(max(count for _, count in blocks), keys, device="cuda")
    out = torch.empty(keys, TOP_K, dtype=torch.int32, device="cuda")
    packed = CodedRows(codes_TE, scales_T1)
    whole = timed(lambda: ops.fp8_select(q, gates, packed, rows, TOP_K, program=program))
    _line(
        record,
        "prefill",
        keys,
        keys,
        whole,
        timed(alone),
        queries_us=timed(lambda: kernels.fold_queries(q, gates)),
        choice_us=timed(choice),
    )


def order(record: Recorder, heads: int) -> None:
    """Whether our scorer has DeepGEMM's bytes, where it would be asked: it isn't."""
    draw = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(512, heads, WIDTH, device="cuda", generator=draw).bfloat16()
    gates = torch.randn(512, heads, device="cuda", generator=draw).bfloat16()
    key = (torch.randn(512, WIDTH, device="cuda", generator=draw) * 150).clamp(-448, 448).to(torch.float8_e4m3fn)
    keys = CodedRows(key, torch.rand(512, 1, device="cuda", generator=draw))
    rows = Rows.packed(torch.tensor([0, 512], device="cuda"))
    given = (*kernels.fold_queries(q, gates), keys, rows)
    seen = torch.ones(512, 512, dtype=torch.bool, device="cuda").tril()
    ours, theirs = (torch.cat([block for _, block in make(*given)])[seen] for make in (kernels.triton_scores, kernels.deepgemm_scores))
    bad = int((as_integers(ours) != as_integers(theirs)).sum())
    record.add({"kind": "selector", "what": "order", "heads": heads, "compared": ours.numel(), "differing": bad})
    print(f"order, {heads} heads: {bad} of {ours.numel()} scores differ between Triton and DeepGEMM", flush=True)


def _line(record: Recorder, what: str, rows: int, keys: int, us: float, alone_us: float, **parts: float) -> None:
    ratio = us / alone_us
    record.add({"kind": "selector", "what": what, "rows": rows, "keys": keys, "us": us, "deepgemm_us": alone_us, "ratio": ratio, **parts})
    more = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    print(f"{what}, {rows} rows, {keys} keys: {us:.1f} us, DeepGEMM's scores alone {alone_us:.1f}, ratio {ratio:.2f} ({more})", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selector", description=__doc__.split("\n")[0])
    parser.add_argument("--keys", default="4096,32768")
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--out", type=Path, help="append JSON rows to this file")
    given = parser.parse_args(arguments)
    record = Recorder(given.out, about(torch.device("cuda"), False))
    with torch.no_grad():
        for heads in (32, 64):
            order(record, heads)
        for keys in map(int, given.keys.split(",")):
            for rows in map(int, given.rows.split(",")):
                decode(record, rows, keys)
            prefill(record, keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
