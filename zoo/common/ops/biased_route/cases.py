"""Cases of biased_route."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.biased_route import Choice
from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args

PUBLISHED = Choice(8, scale=2.5)


def _case(name: str, rows: int, experts: int, choice: Choice, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, torch.float64 if dtype == torch.float64 else torch.float32)
        bias = draw.floats(experts, scale=0.1)
        # with few values of logits and none of biases many experts are equal
        return {"logits_RX": draw.floats(rows, experts, kind=kind, scale=2.0), "bias_X": bias * 0.0 if kind == "ties" else bias}

    def call(t: Trial, args: Args) -> Any:
        return t.op("biased_route")(args["logits_RX"], args["bias_X"], choice, program=t.program)

    return Case(name, "biased_route", make, call, row_laws("logits_RX"), ("logits_RX",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one of 2", 1, 2, Choice(1, renormalise=False)),
        _case("all of 5", 7, 5, Choice(5, scale=2.5)),
        _case("ties", 65, 8, Choice(2), "ties"),
        _case("ties in groups", 33, 16, Choice(3, 4, 2), "ties"),
        _case("4 of 8 groups", 17, 64, Choice(6, 8, 4, scale=2.5)),
        _case("odd groups, not renormalised", 63, 33, Choice(5, 3, 2, False, 1.5), "wide"),
        _case("257 experts", 17, 257, PUBLISHED, "cancel"),
        _case("subnormal", 2, 64, Choice(6), "subnormal"),
        _case("glm-5.2, 1 row", 1, 256, PUBLISHED, device_sized=True),
        _case("glm-5.2, 4096 rows", 4096, 256, PUBLISHED, device_sized=True),
    ]
