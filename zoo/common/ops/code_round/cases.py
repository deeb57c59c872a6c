"""Cases of code_round."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.code_round import FP4_INDEX, FP8_ROWS, Grid
from zoo.common.program import Program
from zoo.testing import Args


def _case(name: str, rows: int, width: int, columns: int, grid: Grid, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        return {"x": Draw(seed, device, dtype).floats(rows, width, kind=kind)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("code_round")(args["x"], columns, grid, program=t.program)

    return Case(name, "code_round", make, call, row_laws("x"), ("x",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 2, 3, 2, FP8_ROWS),
        _case("rows", 17, 160, 136, FP8_ROWS, "wide"),
        _case("rows below the floor", 7, 72, 64, FP8_ROWS, "subnormal"),
        _case("index", 17, 128, 128, FP4_INDEX, "wide"),
        _case("index, odd", 33, 45, 45, FP4_INDEX),
        _case("index below the floor", 7, 64, 64, FP4_INDEX, "subnormal"),
        _case("deepseek-v4 rows", 257, 512, 448, FP8_ROWS, device_sized=True),
        _case("deepseek-v4 queries of an index", 257 * 64, 128, 128, FP4_INDEX, device_sized=True),
    ]
