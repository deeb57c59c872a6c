"""Cases of swiglu."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Along, Args, assert_column_law


def _case(
    name: str,
    rows: int,
    intermediate: int,
    kind: str = "normal",
    device_sized: bool = False,
    limit: float | None = None,
) -> Case:
    named = {} if limit is None else {"limit": limit}

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        return {"gate_up": Draw(seed, device, dtype).floats(rows, 2 * intermediate, kind=kind, scale=2.0)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("swiglu")(args["gate_up"], program=t.program, **named)

    def column(t: Trial) -> None:
        assert_column_law(t.call, t.args, Along("gate_up", dim=-1, blocks=2), seed=t.seed)

    return Case(name, "swiglu", make, call, {**row_laws("gate_up"), "column": column}, ("gate_up",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one by one", 1, 1),
        _case("odd", 17, 7, "wide"),
        _case("odd 65", 65, 65),
        _case("cancelling", 7, 257, "cancel"),
        _case("subnormal", 2, 63, "subnormal"),
        _case("1024 wide", 33, 1024, "wide"),
        _case("cut to 2", 17, 65, limit=2.0),
        _case("cut to 10", 7, 33, "wide", limit=10.0),
        _case("qwen3-8b, 1 row", 1, 12288, device_sized=True),
        _case("qwen3-8b, 4096 rows", 4096, 12288, device_sized=True),
        _case("qwen3-30b-a3b, 2056 slots", 2056, 768, device_sized=True),
    ]
