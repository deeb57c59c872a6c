"""Cases of fp8_quantise."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.fp8_quantise import FP32_SCALES, POWERS_OF_TWO, ScaleRule
from zoo.common.program import Program
from zoo.testing import Args


def _case(name: str, rows: int, width: int, rule: ScaleRule, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        return {"x_RK": Draw(seed, device, dtype).floats(rows, width, kind=kind)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("fp8_quantise")(args["x_RK"], rule, program=t.program)

    return Case(name, "fp8_quantise", make, call, row_laws("x_RK"), (), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 2, 3, FP32_SCALES),
        _case("a whole group", 17, 128, FP32_SCALES, "wide"),
        _case("odd", 33, 1027, FP32_SCALES, "wide"),
        _case("below the floor", 7, 256, FP32_SCALES, "subnormal"),
        _case("powers of two", 17, 1027, POWERS_OF_TWO, "wide"),
        _case("powers of two, below the floor", 7, 256, POWERS_OF_TWO, "subnormal"),
        _case("glm-5.2, 1 row", 1, 6144, FP32_SCALES, device_sized=True),
        _case("glm-5.2, 4096 rows", 4096, 6144, FP32_SCALES, device_sized=True),
    ]
