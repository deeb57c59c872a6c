"""Cases of causal_conv: packed documents, and the same documents pushed in pieces through carried rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.common.history import ConvCarry, PackedDelta
from zoo.common.ops.cases import Case, Documents, Draw, Trial, pushes, repeat, starts_of
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import (
    Along,
    Args,
    Plan,
    assert_column_law,
    assert_place_law,
    assert_row_law,
    assert_same_bytes,
    assert_shard_law,
    assert_split_law,
    split_plans,
)


def _call(t: Trial, args: Args) -> Any:
    rows = Rows.packed(torch.tensor(starts_of(args["lengths"]), device=args["x_RC"].device))
    return t.op("causal_conv")(args["x_RC"], args["weight_C4"], PackedDelta(), rows, program=t.program)


def _push(t: Trial, plan: Plan, slots: list[int], fill: float) -> dict[str, Any]:
    """The documents pushed by `plan` through carries at `slots`; the other slots hold `fill`."""
    x = t.args["x_RC"]
    pool = torch.full((max(slots) + 2, 3, x.shape[1]), fill, dtype=x.dtype, device=x.device)
    pool[slots] = 0
    out = torch.full_like(x, torch.nan)
    for live, rows, index in pushes(plan, t.args["lengths"], x.device):
        carry = ConvCarry(pool, torch.tensor([slots[n] for n in live], device=x.device))
        out[index] = t.op("causal_conv")(x[index], t.args["weight_C4"], carry, rows, program=t.program)
    return {"out": out, "carries": pool[slots]}


class _Channels(Along):
    """Columns of x together with their rows of the weight."""

    def count(self, args: Args) -> int:
        return args["x_RC"].shape[1]

    def take(self, args: Args, index: Tensor) -> Args:
        where = index.to(args["x_RC"].device)
        return {**args, "x_RC": args["x_RC"].index_select(1, where), "weight_C4": args["weight_C4"].index_select(0, where)}

    def spoil(self, args: Args, kept: Tensor, value: float) -> Args:
        where = kept.to(args["x_RC"].device)
        x = args["x_RC"]
        weight = args["weight_C4"]
        return {
            **args,
            "x_RC": torch.full_like(x, value).index_copy_(1, where, x.index_select(1, where)),
            "weight_C4": torch.full_like(weight, value).index_copy_(0, where, weight.index_select(0, where)),
        }


def _case(name: str, lengths: list[int], channels: int, *, device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {"x_RC": draw.floats(sum(lengths), channels, scale=2.0), "weight_C4": draw.floats(channels, 4), "lengths": lengths}

    def split(t: Trial) -> None:
        slots = [2 * n + 1 for n in range(len(lengths))]
        plans = split_plans(lengths, edges=(3, 64), seed=t.seed)
        assert_split_law(lambda plan: _push(t, plan, slots, torch.nan), plans)
        pushed = _push(t, plans["at random"], slots, 0.0)["out"]
        assert_same_bytes(pushed, t.call(), "split law: pushed against packed")

    def place(t: Trial) -> None:
        plan = split_plans(lengths, seed=t.seed)["at random"]
        count = len(lengths)
        places = {
            "in order": (list(range(1, count + 1)), 0.0),
            "scattered among NaN": ([3 * n + 2 for n in reversed(range(count))], torch.nan),
        }
        assert_place_law(lambda p: _push(t, plan, *p), places)

    def shard(t: Trial) -> None:
        def by_channels(parts: int) -> Any:
            pieces = zip(t.args["x_RC"].chunk(parts, 1), t.args["weight_C4"].chunk(parts, 0), strict=True)
            return torch.cat([t.call({**t.args, "x_RC": x, "weight_C4": w}) for x, w in pieces], 1)

        assert_shard_law(by_channels, [d for d in (1, 2, 3, 4) if channels % d == 0])

    laws = {
        "row": lambda t: assert_row_law(t.call, t.args, Documents("x_RC"), seed=t.seed),
        "column": lambda t: assert_column_law(t.call, t.args, _Channels(), seed=t.seed),
        "split": split,
        "place": place,
        "shard": shard,
        "repeat": repeat,
    }
    return Case(name, "causal_conv", make, _call, laws, ("x_RC", "weight_C4"), device_sized)


def cases(program: Program) -> list[Case]:
    return [
        _case("short documents", [1, 2, 3, 4, 5], 12),
        _case("longer", [65, 7, 130], 33),
        _case("qwen3.5-35b-a3b", [1000, 1, 593], 8192, device_sized=True),
    ]
