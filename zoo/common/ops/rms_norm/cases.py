"""Cases of rms_norm, alone and after a residual sum."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law

EPS = 1e-6


def _case(name: str, *shape: int, kind: str = "normal", add: bool = False, zero_centred: bool = False, device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {
            "x": draw.floats(*shape, kind=kind),
            "residual": draw.floats(*shape, kind=kind, scale=3.0) if add else None,
            "weight_D": draw.floats(shape[-1]) * 0.1 + (0.0 if zero_centred else 1.0),
        }

    def call(t: Trial, args: Args) -> Any:
        if args["residual"] is None:
            return t.op("rms_norm")(args["x"], args["weight_D"], EPS, program=t.program, zero_centred=zero_centred)
        return t.op("add_rms_norm")(args["x"], args["residual"], args["weight_D"], EPS, program=t.program, zero_centred=zero_centred)

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            weight = t.args["weight_D"]
            norm = t.op("rms_norm")
            if add:
                total = (t.args["x"].float() + t.args["residual"].float()).to(t.args["x"].dtype)
                return norm(total, weight, EPS, program=t.program, zero_centred=zero_centred), total
            flat = t.args["x"].flatten(0, -2)  # all heads in one call equal each head as a row of its own
            parts = [norm(rows, weight, EPS, program=t.program, zero_centred=zero_centred) for rows in flat.split(1)]
            return torch.cat(parts).view(t.args["x"].shape)

        assert_fusion_law(t.call, composed)

    laws = {**row_laws("x", "residual"), "fusion": fusion}
    return Case(name, "rms_norm", make, call, laws, ("x", "residual", "weight_D"), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one by one", 1, 1),
        _case("tiny", 2, 7, add=True),
        _case("odd", 17, 63, kind="wide"),
        _case("odd, added", 65, 65, kind="wide", add=True),
        _case("cancelling sum", 33, 128, kind="cancel", add=True, zero_centred=True),
        _case("subnormal", 7, 257, kind="subnormal"),
        _case("1024 wide", 65, 1024, add=True),
        _case("1536 wide, zero-centred", 7, 1536, zero_centred=True),
        _case("per head", 17, 5, 64, kind="wide"),
        _case("per head of 128", 7, 8, 128),
        _case("qwen3-8b, 1 row", 1, 4096, add=True, device_sized=True),
        _case("qwen3-8b, 257 rows", 257, 4096, add=True, device_sized=True),
        _case("qwen3-8b, 4096 rows", 4096, 4096, add=True, device_sized=True),
        _case("qwen3-8b query heads", 257, 32, 128, device_sized=True),
        _case("qwen3-30b-a3b, 257 rows", 257, 2048, add=True, device_sized=True),
        _case("few very wide rows", 3, 16384, kind="wide", device_sized=True),
    ]
