"""Cases of hyper_pre."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.hyper_pre import Sinkhorn
from zoo.common.program import Program
from zoo.testing import Args

USUAL = Sinkhorn(1e-6, 1e-6, 20)


def _case(
    name: str, rows: int, streams: int, width: int, how: Sinkhorn = USUAL, kind: str = "normal", spread: float = 1.0, sized: bool = False
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        mixed = (2 + streams) * streams
        return {
            "streams_RSD": draw.floats(rows, streams, width, kind=kind),
            "fn_MK": draw.floats(mixed, streams * width, scale=(streams * width) ** -0.5, dtype=wide),
            "base_M": draw.floats(mixed, scale=0.5 * spread, dtype=wide),
            "scale_3": draw.floats(3, scale=spread, dtype=wide),
        }

    def call(t: Trial, args: Args) -> Any:
        operands = (args["streams_RSD"], args["fn_MK"], args["base_M"], args["scale_3"])
        return t.op("hyper_pre")(*operands, how, program=t.program)

    gradients = ("streams_RSD", "fn_MK", "base_M", "scale_3")
    return Case(name, "hyper_pre", make, call, row_laws("streams_RSD"), gradients, sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("two streams of one column", 3, 2, 1, Sinkhorn(1e-6, 1e-6, 2)),
        _case("odd", 17, 3, 7),
        _case("cancelling", 33, 4, 65, kind="cancel"),
        _case("one division", 5, 4, 16, Sinkhorn(1e-5, 1e-4, 1)),
        _case("far logits", 9, 4, 32, spread=20.0),
        _case("k_parts", 5, 4, 2048),
        _case("deepseek-v4-flash, 1 row", 1, 4, 4096, sized=True),
        _case("deepseek-v4-flash, 1024 rows", 1024, 4, 4096, sized=True),
    ]
