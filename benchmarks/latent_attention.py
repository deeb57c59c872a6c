"""Attention over selected rows at GLM-5.2's geometry: decode steps beside FlashMLA as SGLang calls it, and the backward's time and memory.

  python -m benchmarks.latent_attention [--sections decode,backward] [--out rows.jsonl]

decode: microseconds of one layer's attention, 2048 of 4096 tokens listed a sequence, in CUDA graphs that replay whole turns. Ours is the
op, with the launch that finds the listed rows in the pages (a chain of layers that share a choice pays it once) and without it. The rivals
are FlashMLA's sparse kernel with places that lie ready, and its dense kernel over 2048 tokens in pages, which reads as many bytes.
backward: milliseconds of one document's, and the memory that it holds beyond inputs, outputs and their gradients. Needs a GPU of the
Hopper class and FlashMLA (the extra flashmla).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import GraphTimer, Recorder, about, first_line, table
from benchmarks.work.latent import listed
from zoo.common import ops
from zoo.common.history import TokenRows
from zoo.common.ops.contract import CONTRACTS
from zoo.common.program import resolve
from zoo.common.rows import Rows

HEADS = 64
WIDTH = 576
VALUES = 512
LISTED = 2048
CONTEXT = 4096
PAGE = 64
SCALE = 256**-0.5
BATCHES = (1, 8, 32, 64)
DOCUMENTS = (4096, 8192, 16384, 32768)
LAYERS = 4  # that share a choice: one chooses, three read the same


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def decode() -> Iterator[dict[str, Any]]:
    from sgl_kernel import flash_mla

    program = resolve("aligned", "cuda", torch.bfloat16, 16)
    for batch in BATCHES:
        blocks = CONTEXT // PAGE
        pools = [floats(batch * blocks + 1, PAGE, WIDTH) for _ in range(LAYERS)]
        q = floats(batch, HEADS, WIDTH)
        table_NB = 1 + torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
        chosen = torch.rand(batch, CONTEXT, device="cuda").argsort(1)[:, :LISTED]
        positions = chosen.sort(1).values.to(torch.int32)
        rows = Rows.pushed([1] * batch, [CONTEXT - 1] * batch, "cuda")
        places = table_NB.gather(1, positions.long() // PAGE) * PAGE + positions % PAGE
        places = places[:, None].contiguous()
        used = torch.full((batch,), LISTED, dtype=torch.int32, device="cuda")

        def ours(layer: int, pools: Any = pools, q: Tensor = q, t: Tensor = table_NB, p: Tensor = positions, rows: Rows = rows) -> Tensor:
            if layer == 0:
                rows.launch.clear()
            return ops.sparse_attention(q, TokenRows(pools[layer], t), p, rows, VALUES, SCALE, program=program)

        def alone(layer: int, pools: Any = pools, q: Tensor = q, t: Tensor = table_NB, p: Tensor = positions, rows: Rows = rows) -> Tensor:
            rows.launch.clear()
            return ops.sparse_attention(q, TokenRows(pools[layer], t), p, rows, VALUES, SCALE, program=program)

        def sparse(layer: int, pools: Any = pools, q: Tensor = q, places: Tensor = places) -> Tensor:
            return flash_mla.flash_mla_sparse_fwd(q, pools[layer].view(-1, 1, WIDTH), places, SCALE, VALUES)[0]

        contenders: dict[str, Callable[[int], Any]] = {"ours": ours, "ours, lists of one layer": alone, "FlashMLA sparse": sparse}
        try:
            plan, splits = flash_mla.get_mla_metadata(used, HEADS, 1)
            part = table_NB[:, : LISTED // PAGE].contiguous()

            def dense(
                layer: int, pools: Any = pools, q: Tensor = q, part: Tensor = part, used: Tensor = used, plan: Any = (plan, splits)
            ) -> Any:
                cache = pools[layer][:, :, None]
                return flash_mla.flash_mla_with_kvcache(q[:, None], cache, part, used, VALUES, *plan, SCALE, True)[0]

            dense(0)
            contenders["FlashMLA dense over as many"] = dense
        except Exception as error:  # a rival that fails is named and left out
            print(f"FlashMLA dense, batch {batch}: {first_line(error)}", flush=True)
        calls = {name: [lambda i=i, call=call: call(i) for i in range(LAYERS)] for name, call in contenders.items()}
        with torch.no_grad():
            times = GraphTimer().compare(calls)
        yield {
            "section": "decode",
            "batch": batch,
            "listed": LISTED,
            "us": times,
            "rows of one layer read, bytes": 2.0 * batch * LISTED * WIDTH,
        }


def recent(rows: int) -> Tensor:
    """Each row's last tokens, ascending, -1 behind them."""
    row = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None]
    place = (row - LISTED + 1).clamp(min=0) + torch.arange(LISTED, dtype=torch.int32, device="cuda")
    return torch.where(place <= row, place, -1)


def spread(rows: int) -> Tensor:
    """As many tokens, random ones of those that a row sees."""
    return listed(rows, rows, LISTED, torch.device("cuda"), future=False)


def backward() -> Iterator[dict[str, Any]]:
    functions = next(p for p in CONTRACTS["sparse_attention"].providers if p.name == "flash_mla").functions
    for kind, choose in (("spread", spread), ("recent", recent)):
        for rows in DOCUMENTS:
            if kind == "recent" and rows != DOCUMENTS[-1]:
                continue
            positions = choose(rows)
            at = Rows.packed(torch.tensor([0, rows], device="cuda"))
            q = floats(rows, HEADS, WIDTH)
            latent = floats(rows, WIDTH)
            grad = floats(rows, HEADS, VALUES)
            timed = []
            out, lse = functions.forward(q, latent, None, positions, at, VALUES, SCALE)
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for turn in range(3):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                ends[0].record()
                grads = functions.backward(grad, q, latent, positions, out, lse, at, SCALE)
                ends[1].record()
                torch.cuda.synchronize()
                scratch = torch.cuda.max_memory_allocated() - held - sum(g.nbytes for g in grads)
                if turn:
                    timed.append(ends[0].elapsed_time(ends[1]))
                del grads
            ends[0].record()
            functions.forward(q, latent, None, positions, at, VALUES, SCALE)
            ends[1].record()
            torch.cuda.synchronize()
            yield {
                "section": "backward",
                "tokens": rows,
                "lists": kind,
                "ms": min(timed),
                "forward_ms": ends[0].elapsed_time(ends[1]),
                "scratch_bytes": scratch,
            }
            del positions, q, latent, grad, out, lse
            torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"decode": decode, "backward": backward}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latent_attention", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, help="append JSON rows to this file")
    given = parser.parse_args(arguments)
    try:
        record = Recorder(given.out, about(torch.device("cuda"), False))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    lines: dict[str, list[list[Any]]] = {}
    for name in given.sections.split(","):
        for row in SECTIONS[name]():
            record.add({"kind": "latent attention", **row})
            if name == "decode":
                lines.setdefault(name, []).append([row["batch"], *row["us"].values()])
                header = ("batch", *row["us"])
            else:
                lines.setdefault(name, []).append([row["tokens"], row["lists"], row["ms"], row["forward_ms"], row["scratch_bytes"] / 2**30])
                header = ("tokens", "lists", "backward ms", "forward ms", "scratch GiB")
            print(row, flush=True)
        print(table(lines[name], header), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
