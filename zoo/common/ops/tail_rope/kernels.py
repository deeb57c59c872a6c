"""tail_rope on CUDA: one launch over rows and tiles of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT
from zoo.common.ops.trees import padded_width


@triton.jit
def _tail_rope(
    x_ptr,
    table_ptr,
    position_ptr,
    y_ptr,
    row_stride,
    head_stride,
    heads,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Neighbours (a, b) of the last 2 HALF columns become (a cos - b sin, b cos + a sin); INVERSE turns the other way."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    mask = (head[:, None] < heads) & (column[None, :] < WIDTH)
    still: tl.constexpr = WIDTH - 2 * HALF
    place = tl.maximum(column - still, 0)
    rotated = (column >= still) & (column < WIDTH)
    angle = place // 2
    second = place % 2
    # each column also reads its partner, so that no value moves between threads
    partner = still + 2 * angle + 1 - second
    source = x_ptr + row * row_stride + head.to(tl.int64)[:, None] * head_stride
    own = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + tl.where(rotated, partner, column)[None, :], mask=mask, other=0.0).to(tl.float32)
    entry = table_ptr + (tl.load(position_ptr + row).to(tl.int64) * HALF + angle) * 2
    cos = tl.load(entry, mask=rotated, other=1.0)
    sin = tl.load(entry + 1, mask=rotated, other=0.0)
    turned = own * cos[None, :]
    swung = other * sin[None, :]
    # a sum and a difference, since Triton's -x is 0 - x, which loses the sign of a zero
    minus = (second == 1) if INVERSE else (second == 0)
    out = tl.where(minus[None, :], turned - swung, turned + swung)
    out = tl.where(rotated[None, :], out, own)
    tl.store(y_ptr + (row * heads + head[:, None]) * WIDTH + column[None, :], out.to(y_ptr.dtype.element_ty), mask=mask)


def tail_rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, inverse: bool) -> Tensor:
    """Contiguous; x may be a strided view."""
    rows, heads, width = x_RHE.shape
    y = x_RHE.new_empty(rows, heads, width)
    if y.numel():
        x = x_RHE if x_RHE.stride(2) == 1 else x_RHE.contiguous()
        block = padded_width(width)
        tile = max(1, 1024 // block)
        _tail_rope[(rows, triton.cdiv(heads, tile))](
            x,
            table_PC2.contiguous(),
            positions_R.contiguous(),
            y,
            x.stride(0),
            x.stride(1),
            heads,
            WIDTH=width,
            HALF=table_PC2.shape[1],
            INVERSE=inverse,
            TILE=tile,
            BLOCK=block,
            num_warps=4,
            **EXACT,
        )
    return y
