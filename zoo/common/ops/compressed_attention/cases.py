"""Cases of compressed_attention: packed documents with lists of compressed rows, and the same pushed through paged memory."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from zoo.common.history import WindowedRows
from zoo.common.ops.attention.cases import PagePlace
from zoo.common.ops.cases import Case, Documents, Draw, Product, Trial, repeat
from zoo.common.ops.compressed_attention import Functions
from zoo.common.ops.compressed_select.cases import PLACES, push
from zoo.common.ops.contract import Provider
from zoo.common.ops.sparse_attention.cases import packed_rows
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import (
    Args,
    Plan,
    assert_place_law,
    assert_row_law,
    assert_same_bytes,
    assert_shard_law,
    assert_split_law,
    split_plans,
)

INPUTS = ("q_RHE", "window_RE", "compressed_RE", "chosen_RK")


def lists(lengths: list[int], tokens: int, top_k: int, seed: int) -> Tensor:
    """chosen_RK of random choices among the rows that are complete, at most `top_k` of them, and sometimes fewer."""
    draw = random.Random(seed)
    out = torch.full((sum(lengths), top_k), -1, dtype=torch.int32)
    r = 0
    for length in lengths:
        for p in range(length):
            seen = (p + 1) // tokens
            count = min(seen, top_k) if draw.random() < 0.8 else draw.randint(0, min(seen, top_k))
            out[r, :count] = torch.tensor(sorted(draw.sample(range(seen), count)), dtype=torch.int32)
            r += 1
    return out


def _attend(t: Trial, args: Args, history: WindowedRows, rows: Rows, where: Tensor | slice = slice(None)) -> Tensor:
    chosen = args["chosen_RK"]
    operands = (args["q_RHE"][where], history, None if chosen is None else chosen[where], args["sinks_H"], rows)
    out: Tensor = t.op("compressed_attention")(*operands, args["window"], args["scale"], program=t.program)
    return out


def _call(t: Trial, args: Args) -> Any:
    """The packed call, as training makes it."""
    history = WindowedRows(args["window_RE"], args["compressed_RE"], args["tokens"], "compressed")
    return _attend(t, args, history, packed_rows(args, "q_RHE"))


def _push(t: Trial, plan: Plan, place: PagePlace) -> dict[str, Any]:
    args = t.args
    tokens = args["tokens"]
    kept = {"window": (args["window_RE"], 1)}
    if tokens:
        kept["compressed"] = (args["compressed_RE"], tokens)

    def step(pages: dict[str, Tensor], table_NB: Tensor, rows: Rows, where: Tensor) -> Tensor:
        history = WindowedRows(pages["window"], pages.get("compressed"), tokens, "compressed", table_NB)
        return _attend(t, args, history, rows, where)

    return push(args["lengths"], kept, plan, place, step)


class _Documents(Documents):
    """Documents of the arguments that a case has."""

    def take(self, args: Args, index: Tensor) -> Args:
        self.names = tuple(name for name in INPUTS if args[name] is not None)
        return super().take(args, index)

    def spoil(self, args: Args, kept: Tensor, value: float) -> Args:
        self.names = tuple(name for name in INPUTS if args[name] is not None)
        return super().spoil(args, kept, value)


def _row(t: Trial) -> None:
    assert_row_law(t.call, t.args, _Documents(*INPUTS), seed=t.seed)


def _split(t: Trial) -> None:
    plans = split_plans(t.args["lengths"], (16, 64), t.seed)
    assert_split_law(lambda plan: _push(t, plan, PagePlace(48)), plans)
    assert_same_bytes(_push(t, plans["whole"], PagePlace(48))["out"], t.call(), "split law: pages against packed rows")


def _place(t: Trial) -> None:
    plan = split_plans(t.args["lengths"], (), t.seed)["at random"]
    assert_place_law(lambda place: _push(t, plan, place), PLACES)


def _shard(t: Trial) -> None:
    heads = t.args["q_RHE"].shape[1]

    def at_degree(degree: int) -> Any:
        parts = zip(t.args["q_RHE"].chunk(degree, 1), t.args["sinks_H"].chunk(degree), strict=True)
        return torch.cat([t.call({**t.args, "q_RHE": q.contiguous(), "sinks_H": sinks}) for q, sinks in parts], 1)

    assert_shard_law(at_degree, [d for d in range(1, heads + 1) if heads % d == 0])


def _case(
    name: str,
    lengths: list[int],
    heads: int,
    width: int,
    window: int,
    tokens: int = 0,
    top_k: int = 0,
    kind: str = "normal",
    sink: float = 1.0,
    laws: tuple[str, ...] = ("row", "split", "place", "shard", "repeat"),
    device_sized: bool = False,
) -> Case:
    """tokens 0: no compressed rows; top_k 0: all of them."""

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        rows = sum(lengths)
        return {
            "q_RHE": draw.floats(rows, heads, width, kind=kind, scale=2.0),
            "window_RE": draw.floats(rows, width, kind=kind),
            "compressed_RE": draw.floats(rows, width, kind=kind) if tokens else None,
            "chosen_RK": lists(lengths, tokens, top_k, seed).to(device) if top_k else None,
            "sinks_H": draw.floats(heads, scale=sink, dtype=torch.promote_types(dtype, torch.float32)),
            "lengths": lengths,
            "tokens": tokens,
            "window": window,
            "scale": width**-0.5,
        }

    checks = {"row": _row, "split": _split, "place": _place, "shard": _shard, "repeat": repeat}
    gradients = ("q_RHE", "window_RE", "compressed_RE", "sinks_H") if tokens else ("q_RHE", "window_RE", "sinks_H")
    chosen = {law: checks[law] for law in laws}
    return Case(name, "compressed_attention", make, _call, chosen, gradients, device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one row", [1], 2, 8, 4, 4, 2, laws=("row", "place", "shard", "repeat")),
        _case("a window alone", [17, 1, 40], 2, 16, 16),
        _case("all rows of two tokens", [65, 2, 30], 4, 40, 7, 2),
        _case("chosen rows of three", [33, 5], 3, 13, 5, 3, 4),
        _case("more heads than a panel", [20, 5], 18, 24, 9, 4, 3, "cancel"),
        _case("large sinks", [31, 2], 2, 32, 8, 4, 3, sink=60.0),
        _case("subnormal", [14, 2], 2, 32, 8, 2, 3, "subnormal"),
        _case("rows of more tokens than a page", [131, 3], 2, 16, 8, 64, laws=("place",)),
        _case("windows of 128", [260], 1, 16, 128, 3, laws=("row", "split", "repeat")),
        _case("deepseek-v4 csa, 2300 and 5", [2300, 5], 64, 512, 128, 4, 512, laws=("row", "place", "repeat"), device_sized=True),
        _case("deepseek-v4 hca, 2300 and 5", [2300, 5], 64, 512, 128, 128, laws=("row", "place", "repeat"), device_sized=True),
    ]


def products() -> list[Product]:
    """Widths of DeepSeek-V4 and narrow ones, over several tiles of chosen rows and of the window."""

    def run(provider: Provider[Functions], args: Args) -> Any:
        history = WindowedRows(args["window_RE"], args["compressed_RE"], args["tokens"], "compressed")
        operands = (args["q_RHE"], history, args["chosen_RK"], args["sinks_H"], packed_rows(args, "q_RHE"))
        return provider.functions.forward(*operands, args["window"], args["scale"])[0]

    shapes = ((32, 512), (3, 40))
    return [
        Product(f"{heads} heads of {width}", "compressed_attention", _case("", [150, 5], heads, width, 80, 2, 70).make, run)
        for heads, width in shapes
    ]
