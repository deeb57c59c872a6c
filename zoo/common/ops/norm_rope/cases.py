"""Cases of norm_rope."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.norm_rope.reference import Heads, split_heads
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law

EPS = 1e-6


def _case(
    name: str, rows: int, heads: int, kv_heads: int, width: int, rope_dim: int, *, gated: bool = False, device_sized: bool = False
) -> Case:
    query_width = 2 * width if gated else width  # the zero-centred family keeps a gate beside each query

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        from zoo.common.ops import rope_table

        draw = Draw(seed, device, dtype)
        return {
            "qkv_RC": draw.floats(rows, heads * query_width + 2 * kv_heads * width, kind="wide"),
            "q_weight_E": draw.floats(width) * 0.1 + (0.0 if gated else 1.0),
            "k_weight_E": draw.floats(width) * 0.1 + (0.0 if gated else 1.0),
            "table_PC2": rope_table(4096, rope_dim, 1e6).to(device),
            "positions_R": draw.integers(rows, below=4096),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("norm_rope")(
            **args, heads=heads, kv_heads=kv_heads, eps=EPS, program=t.program, query_width=query_width, zero_centred=gated
        )

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            q, k, v = split_heads(t.args["qkv_RC"], Heads(heads, kv_heads, width, query_width))
            normed = [
                t.op("rms_norm")(x, t.args[weight], EPS, program=t.program, zero_centred=gated)
                for x, weight in ((q, "q_weight_E"), (k, "k_weight_E"))
            ]
            rotated_heads = [t.op("rope")(x, t.args["table_PC2"], t.args["positions_R"], program=t.program) for x in normed]
            return *rotated_heads, v

        assert_fusion_law(t.call, composed)

    laws = {**row_laws("qkv_RC", "positions_R"), "fusion": fusion}
    return Case(name, "norm_rope", make, call, laws, ("qkv_RC", "q_weight_E", "k_weight_E"), device_sized)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 7, 4, 2, 16, 16),
        _case("odd rows, part of the head rotated", 65, 3, 1, 32, 8, gated=True),
        _case("one row", 1, 8, 1, 64, 64),
        _case("qwen3-8b, 257 rows", 257, 32, 8, 128, 128, device_sized=True),
        _case("qwen3.5-4b, 257 rows", 257, 16, 4, 256, 64, gated=True, device_sized=True),
    ]
