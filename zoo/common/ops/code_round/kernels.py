"""code_round on CUDA: some groups of one row a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.code_round.reference import WHOLE
from zoo.common.ops.tree_kernels import EXACT

if TYPE_CHECKING:
    from zoo.common.ops.code_round import Grid

GROUPS_A_PROGRAM = 8


@triton.jit
def _code_round(
    x_ptr,
    y_ptr,
    row_stride,
    columns,
    width,
    floor,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE groups of one row; columns behind the coded ones are copied."""
    row = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    coded = column < columns
    own = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(coded, own, 0.0)
    size = tl.abs(x)
    largest = tl.max(size, axis=1)
    # a maximum may pass over a NaN, a sum does not
    odd = tl.sum(tl.where(size < float("inf"), 0.0, 1.0), axis=1) > 0.0
    scale = tl.div_rn(tl.maximum(largest, floor), LARGEST)
    scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(tl.where(odd, float("nan"), scale)[:, None], (TILE, GROUP))
    quotient = tl.minimum(tl.div_rn(size, scale), LARGEST, propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.maximum(quotient.to(tl.int32, bitcast=True) >> 23, LEAST + 127)
    step = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)
    code = (tl.div_rn(quotient, step) + WHOLE - WHOLE) * step
    bits = (code * scale).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    out = tl.where(coded, bits.to(tl.float32, bitcast=True), own)
    tl.store(y_ptr + row * width + column, out.to(y_ptr.dtype.element_ty), mask=inside)


def code_round(x_RE: Tensor, columns: int, grid: Grid) -> Tensor:
    """Contiguous; x may have any row stride."""
    rows, width = x_RE.shape
    x = x_RE if x_RE.stride(1) == 1 else x_RE.contiguous()
    y_RE = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if y_RE.numel():
        tiles = triton.cdiv(triton.cdiv(width, grid.group), GROUPS_A_PROGRAM)
        _code_round[(rows, tiles)](
            x,
            y_RE,
            x.stride(0),
            columns,
            width,
            grid.floor,
            LARGEST=grid.largest,
            MANTISSA=grid.mantissa,
            LEAST=grid.least,
            WHOLE=WHOLE,
            GROUP=grid.group,
            TILE=GROUPS_A_PROGRAM,
            num_warps=4,
            **EXACT,
        )
    return y_RE
