"""Cases of l2_norm."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args, assert_shard_law


def _case(name: str, *shape: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        return {"x_RHK": Draw(seed, device, dtype).floats(*shape, kind=kind)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("l2_norm")(args["x_RHK"], program=t.program)

    def shard(t: Trial) -> None:
        def by_heads(parts: int) -> Any:
            return torch.cat([t.call({"x_RHK": part}) for part in t.args["x_RHK"].chunk(parts, 1)], 1)

        assert_shard_law(by_heads, [d for d in (1, 2, 4) if shape[1] % d == 0])

    return Case(name, "l2_norm", make, call, {**row_laws("x_RHK"), "shard": shard}, ("x_RHK",), device_sized)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 2, 4, 16),
        _case("odd", 17, 6, 33, kind="wide"),
        _case("zeros and subnormals", 7, 4, 64, kind="subnormal"),
        _case("qwen3.5, 257 rows", 257, 32, 128, device_sized=True),
    ]
