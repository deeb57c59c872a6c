"""Cases of select: packed documents, and the same pushed through paged memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.common.history import TokenRows
from zoo.common.ops.attention.cases import PagePlace
from zoo.common.ops.cases import Case, Documents, Draw, Product, Trial, repeat
from zoo.common.ops.contract import Provider
from zoo.common.ops.select import Functions
from zoo.common.ops.sparse_attention.cases import PLACES, packed_rows, push
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import Args, Plan, assert_place_law, assert_row_law, assert_same_bytes, assert_split_law, split_plans

INPUTS = ("q_RHE", "weights_RH", "key_RE")


def _call(t: Trial, args: Args) -> Any:
    """The packed call, as training makes it."""
    rows = packed_rows(args, "q_RHE")
    return t.op("select")(args["q_RHE"], args["weights_RH"], TokenRows(args["key_RE"]), rows, args["top_k"], program=t.program)


def _push(t: Trial, plan: Plan, place: PagePlace) -> dict[str, Any]:
    q, weights, key = (t.args[name] for name in INPUTS)

    def step(keys: TokenRows, rows: Rows, where: Tensor) -> Tensor:
        chosen: Tensor = t.op("select")(q[where], weights[where], keys, rows, t.args["top_k"], program=t.program)
        return chosen

    return push(t.args["lengths"], key, plan, place, step)


def _row(t: Trial) -> None:
    assert_row_law(t.call, t.args, Documents(*INPUTS), seed=t.seed)


def _split(t: Trial) -> None:
    plans = split_plans(t.args["lengths"], (16, 64), t.seed)
    assert_split_law(lambda plan: _push(t, plan, PagePlace(64)), plans)
    assert_same_bytes(_push(t, plans["whole"], PagePlace(64))["out"], t.call(), "split law: pages against packed rows")


def _place(t: Trial) -> None:
    plan = split_plans(t.args["lengths"], (), t.seed)["at random"]
    assert_place_law(lambda place: _push(t, plan, place), PLACES)


def _case(
    name: str,
    lengths: list[int],
    heads: int,
    width: int,
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
            "top_k": top_k,
        }

    checks = {"row": _row, "split": _split, "place": _place, "repeat": repeat}
    return Case(name, "select", make, _call, {law: checks[law] for law in laws}, (), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one row", [1], 1, 8, 4, laws=("row", "place", "repeat")),
        _case("the best one", [5, 18], 2, 8, 1),
        _case("one head, its zeros", [40, 3], 1, 8, 16),
        _case("ties", [70, 1, 33], 3, 4, 16, "ties"),
        _case("32 heads", [66, 20], 32, 16, 16),
        _case("odd heads and widths", [65, 17], 5, 13, 7, "cancel"),
        _case("no row sees more than it takes", [33, 5], 4, 16, 64, laws=("row", "split", "place", "repeat")),
        _case("glm-5.2, 2100 and 5", [2100, 5], 32, 128, 2048, device_sized=True, laws=("row", "place", "repeat")),
        _case("glm-5.2, 4096", [4096], 32, 128, 2048, device_sized=True, laws=("row", "repeat")),
    ]


def products() -> list[Product]:
    """Heads of GLM-5.2 and fewer, one step and two over a head's width; whole numbers, whose order has no near ties."""

    def run(provider: Provider[Functions], args: Args) -> Any:
        q, weights, key = (args[name] for name in INPUTS)
        return provider.functions.forward(q, weights, key, None, packed_rows(args, "q_RHE"), args["top_k"])

    shapes = ((32, 128), (5, 40))
    return [
        Product(f"{heads} heads of {width}", "select", _case("", [150, 5], heads, width, 64, "ties").make, run) for heads, width in shapes
    ]
