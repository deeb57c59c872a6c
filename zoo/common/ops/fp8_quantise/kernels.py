"""fp8_quantise on CUDA: some groups of one row a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.fp8_quantise.reference import GROUP, LARGEST
from zoo.common.ops.tree_kernels import EXACT

GROUPS_A_PROGRAM = 8


@triton.jit
def codes_and_scales(x, floor, POWER_OF_TWO: tl.constexpr, LARGEST: tl.constexpr):
    """x [ROWS, COLUMNS] in FP32, each row a group -> (values whose E4M3 codes are wanted, [ROWS] scales): see the op's page."""
    size = tl.abs(x)
    largest = tl.max(size, axis=1)
    # a maximum may pass over a NaN, a sum does not
    odd = tl.sum(tl.where(size < float("inf"), 0.0, 1.0), axis=1) > 0.0
    scale = tl.div_rn(tl.maximum(largest, floor), LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(odd, float("nan"), scale)
    quotient = tl.div_rn(x, tl.broadcast_to(scale[:, None], (x.shape[0], x.shape[1])))
    code = tl.minimum(tl.maximum(quotient, -LARGEST, propagate_nan=tl.PropagateNan.ALL), LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return code, scale


@triton.jit
def _fp8_quantise(
    x_ptr,
    codes_ptr,
    scales_ptr,
    row_stride,
    width,
    groups,
    floor,
    POWER_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """scale = max(|x|, floor) / 448, code = x / scale, for TILE groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    code, scale = codes_and_scales(x, floor, POWER_OF_TWO, LARGEST)
    tl.store(codes_ptr + row * width + column, code.to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + row * groups + group, scale, mask=group < groups)


def fp8_quantise(x_RK: Tensor, floor: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Contiguous outputs; x may have any row stride."""
    rows, width = x_RK.shape
    groups = -(-width // GROUP)
    x = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    codes_RK = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales_RG = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if codes_RK.numel():
        tile = GROUPS_A_PROGRAM
        _fp8_quantise[(rows, triton.cdiv(groups, tile))](
            x,
            codes_RK,
            scales_RG,
            x.stride(0),
            width,
            groups,
            floor,
            POWER_OF_TWO=power_of_two,
            GROUP=GROUP,
            LARGEST=LARGEST,
            TILE=tile,
            num_warps=4,
            **EXACT,
        )
    return codes_RK, scales_RG
