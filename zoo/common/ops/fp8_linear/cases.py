"""Cases of fp8_linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.fp8_quantise import FP32_SCALES, GROUP, POWERS_OF_TWO, ScaleRule
from zoo.common.program import Program
from zoo.testing import Args, LawBroken, assert_same_bytes


def _case(
    name: str,
    rows: int,
    n: int,
    k: int,
    kind: str = "normal",
    rule: ScaleRule = FP32_SCALES,
    device_sized: bool = False,
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        codes = (draw.floats(n, k).float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        drawn = draw.floats(-(-n // GROUP), -(-k // GROUP)).to(torch.promote_types(dtype, torch.float32))
        scales = drawn.abs() * (k**-0.5 / 64) + 1e-6
        return {"x_RK": draw.floats(rows, k, kind=kind), "codes_NK": codes, "scales_BG": scales}

    def call(t: Trial, args: Args) -> Any:
        return t.op("fp8_linear")(args["x_RK"], args["codes_NK"], args["scales_BG"], rule, program=t.program)

    def column(t: Trial) -> None:
        """A weight cut between blocks, and inside one: a rank's part of a fused projection brings its own rows of scales."""
        whole = t.call()
        for first, last in _cuts(n):
            part = {"codes_NK": t.args["codes_NK"][first:last], "scales_BG": _rows_of(t.args["scales_BG"], first, last)}
            try:
                assert_same_bytes(t.call({**t.args, **part}), whole[:, first:last].contiguous())
            except LawBroken as error:
                raise LawBroken(f"column law, columns {first} to {last}: {error}") from error

    graded = ("x_RK",) if kind == "normal" else ()
    return Case(name, "fp8_linear", make, call, {**row_laws("x_RK"), "column": column}, graded, device_sized, devices, kind)


def _cuts(n: int) -> list[tuple[int, int]]:
    """Ranges of columns that begin where a block does; DeepGEMM takes multiples of eight."""
    edges = [*range(0, n, GROUP), n]
    return [*zip(edges, edges[1:]), (edges[-2] // 2 // GROUP * GROUP, n)]


def _rows_of(scales_BG: Tensor, first: int, last: int) -> Tensor:
    return scales_BG[first // GROUP : -(-last // GROUP)].contiguous()


def cases(program: Program) -> list[Case]:
    small = [
        _case("tiny", 2, 8, 128),
        _case("one by one", 1, 1, 1, devices=("cpu",)),
        _case("odd", 17, 201, 300, "wide", devices=("cpu",)),
        _case("three blocks", 33, 320, 384, "wide"),
        _case("K 1024, cancelling", 17, 136, 1024, "cancel"),
        _case("powers of two", 7, 256, 512, "wide", POWERS_OF_TWO),
        _case("subnormal", 17, 64, 256, "subnormal"),
    ]
    return small + [
        _case(f"glm-5.2 {name}, {rows} rows", rows, n, k, device_sized=True)
        for name, n, k in (("q_a and kv_a", 2624, 6144), ("q_b", 16384, 2048), ("o", 6144, 16384))
        for rows in (1, 64, 257, 4096)
    ]
