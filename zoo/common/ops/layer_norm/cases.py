"""Cases of layer_norm."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law

EPS = 1e-6


def _case(name: str, *shape: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {
            "x": draw.floats(*shape, kind=kind),
            "weight_D": draw.floats(shape[-1]) * 0.1 + 1.0,
            "bias_D": draw.floats(shape[-1]) * 0.3,
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("layer_norm")(args["x"], args["weight_D"], args["bias_D"], EPS, program=t.program)

    def fusion(t: Trial) -> None:
        def composed() -> Any:  # columns of a wider projection equal the same rows by themselves
            wide = torch.cat([t.args["x"], torch.full_like(t.args["x"], torch.nan)], -1)
            return t.call({**t.args, "x": wide[..., : shape[-1]]})

        assert_fusion_law(t.call, composed)

    return Case(
        name,
        "layer_norm",
        make,
        call,
        {**row_laws("x"), "fusion": fusion},
        ("x", "weight_D", "bias_D"),
        device_sized,
        kind=kind,
    )


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 2, 7),
        _case("odd", 17, 63, kind="wide"),
        _case("cancelling", 33, 128, kind="cancel"),
        _case("subnormal", 7, 257, kind="subnormal"),
        _case("index keys", 65, 128),
        _case("per head", 17, 5, 16),
        _case("glm-5.2 index keys, 1 row", 1, 128, device_sized=True),
        _case("glm-5.2 index keys, 4096 rows", 4096, 128, device_sized=True),
    ]
