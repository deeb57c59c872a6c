"""rms_norm on CUDA: one program holds whole rows; a few very wide rows are split over two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width

TILE = 1024  # elements of narrow rows that share a program
CHUNK = 2048  # columns of a split row per program: one subtree
GRAD_STEPS = 32  # row tiles that one program adds into a partial weight gradient


@triton.jit
def _scale(square_sum, inverse_width, eps):
    """1 / sqrt(mean x^2 + eps)."""
    return tl.rsqrt(square_sum * inverse_width + eps)


@triton.jit
def _gain(weight_ptr, column, mask, OFFSET: tl.constexpr):
    """The weight in FP32; a plain one gets nothing added, so that its zeros keep their signs."""
    gain = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        gain = gain + OFFSET
    return gain


@triton.jit
def _start(row, inner, outer_stride, inner_stride):
    """Where row `row` of [outer, inner, D] starts; the row number fits 32 bits, its offset may not."""
    short = row.to(tl.int32)
    return (short // inner).to(tl.int64) * outer_stride + (short % inner) * inner_stride


@triton.jit
def _rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    rows,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    inverse_width,
    eps,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """y = t / sqrt(mean t^2 + eps) (weight + OFFSET) of ROWS rows, t = x + residual rounded first (ADD), or x."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < WIDTH)
    x_row = _start(row, inner, x_outer, x_inner)
    total = tl.load(x_ptr + x_row[:, None] + column[None, :], mask=mask, other=0.0)
    flat = row[:, None] * WIDTH + column[None, :]
    if ADD:
        residual_row = _start(row, inner, residual_outer, residual_inner)
        residual = tl.load(residual_ptr + residual_row[:, None] + column[None, :], mask=mask, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + flat, total, mask=mask)
    value = total.to(tl.float32)
    scale = _scale(pair_tree(value * value, BLOCK), inverse_width, eps)
    gain = _gain(weight_ptr, column, column < WIDTH, OFFSET)
    normed = (value * scale[:, None]) * gain[None, :]
    tl.store(normed_ptr + flat, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _chunk_squares(
    x_ptr,
    residual_ptr,
    total_ptr,
    sums_ptr,
    x_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
):
    """One aligned chunk of a row: its residual sum, and the node of the row's tree that lies above it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * CHUNK + tl.arange(0, CHUNK)
    mask = column < WIDTH
    total = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + row * WIDTH + column, total, mask=mask)
    value = total.to(tl.float32)
    tl.store(sums_ptr + row * PARTS + part, pair_tree(value * value, CHUNK))


@triton.jit
def _chunk_apply(
    total_ptr,
    weight_ptr,
    sums_ptr,
    normed_ptr,
    total_stride,
    inverse_width,
    eps,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The top of the tree, made again by every program of the row, then the chunk's outputs."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    scale = _scale(pair_tree(tl.load(sums_ptr + row * PARTS + tl.arange(0, PARTS)), PARTS), inverse_width, eps)
    column = part * CHUNK + tl.arange(0, CHUNK)
    mask = column < WIDTH
    value = tl.load(total_ptr + row * total_stride + column, mask=mask, other=0.0).to(tl.float32)
    gain = _gain(weight_ptr, column, mask, OFFSET)
    normed = (value * scale) * gain
    tl.store(normed_ptr + row * WIDTH + column, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(normed, total), both contiguous; total is x itself where there is no residual. The shape picks the launch."""
    width = x.shape[-1]
    few = x.numel() <= 4 * width and width >= 8192
    return (rms_norm_split if few else rms_norm_whole)(x, residual, weight, eps, offset)


def rms_norm_whole(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """A program holds one wide row or several narrow ones."""
    normed = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    if x.numel() == 0:
        return normed, total
    width = x.shape[-1]
    x_3 = _outer_inner(x)
    residual_3 = x_3 if residual is None else _outer_inner(residual)
    rows = x.numel() // width
    inner = x_3.shape[1]
    block = padded_width(width)
    tile = _rows_of(width)
    _rows[(triton.cdiv(rows, tile),)](
        x_3,
        residual_3,
        weight,
        normed,
        total,
        rows,
        inner,
        *x_3.stride()[:2],
        *residual_3.stride()[:2],
        1.0 / width,
        eps,
        OFFSET=offset,
        WIDTH=width,
        ROWS=tile,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=_warps(block),
        **EXACT,
    )
    return normed, total


def rms_norm_split(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The same tree over two launches, one program a chunk of a row: for few, very wide rows."""
    normed = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    if x.numel() == 0:
        return normed, total
    width = x.shape[-1]
    x_RD = _flat_rows(x)
    residual_RD = x_RD if residual is None else _flat_rows(residual)
    chunk = min(CHUNK, padded_width(width))
    parts = padded_width(width) // chunk
    grid = (x_RD.shape[0], parts)
    sums = torch.empty(grid, dtype=torch.float32, device=x.device)
    common = {"WIDTH": width, "CHUNK": chunk, "PARTS": parts, "num_warps": 4, **EXACT}
    added = residual is not None
    _chunk_squares[grid](x_RD, residual_RD, total, sums, x_RD.stride(0), residual_RD.stride(0), ADD=added, **common)
    source, stride = (total, width) if added else (x_RD, x_RD.stride(0))
    _chunk_apply[grid](source, weight, sums, normed, stride, 1.0 / width, eps, OFFSET=offset, **common)
    return normed, total


@triton.jit
def _grad_rows(
    grad_ptr,
    grad_total_ptr,
    total_ptr,
    weight_ptr,
    grad_x_ptr,
    scale_ptr,
    rows,
    inner,
    total_outer,
    total_inner,
    inverse_width,
    eps,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """grad_x of a tile of rows; each row's scale is kept for the weight's gradient."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < WIDTH)
    flat = row[:, None] * WIDTH + column[None, :]
    total_row = _start(row, inner, total_outer, total_inner)
    value = tl.load(total_ptr + total_row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    upstream = tl.load(grad_ptr + flat, mask=mask, other=0.0).to(tl.float32)
    gain = _gain(weight_ptr, column, column < WIDTH, OFFSET)
    row_scale = _scale(pair_tree(value * value, BLOCK), inverse_width, eps)
    scale = row_scale[:, None]
    normal = value * scale
    scaled = upstream * gain[None, :]
    mean = (pair_tree(scaled * normal, BLOCK) * inverse_width)[:, None]
    grad_x = scale * (scaled - normal * mean)
    if ADD:
        grad_x += tl.load(grad_total_ptr + flat, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_x_ptr + flat, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, row_scale, mask=row < rows)


@triton.jit
def _grad_weight(
    grad_ptr,
    total_ptr,
    scale_ptr,
    partial_ptr,
    rows,
    inner,
    total_outer,
    total_inner,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """STEPS tiles of rows, one after another, into one partial sum for each row place of the tile."""
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + place
        mask = (row[:, None] < rows) & (column[None, :] < WIDTH)
        total_row = _start(row, inner, total_outer, total_inner)
        value = tl.load(total_ptr + total_row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(grad_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
        acc += upstream * (value * scale[:, None])
    partial = partial_ptr + (tl.program_id(0).to(tl.int64) * ROWS + place)[:, None] * WIDTH + column[None, :]
    tl.store(partial, acc, mask=column[None, :] < WIDTH)


def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x (and of the residual) and of the weight; rows are added in fixed blocks, with no atomics."""
    width = total.shape[-1]
    grad_x = total.new_empty(total.shape)
    if total.numel() == 0:
        return grad_x, torch.zeros_like(weight)
    total_3 = _outer_inner(total)
    upstream = grad.contiguous()
    carried = upstream if grad_total is None else grad_total.contiguous()
    rows = total.numel() // width
    block = padded_width(width)
    tile = _rows_of(width)
    place = (rows, total_3.shape[1], *total_3.stride()[:2])
    scale = torch.empty(rows, dtype=torch.float32, device=total.device)
    _grad_rows[(triton.cdiv(rows, tile),)](
        upstream,
        carried,
        total_3,
        weight,
        grad_x,
        scale,
        *place,
        1.0 / width,
        eps,
        OFFSET=offset,
        WIDTH=width,
        ROWS=tile,
        BLOCK=block,
        ADD=grad_total is not None,
        num_warps=_warps(block),
        **EXACT,
    )
    programs = triton.cdiv(rows, tile * GRAD_STEPS)
    columns = min(block, TILE)
    partial = torch.empty(programs * tile, width, dtype=torch.float32, device=total.device)
    _grad_weight[(programs, triton.cdiv(width, columns))](
        upstream, total_3, scale, partial, *place, WIDTH=width, ROWS=tile, BLOCK=columns, STEPS=GRAD_STEPS, num_warps=4, **EXACT
    )
    return grad_x, partial.sum(0).to(weight.dtype)


def _rows_of(width: int) -> int:
    """Rows that share a program."""
    return max(1, TILE // padded_width(width))


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def _outer_inner(x: Tensor) -> Tensor:
    """x as [outer, inner, D] with unit column stride, copied only if its strides don't allow a view."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x[:, None] if x.dim() == 2 else x.reshape(-1, *x.shape[-2:]) if x.dim() > 2 else x[None, None]


def _flat_rows(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])
