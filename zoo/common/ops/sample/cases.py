"""Cases of sample and score_filtered."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.common.row_sampling import DrawParams, RowSampling
from zoo.testing import Args, assert_fusion_law

COLUMNS = ("inverse_temperature_R", "top_k_R", "mass_limit_R", "min_p_R", "seed_R", "position_R", "greedy_R")

PARAMS = (
    DrawParams(seed=1),
    DrawParams(temperature=0.0),
    DrawParams(temperature=0.6, top_p=0.95, top_k=20, seed=2),
    DrawParams(top_k=3, seed=3),
    DrawParams(top_p=0.5, seed=4),
    DrawParams(temperature=1.7, min_p=0.05, seed=5),
    DrawParams(temperature=3.0, seed=2**64 - 1),
)


def _rows(args: Args) -> RowSampling:
    return RowSampling(*(args[name] for name in COLUMNS))


def _case(name: str, rows: int, vocabulary: int, width: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        params = [PARAMS[r % len(PARAMS)] for r in range(rows)]
        sampling = RowSampling.of(params, draw.integers(rows, below=1 << 20), device)
        hidden = draw.floats(rows, width, kind=kind)
        weight = draw.floats(vocabulary, width, scale=3.0 * width**-0.5, kind=kind)
        return {"hidden_RD": hidden, "weight_VD": weight, **dict(zip(COLUMNS, sampling.tensors(), strict=True))}

    def call(t: Trial, args: Args) -> Any:
        logits = t.op("logits")(args["hidden_RD"], args["weight_VD"], program=t.program)
        return tuple(t.op("sample")(logits, _rows(args), t.program))

    def fusion(t: Trial) -> None:
        """The trainer's replay from hidden rows gives the bytes that the sampler reported."""
        token, _, reported = t.call()
        replay = t.op("score_filtered")(t.args["hidden_RD"], t.args["weight_VD"], token, _rows(t.args), t.program).log_prob_R
        assert_fusion_law(lambda: reported, lambda: replay)

    return Case(name, "sample", make, call, {**row_laws("hidden_RD", *COLUMNS), "fusion": fusion}, (), device_sized)


def cases(program: Program) -> list[Case]:
    return [
        _case("one token", 7, 1, 8),
        _case("ragged", 7, 257, 33),
        _case("ties", 21, 300, 1, "ties"),
        _case("beyond a block of the draw", 14, 4097, 16),
        _case("qwen3-8b, 1 row", 1, 151936, 4096, device_sized=True),
        _case("qwen3-8b, 64 rows", 64, 151936, 4096, device_sized=True),
        _case("qwen3-8b, 257 rows", 257, 151936, 4096, device_sized=True),
    ]
