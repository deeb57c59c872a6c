"""Cases of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Product, Trial, row_laws
from zoo.common.ops.comparison import DRAWN, KINDS, Comparison, Shape, numbers, repeated, row_counts
from zoo.common.ops.contract import Provider
from zoo.common.ops.experts import Functions
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law, assert_shard_law, cut_points


def _case(
    name: str,
    rows: int,
    hidden: int,
    intermediate: int,
    count: int,
    top_k: int,
    kind: str = "normal",
    skewed: bool = False,
    device_sized: bool = False,
    limit: float | None = None,
) -> Case:
    named = {} if limit is None else {"limit": limit}

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        chosen = draw.choices(rows, top_k, count)
        if skewed:  # every row's first choice is expert 0, some experts get nothing
            chosen = torch.arange(top_k, device=device).expand(rows, top_k).contiguous()
        return {
            "x_RD": draw.floats(rows, hidden, kind=kind),
            "experts_RK": chosen,
            "gate_up_X2FD": draw.floats(count, 2 * intermediate, hidden, scale=hidden**-0.5),
            "down_XDF": draw.floats(count, hidden, intermediate, scale=intermediate**-0.5),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("experts")(args["x_RD"], args["experts_RK"], args["gate_up_X2FD"], args["down_XDF"], program=t.program, **named)

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            x = t.args["x_RD"]
            chosen = t.args["experts_RK"]
            out = torch.empty(*chosen.shape, x.shape[1], dtype=x.dtype, device=x.device)
            for e in chosen.unique().tolist():
                row, slot = (chosen == e).nonzero(as_tuple=True)
                gate_up = t.op("linear")(x[row], t.args["gate_up_X2FD"][e], program=t.program)
                hidden = t.op("swiglu")(gate_up, program=t.program, **named)
                out[row, slot] = t.op("linear")(hidden, t.args["down_XDF"][e], program=t.program)
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
                    weights = {name: t.args[name][begin:end] for name in ("gate_up_X2FD", "down_XDF")}
                    out[row, slot] = t.call(local | weights)[:, 0]
            return out

        assert_shard_law(at_degree, [degree for degree in (1, 2, 4, 8) if degree <= count])

    laws = {**row_laws("x_RD", "experts_RK"), "fusion": fusion, **({"shard": shard} if count > 1 else {})}
    return Case(name, "experts", make, call, laws, ("x_RD", "gate_up_X2FD", "down_XDF"), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one of one", 1, 8, 4, 1, 1),
        _case("odd", 7, 33, 17, 5, 2, "wide"),
        _case("skewed", 17, 64, 32, 6, 3, "cancel", skewed=True),
        _case("subnormal", 2, 64, 64, 8, 2, "subnormal"),
        _case("many rows of few experts", 65, 64, 64, 8, 2),
        _case("K 1024", 5, 1024, 64, 4, 2),
        _case("cut to 1", 9, 64, 32, 4, 2, limit=1.0),
        _case("qwen3-30b-a3b, 1 row", 1, 2048, 768, 128, 8, device_sized=True),
        _case("qwen3-30b-a3b, 64 rows", 64, 2048, 768, 128, 8, device_sized=True),
        _case("qwen3-30b-a3b, 1024 rows", 1024, 2048, 768, 128, 8, device_sized=True),
    ]


def products() -> list[Product]:
    """Every tile of the kernels forward, both backward, at widths of whole steps and at others."""

    def forward(provider: Provider[Functions], args: Args) -> Any:
        return provider.functions.forward(*args.values())

    def backward(provider: Provider[Functions], args: Args) -> Any:
        grad = (args["x_RD"][:, None] * torch.arange(1, 3, device=args["x_RD"].device)[:, None]).to(args["x_RD"].dtype)
        return provider.functions.backward(grad, *args.values())

    found = []
    for hidden, intermediate in ((256, 128), (160, 72)):
        for run, counts in ((forward, (1, 4, 16, 64, 256, 512)), (backward, (64, 512))):
            for rows in counts:
                name = f"{run.__name__}, {rows} rows, {hidden} by {intermediate}"
                found.append(Product(name, "experts", _case("", rows, hidden, intermediate, 8, 2).make, run))
    return found


def comparison() -> Comparison:
    return Comparison(_compared)


def _compared(shape: Shape, part: str, rows: int, program: Program) -> Iterator[tuple[str, list[Any]]]:
    count, hidden, intermediate = shape
    chosen = Draw(0, program.device, program.torch_dtype).choices(rows, min(8, count), count)
    gate_up = repeated(numbers((min(count, 4), 2 * intermediate, hidden), "normal", "gate_up", program, hidden**-0.5), count)
    for kind in KINDS:
        scale = 2.0**10 if kind == "subnormal" else intermediate**-0.5
        if kind != "cancel":
            down = repeated(numbers((min(count, 4), hidden, intermediate), "normal", "down", program, scale), count)
        x = repeated(numbers((min(rows, DRAWN), hidden), kind, "x", program), rows)
        yield kind, [(x[:r], chosen[:r], gate_up, down, None) for r in row_counts(rows)]
