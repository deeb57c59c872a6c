"""Cases of linear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Product, Trial, row_laws
from zoo.common.ops.comparison import DRAWN, KINDS, Comparison, Shape, numbers, repeated, row_counts
from zoo.common.ops.contract import Provider
from zoo.common.ops.linear import Functions
from zoo.common.program import Program
from zoo.testing import Along, Args, assert_column_law

# (name, N, K) of the projections as the models call them, fused
PUBLISHED = (
    ("qwen3-8b qkv", 6144, 4096),
    ("qwen3-8b o", 4096, 4096),
    ("qwen3-8b gate_up", 24576, 4096),
    ("qwen3-8b down", 4096, 12288),
    ("qwen3-30b-a3b qkv", 5120, 2048),
    ("qwen3-30b-a3b o", 2048, 4096),
    ("qwen3-30b-a3b router", 128, 2048),
)
PUBLISHED_ROWS = (1, 64, 257, 4096)


def _case(
    name: str,
    rows: int,
    n: int,
    k: int,
    kind: str = "normal",
    k_parts: int = 1,
    wide_out: bool = False,
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        # a subnormal x meets a weight large enough for sums that are subnormal too
        scale = 2.0**10 if kind == "subnormal" else k**-0.5
        weight = draw.floats(n, k, kind="wide" if kind == "wide" else "normal", scale=scale)
        return {"x_RK": draw.floats(rows, k, kind=kind), "weight_NK": weight}

    def call(t: Trial, args: Args) -> Any:
        out = torch.promote_types(args["x_RK"].dtype, torch.float32) if wide_out else None
        return t.op("linear")(args["x_RK"], args["weight_NK"], program=t.program, out_dtype=out, k_parts=k_parts)

    def column(t: Trial) -> None:
        assert_column_law(t.call, t.args, Along("weight_NK"), seed=t.seed)

    laws = {**row_laws("x_RK"), "column": column}
    return Case(name, "linear", make, call, laws, ("x_RK", "weight_NK"), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    small = [
        _case("one by one", 1, 1, 1),
        _case("tiny", 2, 7, 3),
        _case("odd", 17, 65, 63, "wide"),
        _case("odd K 257", 65, 33, 257, "cancel"),
        _case("K 1024", 33, 129, 1024),
        _case("K 1024, float32 out", 17, 65, 1024, "wide", wide_out=True),
        _case("K 1030, cancelling", 7, 17, 1030, "cancel", wide_out=True),
        _case("subnormal", 17, 64, 128, "subnormal"),
        _case("K in 4 parts", 33, 24, 2048, "wide", k_parts=4, wide_out=True),
        _case("K in 3 parts", 7, 5, 1029, k_parts=3, wide_out=True),
    ]
    return small + [
        _case(f"{name}, {rows} rows", rows, n, k, wide_out="router" in name, device_sized=True)
        for name, n, k in PUBLISHED
        for rows in PUBLISHED_ROWS
    ]


def products() -> list[Product]:
    """Every tile of the kernel, at a K of whole steps and at another."""

    def run(provider: Provider[Functions], args: Args) -> Any:
        return provider.functions.forward(args["x_RK"], args["weight_NK"], args["x_RK"].dtype, 1)

    shapes = [(rows, columns) for rows, wide in ((16, 16400), (32, 8208), (128, 8208), (512, 4112), (600, 2064)) for columns in (200, wide)]
    return [
        Product(f"{rows} rows, {n} columns, K {k}", "linear", _case("", rows, n, k).make, run) for rows, n in shapes for k in (256, 200)
    ]


def comparison() -> Comparison:
    """In the program's dtype and in FP32, of which the kernels are two."""
    return Comparison(_compared, ("", "float32"))


def _compared(shape: Shape, part: str, rows: int, program: Program) -> Iterator[tuple[str, list[Any]]]:
    n, k, parts = shape
    dtype = torch.float32 if part == "float32" else program.torch_dtype
    made = ("", 0.0)
    weight = torch.empty(0)
    for kind in KINDS:
        # a subnormal x meets a weight large enough for sums that are subnormal too
        wanted = ("wide" if kind == "wide" else "normal", 2.0**10 if kind == "subnormal" else k**-0.5)
        if wanted != made:
            made = wanted
            weight = repeated(numbers((min(n, DRAWN), k), wanted[0], "weight", program, wanted[1]), n)
        x = repeated(numbers((min(rows, DRAWN), k), kind, "x", program), rows)
        yield kind, [(x[:count], weight, dtype, parts) for count in row_counts(rows)]
