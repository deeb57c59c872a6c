"""hadamard on CUDA: some rows a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT

NUMBERS_A_PROGRAM = 1024


@triton.jit
def _hadamard(x_ptr, y_ptr, row_stride, rows, scale, WIDTH: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr):
    """TILE rows of WIDTH = 2^STAGES columns."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column >= 0)[None, :]
    turned = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    for stage in tl.static_range(STAGES):
        # partners become the last dimension
        pairs = tl.permute(tl.reshape(turned, (TILE, WIDTH >> (stage + 1), 2, 1 << stage)), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        turned = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (TILE, WIDTH))
    tl.store(y_ptr + row[:, None] * WIDTH + column[None, :], (turned * scale).to(y_ptr.dtype.element_ty), mask=mask)


def hadamard(x_RE: Tensor) -> Tensor:
    """Contiguous; x may have any row stride."""
    rows, width = x_RE.shape
    x = x_RE if x_RE.stride(1) == 1 else x_RE.contiguous()
    y_RE = x_RE.new_empty(rows, width)
    if y_RE.numel():
        tile = max(1, NUMBERS_A_PROGRAM // width)
        stages = width.bit_length() - 1
        _hadamard[(triton.cdiv(rows, tile),)](
            x, y_RE, x.stride(0), rows, width**-0.5, WIDTH=width, STAGES=stages, TILE=tile, num_warps=4, **EXACT
        )
    return y_RE
