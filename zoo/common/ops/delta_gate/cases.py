"""Cases of delta_gate."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args, assert_shard_law

NAMES = ("a_RV", "b_RV", "a_log_V", "dt_bias_V")


def _case(name: str, rows: int, heads: int, scale: float = 1.0, device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "a_RV": draw.floats(rows, heads, scale=scale),
            "b_RV": draw.floats(rows, heads, scale=scale),
            "a_log_V": draw.floats(heads, dtype=wide),
            "dt_bias_V": draw.floats(heads, dtype=wide),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("delta_gate")(*(args[n] for n in NAMES), program=t.program)

    def shard(t: Trial) -> None:
        def by_heads(parts: int) -> Any:
            pieces = [t.call({n: t.args[n].chunk(parts, -1)[i] for n in NAMES}) for i in range(parts)]
            return tuple(torch.cat(p, 1) for p in zip(*pieces, strict=True))

        assert_shard_law(by_heads, [d for d in (1, 2, 4) if heads % d == 0])

    return Case(name, "delta_gate", make, call, {**row_laws("a_RV", "b_RV"), "shard": shard}, NAMES, device_sized)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 7, 4),
        _case("saturated", 65, 6, scale=30.0),
        _case("qwen3.5, 257 rows", 257, 32, device_sized=True),
    ]
