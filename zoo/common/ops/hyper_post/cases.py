"""Cases of hyper_post."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Along, Args, assert_column_law

GRADIENTS = ("branch_RD", "streams_RSD", "post_RS", "comb_RSS")


def _case(name: str, rows: int, streams: int, width: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "branch_RD": draw.floats(rows, width, kind=kind),
            "streams_RSD": draw.floats(rows, streams, width, kind=kind),
            "post_RS": draw.floats(rows, streams, dtype=wide),
            "comb_RSS": draw.floats(rows, streams, streams, dtype=wide),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("hyper_post")(*(args[name] for name in GRADIENTS), program=t.program)

    def column(t: Trial) -> None:
        assert_column_law(t.call, t.args, Along("branch_RD", "streams_RSD", dim=-1), seed=t.seed)

    laws = {**row_laws(*GRADIENTS), "column": column}
    return Case(name, "hyper_post", make, call, laws, GRADIENTS, device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("two streams of one column", 1, 2, 1),
        _case("odd", 17, 3, 7, "wide"),
        _case("cancelling", 65, 4, 33, "cancel"),
        _case("subnormal", 3, 4, 16, "subnormal"),
        _case("deepseek-v4-flash, 1024 rows", 1024, 4, 4096, device_sized=True),
    ]
