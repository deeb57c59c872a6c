"""Cases of head_linear."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Product, Trial, row_laws
from zoo.common.ops.contract import Provider
from zoo.common.ops.head_linear import Functions
from zoo.common.program import Program
from zoo.testing import Along, Args, assert_column_law, assert_fusion_law, assert_shard_law, cut_points


def _case(
    name: str, rows: int, heads: int, columns: int, depth: int, kind: str = "normal", transposed: bool = False, device_sized: bool = False
) -> Case:
    """`transposed`: the weight lies [H, K, N] in memory, as the up-projection of latent keys does."""

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {
            "x_RHK": draw.floats(rows, heads, depth, kind=kind),
            "weight_HNK": draw.floats(heads, columns, depth, kind=kind, scale=depth**-0.5),
        }

    def laid(weight_HNK: torch.Tensor) -> torch.Tensor:
        return weight_HNK.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight_HNK

    def call(t: Trial, args: Args) -> Any:
        return t.op("head_linear")(args["x_RHK"], laid(args["weight_HNK"]), program=t.program)

    def column(t: Trial) -> None:
        assert_column_law(t.call, t.args, Along("weight_HNK", dim=1), seed=t.seed)

    def shard(t: Trial) -> None:
        def at_degree(degree: int) -> Any:
            cuts = cut_points(heads, degree)
            parts = [{"x_RHK": t.args["x_RHK"][:, a:b], "weight_HNK": t.args["weight_HNK"][a:b]} for a, b in cuts]
            return torch.cat([t.call(part) for part in parts], 1)

        assert_shard_law(at_degree, (1, 2, heads))

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            pairs = zip(t.args["x_RHK"].unbind(1), t.args["weight_HNK"], strict=True)
            return torch.stack([t.op("linear")(x.contiguous(), w.contiguous(), program=t.program) for x, w in pairs], 1)

        assert_fusion_law(t.call, composed)

    laws = {**row_laws("x_RHK"), "column": column, "shard": shard, "fusion": fusion}
    return Case(name, "head_linear", make, call, laws, ("x_RHK", "weight_HNK"), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("tiny", 1, 2, 1, 1),
        _case("odd", 17, 3, 33, 65, "wide"),
        _case("cancelling, transposed", 33, 2, 64, 96, "cancel", transposed=True),
        _case("subnormal", 7, 2, 16, 48, "subnormal"),
        _case("queries to latents", 65, 4, 32, 16, transposed=True),
        _case("latents to values", 65, 4, 24, 32),
        *(
            _case(f"glm-5.2 {what}, {rows} rows", rows, 64, columns, depth, transposed=columns > depth, device_sized=True)
            for rows in (1, 257)
            for what, columns, depth in (("queries to latents", 512, 192), ("latents to values", 256, 512))
        ),
    ]


def products() -> list[Product]:
    """Every tile of the kernel, with both layouts of the weight, at a K of whole steps and at another."""

    def run(provider: Provider[Functions], args: Args) -> Any:
        forward = provider.functions.forward
        weight = args["weight_HNK"]
        return forward(args["x_RHK"], weight), forward(args["x_RHK"], weight.transpose(1, 2).contiguous().transpose(1, 2))

    return [
        Product(f"{rows} rows, K {depth}", "head_linear", _case("", rows, 2, 130, depth).make, run)
        for rows in (16, 512, 600)
        for depth in (192, 100)
    ]
