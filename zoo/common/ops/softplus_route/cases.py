"""Cases of softplus_route."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args


def _case(name: str, rows: int, experts: int, top_k: int, scale: float = 1.5, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, torch.float64 if dtype == torch.float64 else torch.float32)
        bias = draw.floats(experts, scale=0.1)
        # with few values of logits and none of biases many experts are equal
        return {"logits_RX": draw.floats(rows, experts, kind=kind, scale=2.0), "bias_X": bias * 0.0 if kind == "ties" else bias}

    def call(t: Trial, args: Args) -> Any:
        return t.op("softplus_route")(args["logits_RX"], args["bias_X"], top_k, scale, program=t.program)

    return Case(name, "softplus_route", make, call, row_laws("logits_RX"), ("logits_RX",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one of 2", 1, 2, 1),
        _case("all of 5", 7, 5, 5, 2.5),
        _case("ties", 65, 8, 2, kind="ties"),
        _case("257 experts", 17, 257, 6, kind="cancel"),
        _case("subnormal", 2, 64, 6, kind="subnormal"),
        _case("deepseek-v4-flash, 1 row", 1, 256, 6, device_sized=True),
        _case("deepseek-v4-pro, 4096 rows", 4096, 384, 6, 2.5, device_sized=True),
    ]
