"""Cases of packed_experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoo.common.ops.cases import Case, Draw, Product, Trial, row_laws
from zoo.common.ops.comparison import DRAWN, KINDS, Comparison, Shape, numbers, repeated, row_counts
from zoo.common.ops.contract import Provider
from zoo.common.ops.e2m1 import GROUP, dequantised
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law, assert_shard_law, cut_points

WEIGHTS = ("gate_up_X2FC", "gate_up_scales_X2FG", "down_XDC", "down_scales_XDG")


def drawn(draw: Draw, count: int, rows: int, columns: int, scales: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes of every value, and scales whose bytes are in [first, last]."""
    codes = draw.integers(count, rows, columns // 2, below=256).to(torch.uint8).view(torch.int8)
    first, last = scales
    exponents = draw.integers(count, rows, columns // GROUP, below=last - first + 1) + first
    return codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def _case(
    name: str,
    rows: int,
    hidden: int,
    intermediate: int,
    count: int,
    top_k: int,
    kind: str = "normal",
    scales: tuple[int, int] = (119, 123),
    limit: float | None = None,
    skewed: bool = False,
    device_sized: bool = False,
) -> Case:
    named = {} if limit is None else {"limit": limit}

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        chosen = draw.choices(rows, top_k, count)
        if skewed:  # every row's first choice is expert 0, some experts get nothing
            chosen = torch.arange(top_k, device=device).expand(rows, top_k).contiguous()
        gate_up, gate_up_scales = drawn(draw, count, 2 * intermediate, hidden, scales)
        down, down_scales = drawn(draw, count, hidden, intermediate, scales)
        return {
            "x_RD": draw.floats(rows, hidden, kind=kind),
            "experts_RK": chosen,
            "gate_up_X2FC": gate_up,
            "gate_up_scales_X2FG": gate_up_scales,
            "down_XDC": down,
            "down_scales_XDG": down_scales,
        }

    def call(t: Trial, args: Args) -> Any:
        weights = [args[name] for name in WEIGHTS]
        return t.op("packed_experts")(args["x_RD"], args["experts_RK"], *weights, program=t.program, **named)

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            x = t.args["x_RD"]
            gate_up = dequantised(t.args["gate_up_X2FC"], t.args["gate_up_scales_X2FG"], x.dtype)
            down = dequantised(t.args["down_XDC"], t.args["down_scales_XDG"], x.dtype)
            return t.op("experts")(x, t.args["experts_RK"], gate_up, down, program=t.program, **named)

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
    return Case(name, "packed_experts", make, call, laws, ("x_RD",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one of one", 1, 32, 32, 1, 1),
        _case("scales of all sizes", 7, 96, 32, 5, 2, "wide", (110, 140)),
        _case("skewed", 17, 64, 32, 6, 3, "cancel", skewed=True),
        _case("the least scales", 2, 64, 64, 8, 2, "subnormal", (0, 3)),
        _case("cut to 10", 9, 64, 96, 4, 2, scales=(121, 125), limit=10.0),
        _case("many rows of few experts", 65, 64, 64, 8, 2),
        _case("K 1024", 5, 1024, 64, 4, 2),
        _case("deepseek-v4-flash, 1 row", 1, 4096, 2048, 256, 6, limit=10.0, device_sized=True),
        _case("deepseek-v4-flash, 64 rows", 64, 4096, 2048, 256, 6, limit=10.0, device_sized=True),
        _case("deepseek-v4-flash, 1024 rows", 1024, 4096, 2048, 256, 6, limit=10.0, device_sized=True),
    ]


def products() -> list[Product]:
    """Every tile of the kernels, at widths of whole steps and at others."""

    def forward(provider: Provider, args: Args) -> Any:
        return provider.functions.forward(*args.values(), None)

    def backward(provider: Provider, args: Args) -> Any:
        grad = (args["x_RD"][:, None] * torch.arange(1, 3, device=args["x_RD"].device)[:, None]).to(args["x_RD"].dtype)
        return provider.functions.backward(grad, *args.values(), None)

    found = []
    for hidden, intermediate in ((256, 128), (160, 96)):
        for run, counts in ((forward, (1, 4, 16, 64, 256, 512)), (backward, (64, 512))):
            for rows in counts:
                name = f"{run.__name__}, {rows} rows, {hidden} by {intermediate}"
                found.append(Product(name, "packed_experts", _case("", rows, hidden, intermediate, 8, 2).make, run))
    return found


def comparison() -> Comparison:
    return Comparison(_compared)


def _compared(shape: Shape, part: str, rows: int, program: Program) -> Iterator[tuple[str, list[Any]]]:
    count, hidden, intermediate = shape
    draw = Draw(0, program.device, program.torch_dtype)
    chosen = draw.choices(rows, min(8, count), count)
    few = min(count, 4)
    for kind in KINDS:
        scales = (110, 140) if kind == "wide" else (119, 123)
        weights = (*drawn(draw, few, 2 * intermediate, hidden, scales), *drawn(draw, few, hidden, intermediate, scales))
        # torch gathers no E8M0
        whole = [repeated(held.view(torch.uint8), count).view(held.dtype) for held in weights]
        x = repeated(numbers((min(rows, DRAWN), hidden), kind, "x", program), rows)
        yield kind, [(x[:r], chosen[:r], *whole, None) for r in row_counts(rows)]
