"""Cases of fp8_experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.fp8_quantise import FP32_SCALES, GROUP, POWERS_OF_TWO, ScaleRule
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law, assert_shard_law, cut_points

WEIGHTS = ("gate_up_codes_X2FD", "gate_up_scales_XBG", "down_codes_XDF", "down_scales_XBG")


def _coded(draw: Draw, count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    codes = (draw.floats(count, n, k).float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    drawn = draw.floats(count, -(-n // GROUP), -(-k // GROUP)).to(torch.promote_types(draw.dtype, torch.float32))
    return codes, drawn.abs() * (k**-0.5 / 64) + 1e-6


def _case(
    name: str,
    rows: int,
    hidden: int,
    intermediate: int,
    count: int,
    top_k: int,
    kind: str = "normal",
    rule: ScaleRule = FP32_SCALES,
    skewed: bool = False,
    device_sized: bool = False,
    limit: float | None = None,
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        chosen = draw.choices(rows, top_k, count)
        if skewed:  # every row's first choice is expert 0, some experts get nothing
            chosen = torch.arange(top_k, device=device).expand(rows, top_k).contiguous()
        gate_up, gate_up_scales = _coded(draw, count, 2 * intermediate, hidden)
        down, down_scales = _coded(draw, count, hidden, intermediate)
        return {
            "x_RD": draw.floats(rows, hidden, kind=kind),
            "experts_RK": chosen,
            **dict(zip(WEIGHTS, (gate_up, gate_up_scales, down, down_scales), strict=True)),
        }

    def call(t: Trial, args: Args) -> Any:
        weights = (args[name] for name in WEIGHTS)
        return t.op("fp8_experts")(args["x_RD"], args["experts_RK"], *weights, rule, program=t.program, limit=limit)

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            x = t.args["x_RD"]
            chosen = t.args["experts_RK"]
            gate_up, gate_up_scales, down, down_scales = (t.args[name] for name in WEIGHTS)
            out = torch.empty(*chosen.shape, x.shape[1], dtype=x.dtype, device=x.device)
            for e in chosen.unique().tolist():
                row, slot = (chosen == e).nonzero(as_tuple=True)
                inner = t.op("fp8_linear")(x[row], gate_up[e], gate_up_scales[e], rule, program=t.program)
                hidden_rows = t.op("swiglu")(inner, program=t.program, limit=limit)
                out[row, slot] = t.op("fp8_linear")(hidden_rows, down[e], down_scales[e], rule, program=t.program)
            return out

        assert_fusion_law(t.call, composed)

    def shard(t: Trial) -> None:
        def at_degree(degree: int) -> Any:
            x = t.args["x_RD"]
            chosen = t.args["experts_RK"]
            out = torch.empty(*chosen.shape, x.shape[1], dtype=x.dtype, device=x.device)
            for begin, end in cut_points(count, degree):  # a rank holds experts begin .. end and sees only the slots that chose them
                row, slot = ((chosen >= begin) & (chosen < end)).nonzero(as_tuple=True)
                if len(row):
                    local = {"x_RD": x[row], "experts_RK": chosen[row, slot][:, None] - begin}
                    out[row, slot] = t.call(local | {name: t.args[name][begin:end] for name in WEIGHTS})[:, 0]
            return out

        assert_shard_law(at_degree, [degree for degree in (1, 2, 4, 8) if degree <= count])

    laws = {**row_laws("x_RD", "experts_RK"), "fusion": fusion, **({"shard": shard} if count > 1 else {})}
    graded = ("x_RD",) if kind == "normal" else ()
    return Case(name, "fp8_experts", make, call, laws, graded, device_sized, devices, kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one of one", 1, 128, 128, 1, 1),
        _case("a width of no whole blocks", 3, 72, 128, 4, 2, "wide", devices=("cpu",)),
        _case("wide", 9, 256, 128, 5, 2, "wide"),
        _case("skewed", 17, 128, 128, 6, 3, "cancel", skewed=True),
        _case("cut to 1, powers of two", 9, 128, 128, 4, 2, rule=POWERS_OF_TWO, limit=1.0),
        _case("many rows of few experts", 65, 128, 128, 8, 2),
        _case("K 1024", 5, 1024, 128, 4, 2),
        _case("qwen3-30b-a3b, 1 row", 1, 2048, 768, 128, 8, device_sized=True),
        _case("qwen3-30b-a3b, 64 rows", 64, 2048, 768, 128, 8, device_sized=True),
        _case("glm-5.2, 16 of its experts, 300 rows", 300, 6144, 2048, 16, 8, device_sized=True),
    ]
