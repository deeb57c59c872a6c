"""Cases of tail_rope."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.rope.table import rope_table
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law


def _case(
    name: str,
    rows: int,
    heads: int,
    width: int,
    rope_dim: int,
    positions: int = 512,
    kind: str = "normal",
    inverse: bool = False,
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {
            "x_RHE": draw.floats(rows, heads, width, kind=kind),
            "table_PC2": rope_table(positions, rope_dim, 1e4).to(device),
            "positions_R": draw.integers(rows, below=positions),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("tail_rope")(args["x_RHE"], args["table_PC2"], args["positions_R"], program=t.program, inverse=inverse)

    def fusion(t: Trial) -> None:
        def composed() -> Any:  # queries and keys in one call equal each head in its own
            return torch.cat([t.call({**t.args, "x_RHE": head.contiguous()}) for head in t.args["x_RHE"].split(1, 1)], 1)

        assert_fusion_law(t.call, composed)

    laws = {**row_laws("x_RHE", "positions_R"), "fusion": fusion}
    return Case(name, "tail_rope", make, call, laws, ("x_RHE",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 1, 1, 2, 2),
        _case("all columns", 17, 3, 8, 8, kind="wide"),
        _case("cancelling", 65, 5, 64, 32, kind="cancel"),
        _case("subnormal", 7, 2, 16, 8, kind="subnormal"),
        _case("back", 33, 4, 24, 8, kind="wide", inverse=True),
        _case("deepseek-v4 queries", 257, 64, 512, 64, 4096, device_sized=True),
        _case("deepseek-v4 outputs", 257, 64, 512, 64, 4096, inverse=True, device_sized=True),
    ]
