"""Cases of gated_rms_norm."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args, assert_shard_law

NAMES = ("x_RVE", "gate_RVE", "weight_E")


def _case(name: str, *shape: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {
            "x_RVE": draw.floats(*shape, kind=kind),
            "gate_RVE": draw.floats(*shape, scale=3.0),
            "weight_E": draw.floats(shape[-1], dtype=torch.promote_types(dtype, torch.float32)) * 0.1 + 1.0,
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("gated_rms_norm")(*(args[n] for n in NAMES), 1e-6, program=t.program)

    def shard(t: Trial) -> None:
        def by_heads(parts: int) -> Any:
            chunks = zip(t.args["x_RVE"].chunk(parts, 1), t.args["gate_RVE"].chunk(parts, 1), strict=True)
            return torch.cat([t.call({**t.args, "x_RVE": x, "gate_RVE": gate}) for x, gate in chunks], 1)

        assert_shard_law(by_heads, [d for d in (1, 2, 4) if shape[1] % d == 0])

    return Case(name, "gated_rms_norm", make, call, {**row_laws("x_RVE", "gate_RVE"), "shard": shard}, NAMES, device_sized)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 3, 4, 16),
        _case("odd", 65, 6, 33, kind="wide"),
        _case("qwen3.5, 257 rows", 257, 32, 128, device_sized=True),
    ]
