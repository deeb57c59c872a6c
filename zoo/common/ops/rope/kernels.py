"""rope on CUDA: one launch over rows and tiles of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT
from zoo.common.ops.trees import padded_width


@triton.jit
def _rope(
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
    NEIGHBOURS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pairs (a, b) become (a cos - b sin, b cos + a sin); INVERSE turns the other way. Columns beyond 2 HALF are copied."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    mask = (head[:, None] < heads) & (column[None, :] < WIDTH)
    rotated = column < 2 * HALF
    # which angle a column has, and whether it is the second of its pair; neighbours lie side by side in what is read, halves in
    # what is written, and the gradient goes back
    if NEIGHBOURS and INVERSE:
        angle = column // 2
        second = column % 2
    else:
        angle = column % HALF
        second = column // HALF
    # each column also reads its partner, so that no value moves between threads
    if NEIGHBOURS and not INVERSE:
        first = 2 * angle
        mine = first + second
        partner = first + 1 - second
    else:
        mine = angle + second * HALF
        partner = angle + (1 - second) * HALF
    source = x_ptr + row * row_stride + head.to(tl.int64)[:, None] * head_stride
    own = tl.load(source + tl.where(rotated, mine, column)[None, :], mask=mask, other=0.0).to(tl.float32)
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
    place = (row * heads + head[:, None]) * WIDTH + column[None, :]
    tl.store(y_ptr + place, out.to(y_ptr.dtype.element_ty), mask=mask)


def rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, inverse: bool, neighbours: bool = False) -> Tensor:
    """Contiguous; x may be a strided view. `inverse` turns the other way and back to where the pairs came from (the gradient)."""
    rows, heads, width = x_RHE.shape
    y = x_RHE.new_empty(x_RHE.shape)
    if y.numel() == 0:
        return y
    x = x_RHE if x_RHE.stride(2) == 1 else x_RHE.contiguous()
    block = padded_width(width)
    tile = max(1, 1024 // block)
    _rope[(rows, triton.cdiv(heads, tile))](
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
        NEIGHBOURS=neighbours,
        TILE=tile,
        BLOCK=block,
        num_warps=4,
        **EXACT,
    )
    return y
