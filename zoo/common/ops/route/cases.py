"""Cases of route."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args


def _case(
    name: str, rows: int, experts: int, top_k: int, kind: str = "normal", renormalise: bool = True, device_sized: bool = False
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, torch.float64 if dtype == torch.float64 else torch.float32)
        return {"logits_RX": draw.floats(rows, experts, kind=kind, scale=2.0)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("route")(args["logits_RX"], top_k, renormalise, program=t.program)

    return Case(name, "route", make, call, row_laws("logits_RX"), ("logits_RX",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one expert", 1, 1, 1),
        _case("all of 5", 7, 5, 5),
        _case("ties", 65, 8, 2, "ties"),
        _case("ties among 128", 17, 128, 8, "ties"),
        _case("odd, wide", 63, 33, 3, "wide", renormalise=False),
        _case("257 experts", 17, 257, 8, "cancel"),
        _case("subnormal", 2, 64, 6, "subnormal"),
        _case("not renormalised", 64, 64, 6, renormalise=False),
        _case("qwen3-30b-a3b, 1 row", 1, 128, 8, device_sized=True),
        _case("qwen3-30b-a3b, 4096 rows", 4096, 128, 8, device_sized=True),
    ]
