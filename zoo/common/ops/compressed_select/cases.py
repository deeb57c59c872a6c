"""Cases of compressed_select: packed documents, and the same pushed through pages with one row for several tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zoo.common.history import CompressedRows
from zoo.common.ops.attention.cases import PagePlace, laid_out
from zoo.common.ops.cases import Case, Documents, Draw, Product, Trial, pushes, repeat
from zoo.common.ops.compressed_select import Functions
from zoo.common.ops.contract import Provider
from zoo.common.ops.sparse_attention.cases import packed_rows
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import Args, Plan, assert_place_law, assert_row_law, assert_same_bytes, assert_split_law, split_plans

INPUTS = ("q_RHE", "weights_RH", "key_RE")
PLACES = {
    "pages in order": PagePlace(48, fill=0.0, spare=1),
    "dead pages of NaN": PagePlace(48),
    "shuffled pages of 12": PagePlace(12, order=1, spare=9),
    "shuffled pages of 144": PagePlace(144, order=3, fill=torch.inf),
    "reversed pages of 96, wide table": PagePlace(96, order=-1, columns=7, fill=-3e38),
}
Pushed = Callable[[dict[str, Tensor], Tensor, Rows, Tensor], Tensor]


def compressed_pages(total: int, place: PagePlace, tokens: int, row_RE: Tensor, owned: list[list[int]]) -> Tensor:
    """[P, page / tokens, E] of `place.fill`, zeros where a document's pages are."""
    pages = torch.full((total, place.page_size // tokens, row_RE.shape[1]), place.fill, dtype=row_RE.dtype, device=row_RE.device)
    for mine in owned:
        pages[mine] = 0
    return pages


def write_compressed(pages: Tensor, row_RE: Tensor, table_NB: Tensor, rows: Rows, tokens: int) -> None:
    """Rows of tokens that complete one into their pages."""
    index_R = rows.positions_R // tokens
    page_R = table_NB[rows.sequence_R, index_R // pages.shape[1]].long()
    done = (rows.positions_R + 1) % tokens == 0
    pages[page_R[done], index_R[done] % pages.shape[1]] = row_RE[done]


def push(lengths: list[int], kept: dict[str, tuple[Tensor, int]], plan: Plan, place: PagePlace, step: Pushed) -> dict[str, Any]:
    """Documents pushed by `plan` into pages at `place`: outputs in packed order and the cached rows of each document.

    kept: the packed rows of each tensor of the pages, and how many tokens have one. `step(pages, table, rows, where)` returns the
    outputs of rows that lie at `where` among the packed ones and are in the pages. Pages are made longer until they hold whole rows.
    """
    whole = math.lcm(place.page_size, *(tokens for _, tokens in kept.values()))
    place = replace(place, page_size=whole)
    total, owned, table = laid_out(lengths, place)
    pages = {name: compressed_pages(total, place, tokens, row_RE, owned) for name, (row_RE, tokens) in kept.items()}
    outputs: list[tuple[Tensor, Tensor]] = []
    for live, rows, where in pushes(plan, lengths, next(iter(kept.values()))[0].device):
        table_NB = table[live].to(where.device)
        for name, (row_RE, tokens) in kept.items():
            write_compressed(pages[name], row_RE[where], table_NB, rows, tokens)
        outputs.append((where, step(pages, table_NB, rows, where)))
    order = torch.cat([where for where, _ in outputs]).argsort()
    cached = {
        f"{name} of document {n}": pages[name][mine].flatten(0, 1)[: length // tokens].clone()
        for n, (mine, length) in enumerate(zip(owned, lengths, strict=True))
        for name, (_, tokens) in kept.items()
    }
    return {"out": torch.cat([out for _, out in outputs])[order], "cached": cached}


def _call(t: Trial, args: Args) -> Any:
    """The packed call, as training makes it."""
    keys = CompressedRows(args["key_RE"], args["tokens"])
    rows = packed_rows(args, "q_RHE")
    return t.op("compressed_select")(args["q_RHE"], args["weights_RH"], keys, rows, args["top_k"], program=t.program)


def _push(t: Trial, plan: Plan, place: PagePlace) -> dict[str, Any]:
    q, weights, key = (t.args[name] for name in INPUTS)
    tokens = t.args["tokens"]

    def step(pages: dict[str, Tensor], table_NB: Tensor, rows: Rows, where: Tensor) -> Tensor:
        keys = CompressedRows(pages["index"], tokens, table_NB)
        chosen: Tensor = t.op("compressed_select")(q[where], weights[where], keys, rows, t.args["top_k"], program=t.program)
        return chosen

    return push(t.args["lengths"], {"index": (key, tokens)}, plan, place, step)


def _row(t: Trial) -> None:
    assert_row_law(t.call, t.args, Documents(*INPUTS), seed=t.seed)


def _split(t: Trial) -> None:
    plans = split_plans(t.args["lengths"], (16, 64), t.seed)
    assert_split_law(lambda plan: _push(t, plan, PagePlace(48)), plans)
    assert_same_bytes(_push(t, plans["whole"], PagePlace(48))["out"], t.call(), "split law: pages against packed rows")


def _place(t: Trial) -> None:
    plan = split_plans(t.args["lengths"], (), t.seed)["at random"]
    assert_place_law(lambda place: _push(t, plan, place), PLACES)


def _case(
    name: str,
    lengths: list[int],
    heads: int,
    width: int,
    tokens: int,
    top_k: int,
    kind: str = "normal",
    laws: tuple[str, ...] = ("row", "split", "place", "repeat"),
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        rows = sum(lengths)
        return {
            "q_RHE": draw.floats(rows, heads, width, kind=kind),
            "weights_RH": draw.floats(rows, heads),
            "key_RE": draw.floats(rows, width, kind=kind),
            "lengths": lengths,
            "tokens": tokens,
            "top_k": top_k,
        }

    checks = {"row": _row, "split": _split, "place": _place, "repeat": repeat}
    return Case(name, "compressed_select", make, _call, {law: checks[law] for law in laws}, (), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one row", [4], 1, 8, 4, 2, laws=("row", "place", "repeat")),
        _case("before the first row", [3, 1, 4, 2], 2, 8, 4, 2),
        _case("the best one", [5, 38], 2, 8, 3, 1),
        _case("ties", [70, 1, 33], 3, 4, 4, 5, "ties"),
        _case("32 heads", [66, 20], 32, 16, 2, 9),
        _case("odd heads and widths", [65, 17], 5, 13, 4, 7, "cancel"),
        _case("deepseek-v4, 2300 and 5", [2300, 5], 64, 128, 4, 512, device_sized=True, laws=("row", "place", "repeat")),
    ]


def products() -> list[Product]:
    """Heads of DeepSeek-V4 and fewer, one step and two over a head's width; whole numbers, whose order has no near ties."""

    def run(provider: Provider[Functions], args: Args) -> Any:
        q, weights, key = (args[name] for name in INPUTS)
        keys = CompressedRows(key, args["tokens"])
        return provider.functions.forward(q, weights, keys, packed_rows(args, "q_RHE"), args["top_k"])

    shapes = ((64, 128), (5, 40))
    return [
        Product(f"{heads} heads of {width}", "compressed_select", _case("", [150, 5], heads, width, 2, 32, "ties").make, run)
        for heads, width in shapes
    ]
