"""Cases of hadamard."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args


def _case(name: str, rows: int, width: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        return {"x": Draw(seed, device, dtype).floats(rows, width, kind=kind)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("hadamard")(args["x"], program=t.program)

    return Case(name, "hadamard", make, call, row_laws("x"), ("x",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one column", 3, 1),
        _case("tiny", 2, 4),
        _case("wide", 17, 64, "wide"),
        _case("odd rows", 33, 128),
        _case("subnormal", 7, 16, "subnormal"),
        _case("deepseek-v4 queries of an index", 257 * 64, 128, device_sized=True),
    ]
