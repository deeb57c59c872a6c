"""Cases of output_gate."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args


def _case(name: str, *shape: int, one_gate: bool = False, device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {"x": draw.floats(*shape, kind="wide"), "gate": draw.floats(*((shape[0], 1) if one_gate else shape), scale=4.0)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("output_gate")(args["x"], args["gate"], program=t.program)

    return Case(name, "output_gate", make, call, row_laws("x", "gate"), ("x", "gate"), device_sized)


def cases(program: Program) -> list[Case]:
    return [
        _case("heads", 17, 4, 33),
        _case("one gate a row", 65, 257, one_gate=True),
        _case("qwen3.5 attention, 257 rows", 257, 16, 256, device_sized=True),
        _case("qwen3.5 shared expert, 257 rows", 257, 2048, one_gate=True, device_sized=True),
    ]
