"""Which kernels of outside libraries may serve an FP8 or sparse class: bytes of a row at other row counts, neighbours and places.

  python -m benchmarks.library_classes [--sections gemm,grouped,scores,sparse] [--out rows.jsonl]

An op's class may rest on a library's kernel only if a row has one result however it is launched. A line says how many elements differ
between two launches that the contract calls equal; each section has a control whose operands differ in one place and must be seen. A
section is a process of its own, since a kernel that fails may poison its process for the others. Needs an NVIDIA GPU of the Hopper
class, `deep_gemm` (gemm, grouped, scores) and `sgl_kernel` (sparse).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Recorder, about
from zoo.testing import as_integers

ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 128, 129, 300, 1024, 4096)
# (name, N, K) of GLM-5.2's projections as they are fused
GLM = (
    ("q_a and kv_a", 2624, 6144),
    ("q_b", 16384, 2048),
    ("o", 6144, 16384),
    ("dense gate_up", 24576, 6144),
    ("dense down", 6144, 12288),
    ("expert gate_up", 4096, 6144),
    ("expert down", 6144, 2048),
)
GROUP = 128
LARGEST = 448.0
Finding = tuple[str, int, int]  # what was compared, elements, elements that differ


def codes_of(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes and an FP32 scale of each row's groups of 128."""
    from deep_gemm.utils.math import per_token_cast_to_fp8

    found: tuple[Tensor, Tensor] = per_token_cast_to_fp8(x_RK, False)
    return found


def weight_codes(n: int, k: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes of a random weight and the scales of its blocks of 128 by 128."""
    codes = (torch.randn(n, k, device="cuda", generator=draw) * 64).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    blocks = (-(-n // GROUP), -(-k // GROUP))
    return codes, torch.rand(blocks, device="cuda", generator=draw) * 1e-3 + 1e-4


def differing(what: str, a: Tensor, b: Tensor) -> Finding:
    return what, a.numel(), int((as_integers(a) != as_integers(b)).sum())


def dense(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], rows: slice = slice(None)) -> Tensor:
    import deep_gemm

    codes = x[0][rows].contiguous()
    scales = x[1][rows].contiguous()
    out = torch.empty(codes.shape[0], weight[0].shape[0], dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt((codes, scales), weight, out)
    return out


def gemm(draw: torch.Generator) -> Iterator[Finding]:
    """DeepGEMM's FP8 product with itself at other row counts."""
    for name, n, k in GLM:
        x = codes_of(torch.randn(ROWS[-1], k, device="cuda", generator=draw))
        weight = weight_codes(n, k, draw)
        whole = dense(x, weight)
        for rows in ROWS[:-1]:
            yield differing(f"{name} {n} x {k}, {rows} rows", dense(x, weight, slice(rows)), whole[:rows])
        last = slice(ROWS[-1] - 7, ROWS[-1])
        yield differing(f"{name} {n} x {k}, the last 7 rows alone", dense(x, weight, last), whole[last])
    other = (weight[0], weight[1].clone())
    other[1][0, 0] *= 1 + 2.0**-7
    yield differing("control: one scale another", dense(x, other), whole)


def grouped(draw: torch.Generator) -> Iterator[Finding]:
    """DeepGEMM's contiguous grouped product with its dense one, row by row; groups of unequal length, one empty."""
    import deep_gemm

    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    counts = (5, 130, 0, 1, 64, 300, 17, 129)
    for name, n, k in GLM[-2:]:
        weights = [weight_codes(n, k, draw) for _ in counts]
        stacked = (torch.stack([w for w, _ in weights]), torch.stack([s for _, s in weights]))
        padded = [-(-count // alignment) * alignment for count in counts]
        x = codes_of(torch.randn(sum(padded), k, device="cuda", generator=draw))
        owner = torch.full((sum(padded),), -1, dtype=torch.int32, device="cuda")
        begins = [sum(padded[:i]) for i in range(len(counts))]
        for i, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            owner[begin : begin + count] = i
        out = torch.empty(sum(padded), n, dtype=torch.bfloat16, device="cuda")
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, stacked, out, owner)
        for i, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            if count:
                mine = slice(begin, begin + count)
                yield differing(f"{name} {n} x {k}, group {i} of {count} rows", out[mine], dense(x, weights[i], mine))
    yield differing("control: another group's weight", out[:5], dense(x, weights[1], slice(5)))


def scores(draw: torch.Generator) -> Iterator[Finding]:
    """DeepGEMM's index scores: alone against many rows, and the paged kernel against the packed one, pages in any order."""
    import deep_gemm

    keys = 4096
    page = 64
    width = 128
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for heads in (32, 64):
        rows = 256
        q = (torch.randn(rows, heads, width, device="cuda", generator=draw)).to(torch.float8_e4m3fn)
        weights = torch.randn(rows, heads, device="cuda", generator=draw)
        k_codes, k_scales = codes_of(torch.randn(keys, width, device="cuda", generator=draw))
        k_scales = k_scales[:, 0].contiguous()
        begin = torch.zeros(rows, dtype=torch.int32, device="cuda")
        end = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device="cuda")
        whole = deep_gemm.fp8_mqa_logits(q, (k_codes, k_scales), weights, begin, end)
        for count in (1, 2, 3, 7, 64, 65):
            part = deep_gemm.fp8_mqa_logits(q[:count].contiguous(), (k_codes, k_scales), weights[:count], begin[:count], end[:count])
            seen = slice(0, keys - rows)
            yield differing(f"{heads} heads, {count} rows alone", part[:, seen], whole[:count, seen])
        shuffled = torch.randperm(keys // page, device="cuda", generator=draw)
        cache = torch.zeros(keys // page + 1, page * (width + 4), dtype=torch.uint8, device="cuda")
        cache[1 + shuffled, : page * width] = k_codes.view(torch.uint8).view(-1, page * width)
        cache[1 + shuffled, page * width :] = k_scales.view(torch.uint8).view(-1, page * 4)
        cache = cache.view(-1, page, 1, width + 4)
        for batch in (1, 2, 8, 64):
            lengths = end[:batch, None].contiguous()
            table = (1 + shuffled).to(torch.int32)[None].expand(batch, -1).contiguous()
            plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, page, processors)
            paged = deep_gemm.fp8_paged_mqa_logits(q[:batch, None], cache, weights[:batch], lengths, table, plan, keys)
            yield differing(f"{heads} heads, paged, {batch} sequences", paged[:, : keys - rows], whole[:batch, : keys - rows])
        swapped = deep_gemm.fp8_mqa_logits(q[:1].flip(1).contiguous(), (k_codes, k_scales), weights[:1].flip(1), begin[:1], end[:1])
        yield differing(f"{heads} heads, a look beside: in the other order", swapped[:, : keys - rows], whole[:1, : keys - rows])
    other = deep_gemm.fp8_mqa_logits(q, (k_codes, k_scales * (1 + 2.0**-7)), weights, begin, end)
    yield differing("control: other scales", other[:, : keys - rows], whole[:, : keys - rows])


def sparse(draw: torch.Generator) -> Iterator[Finding]:
    """FlashMLA's sparse forward: rows alone against many, rows of memory elsewhere, lists that end early."""
    from sgl_kernel.flash_mla import flash_mla_sparse_fwd

    listed = 2048
    memory = 8192
    for width, heads in ((576, 64), (576, 128), (512, 64)):
        rows = 300
        q = torch.randn(rows, heads, width, device="cuda", generator=draw).bfloat16()
        kv = torch.randn(memory, 1, width, device="cuda", generator=draw).bfloat16()
        lists = torch.stack([torch.randperm(memory, device="cuda", generator=draw)[:listed].sort().values for _ in range(rows)])
        lists[5:9, 1000:] = -1
        lists = lists.to(torch.int32)[:, None].contiguous()

        def run(mine: slice, lists: Tensor = lists, kv: Tensor = kv, q: Tensor = q, width: int = width) -> Tensor:
            return flash_mla_sparse_fwd(q[mine].contiguous(), kv, lists[mine].contiguous(), width**-0.5, 512)[0]

        whole = run(slice(None))
        for count in (1, 2, 7, 8, 64, 65, 129):
            yield differing(f"{heads} heads of {width}, {count} rows alone", run(slice(count)), whole[:count])
        place = torch.randperm(memory, device="cuda", generator=draw)
        moved = torch.empty_like(kv)
        moved[place] = kv
        there = torch.where(lists >= 0, place[lists.clamp(min=0).long()].to(torch.int32), -1)
        yield differing(f"{heads} heads of {width}, rows of memory elsewhere", run(slice(None), there, moved), whole)
        short = lists.clone()
        short[:, :, 1024:] = -1
        narrow = short[:, :, :1024].contiguous()
        yield differing(
            f"{heads} heads of {width}, 1024 listed with and without a tail of -1", run(slice(None), narrow), run(slice(None), short)
        )
    yield differing("control: lists backwards", run(slice(None), lists.flip(2).contiguous()), whole)


SECTIONS: dict[str, Callable[[torch.Generator], Iterator[Finding]]] = {
    "gemm": gemm,
    "grouped": grouped,
    "scores": scores,
    "sparse": sparse,
}


def section(name: str) -> None:
    """Prints a JSON line a finding."""
    for what, elements, bad in SECTIONS[name](torch.Generator("cuda").manual_seed(0)):
        print(json.dumps({"section": name, "what": what, "elements": elements, "differing": bad}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library_classes", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, help="append JSON rows to this file")
    parser.add_argument("--one", choices=tuple(SECTIONS), help="run a section in this process")
    given = parser.parse_args(arguments)
    if given.one:
        section(given.one)
        return 0
    record = Recorder(given.out, about(torch.device("cuda"), False))
    for name in given.sections.split(","):
        found = subprocess.run([sys.executable, "-m", "benchmarks.library_classes", "--one", name], capture_output=True, text=True)
        rows: list[dict[str, Any]] = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
        for row in rows:
            record.add({"kind": "library bytes", **row})
            print(f"{name}: {row['what']}: {row['differing']} of {row['elements']} differ", flush=True)
        if found.returncode:
            reason = (found.stderr.strip().splitlines() or [f"status {found.returncode}"])[-1]
            record.add({"kind": "library bytes", "section": name, "failed": reason[:300]})
            print(f"{name}: failed: {reason}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
