"""Cases of hyper_head."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args

GRADIENTS = ("streams_RSD", "fn_SK", "base_S", "scale_1")


def _case(name: str, rows: int, streams: int, width: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "streams_RSD": draw.floats(rows, streams, width, kind=kind),
            "fn_SK": draw.floats(streams, streams * width, scale=(streams * width) ** -0.5, dtype=wide),
            "base_S": draw.floats(streams, scale=0.5, dtype=wide),
            "scale_1": draw.floats(1, dtype=wide),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("hyper_head")(*(args[name] for name in GRADIENTS), 1e-6, 1e-6, program=t.program)

    return Case(name, "hyper_head", make, call, row_laws("streams_RSD"), GRADIENTS, device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("two streams of one column", 3, 2, 1),
        _case("odd", 17, 3, 7),
        _case("cancelling", 33, 4, 65, "cancel"),
        _case("k_parts", 5, 4, 2048),
        _case("deepseek-v4-flash, 1024 rows", 1024, 4, 4096, device_sized=True),
    ]
