"""head_linear on CUDA: linear's tile walk, a grid axis more for the heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 64


def _tile(rows: int) -> dict[str, int]:
    if rows <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}
    if rows <= 512:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["rows"])
def _head_linear(
    x_ptr,
    w_ptr,
    y_ptr,
    rows,
    columns,
    heads,
    x_row,
    x_head,
    w_head,
    w_column,
    w_depth,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y[:, h] = x[:, h] W_h^T for a tile of one head: K ascending from 0 in one FP32 accumulator."""
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns beyond the end repeat the last one and are not stored
    x_tile = x_ptr + head * x_head + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_row + k[None, :]
    w_tile = w_ptr + head * w_head + tl.minimum(n, columns - 1).to(tl.int64)[None, :] * w_column + k[:, None] * w_depth
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(x_tile)
            b = tl.load(w_tile)
        else:
            a = tl.load(x_tile, mask=k[None, :] < DEPTH - start, other=0.0)
            b = tl.load(w_tile, mask=k[:, None] < DEPTH - start, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x_tile += BLOCK_K
        w_tile += BLOCK_K * w_depth
    out = y_ptr + (m.to(tl.int64)[:, None] * heads + head) * columns + n[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < columns))


def head_linear(x_RHK: Tensor, weight_HNK: Tensor) -> Tensor:
    rows, heads, depth = x_RHK.shape
    columns = weight_HNK.shape[1]
    y = x_RHK.new_empty(rows, heads, columns)
    if y.numel() == 0:
        return y
    x = x_RHK if x_RHK.stride(2) == 1 else x_RHK.contiguous()
    tile = _tile(rows)
    grid = (triton.cdiv(rows, tile["BLOCK_M"]), triton.cdiv(columns, tile["BLOCK_N"]), heads)
    _head_linear[grid](
        x,
        weight_HNK,
        y,
        rows,
        columns,
        heads,
        x.stride(0),
        x.stride(1),
        *weight_HNK.stride(),
        DEPTH=depth,
        BLOCK_K=BLOCK_K,
        **tile,
    )
    return y


def head_linear_backward(grad_RHN: Tensor, x_RHK: Tensor, weight_HNK: Tensor) -> tuple[Tensor, Tensor]:
    """Two batched cuBLAS products with FP32 accumulation: one shape gives the same bytes in every run."""
    grad_HRN = grad_RHN.to(x_RHK.dtype).transpose(0, 1)
    grad_x = torch.bmm(grad_HRN, weight_HNK).transpose(0, 1)
    return grad_x, torch.bmm(grad_HRN.transpose(1, 2), x_RHK.transpose(0, 1))
