"""Cases of rope."""

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
    neighbours: bool = False,
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {
            "x_RHE": draw.floats(rows, heads, width, kind=kind),
            "table_PC2": rope_table(positions, rope_dim, 1e6).to(device),
            "positions_R": draw.integers(rows, below=positions),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("rope")(args["x_RHE"], args["table_PC2"], args["positions_R"], program=t.program, neighbours=neighbours)

    def fusion(t: Trial) -> None:
        def composed() -> Any:  # queries and keys in one call equal each head in its own
            heads_apart = [t.call({**t.args, "x_RHE": head.contiguous()}) for head in t.args["x_RHE"].split(1, 1)]
            return torch.cat(heads_apart, 1)

        assert_fusion_law(t.call, composed)

    laws = {**row_laws("x_RHE", "positions_R"), "fusion": fusion}
    return Case(name, "rope", make, call, laws, ("x_RHE",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 1, 1, 2, 2),
        _case("odd", 17, 3, 8, 8, kind="wide"),
        _case("cancelling", 65, 5, 64, 64, kind="cancel"),
        _case("subnormal", 7, 2, 16, 16, kind="subnormal"),
        _case("partly rotated", 33, 2, 64, 16, kind="wide"),
        _case("heads of 128", 7, 8, 128, 128, 4096),
        _case("neighbours", 33, 4, 8, 8, kind="wide", neighbours=True),
        _case("neighbours, partly rotated", 65, 3, 16, 6, neighbours=True),
        _case("qwen3-8b queries", 257, 32, 128, 128, 40960, device_sized=True),
        _case("qwen3-8b keys", 4096, 8, 128, 128, 40960, device_sized=True),
        _case("qwen3-30b-a3b keys", 257, 4, 128, 128, 40960, device_sized=True),
        _case("glm-5.2 queries", 257, 64, 64, 64, 40960, neighbours=True, device_sized=True),
        _case("glm-5.2 index queries", 257, 32, 128, 64, 40960, neighbours=True, device_sized=True),
    ]
