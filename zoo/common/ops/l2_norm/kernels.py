"""l2_norm on CUDA: several heads a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width


@triton.jit
def _l2_norm(x_ptr, y_ptr, row_stride, head_stride, heads, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """y = x / sqrt(sum x^2 + eps), TILE heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    mask = (head[:, None] < heads) & (column[None, :] < WIDTH)
    x = tl.load(x_ptr + row * row_stride + head[:, None] * head_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(pair_tree(x * x, BLOCK) + eps)[:, None]
    tl.store(y_ptr + (row * heads + head[:, None]) * WIDTH + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def l2_norm(x_RHK: Tensor, eps: float) -> Tensor:
    """Contiguous output; x may be a strided view with unit column stride."""
    rows, heads, width = x_RHK.shape
    y = x_RHK.new_empty(x_RHK.shape)
    if y.numel():
        block = padded_width(width)
        tile = max(1, 1024 // block)
        _l2_norm[(rows, triton.cdiv(heads, tile))](
            x_RHK, y, x_RHK.stride(0), x_RHK.stride(1), heads, eps, WIDTH=width, TILE=tile, BLOCK=block, num_warps=4, **EXACT
        )
    return y
