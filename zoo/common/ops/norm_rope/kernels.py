"""norm_rope on CUDA: one launch for all query and key heads of a row; the backward is rope's, then rms_norm's."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.norm_rope.reference import Heads, join_heads, split_heads
from zoo.common.ops.rms_norm.kernels import rms_norm_backward
from zoo.common.ops.rope.kernels import rope
from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width

TILE = 1024  # elements that share a program


@triton.jit
def _norm_rope(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    position_ptr,
    q_ptr,
    k_ptr,
    row_stride,
    inverse_width,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TILE heads of a row, queries first, then keys: norm, round, rotate, round."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    query = (head < HEADS)[:, None]
    column = tl.arange(0, BLOCK)
    inside = column[None, :] < WIDTH
    mask = (head[:, None] < HEADS + KV_HEADS) & inside
    # a column's partner in the rotation is read and normalised again: the same numbers, and no exchange between threads
    partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
    first = tl.where(head < HEADS, head * QUERY_WIDTH, HEADS * QUERY_WIDTH + (head - HEADS) * WIDTH)
    source = qkv_ptr + row * row_stride + first[:, None]
    own = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(pair_tree(own * own, BLOCK) * inverse_width + eps)[:, None]
    own_gain = _gain(q_weight_ptr, k_weight_ptr, column, query, inside, offset)
    other_gain = _gain(q_weight_ptr, k_weight_ptr, partner, query, inside, offset)
    own = ((own * scale) * own_gain).to(q_ptr.dtype.element_ty).to(tl.float32)
    other = ((other * scale) * other_gain).to(q_ptr.dtype.element_ty).to(tl.float32)
    rotated = column < 2 * HALF
    entry = table_ptr + (tl.load(position_ptr + row).to(tl.int64) * HALF + tl.where(column < HALF, column, column - HALF)) * 2
    cos = tl.load(entry, mask=rotated, other=1.0)
    sin = tl.load(entry + 1, mask=rotated, other=0.0)
    turned = own * cos[None, :]
    swung = other * sin[None, :]
    # a sum and a difference, since Triton's -x is 0 - x, which loses the sign of a zero
    out = tl.where((column < HALF)[None, :], turned - swung, turned + swung)
    out = tl.where(rotated[None, :], out, own).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + (row * HEADS + head[:, None]) * WIDTH + column[None, :], out, mask=mask & query)
    tl.store(k_ptr + (row * KV_HEADS + head[:, None] - HEADS) * WIDTH + column[None, :], out, mask=mask & (query == 0))


@triton.jit
def _gain(q_weight_ptr, k_weight_ptr, column, query, inside, offset):
    """The weight of a head's kind, in FP32, plus the offset."""
    q_gain = tl.load(q_weight_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
    k_gain = tl.load(k_weight_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(query, q_gain, k_gain) + offset


def norm_rope(
    qkv_RC: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, heads: Heads, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(q_RHE, k_RGE), contiguous; rows may be strided."""
    rows = qkv_RC.shape[0]
    block = padded_width(heads.width)
    q = qkv_RC.new_empty(rows, heads.queries, heads.width)
    k = qkv_RC.new_empty(rows, heads.keys, heads.width)
    if rows == 0:
        return q, k
    assert qkv_RC.stride(1) == 1 and table.is_contiguous() and positions.is_contiguous()
    tile = max(1, TILE // block)
    _norm_rope[(rows, triton.cdiv(heads.queries + heads.keys, tile))](
        qkv_RC,
        q_weight,
        k_weight,
        table,
        positions,
        q,
        k,
        qkv_RC.stride(0),
        1.0 / heads.width,
        eps,
        offset or -0.0,
        HEADS=heads.queries,
        KV_HEADS=heads.keys,
        WIDTH=heads.width,
        QUERY_WIDTH=heads.query_width,
        HALF=table.shape[1],
        TILE=tile,
        BLOCK=block,
        num_warps=4,
        **EXACT,
    )
    return q, k


def norm_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv_RC: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Tensor,
    positions: Tensor,
    heads: Heads,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv and of the two weights."""
    q, k, _ = split_heads(qkv_RC, heads)
    parts = [
        rms_norm_backward(rope(grad.contiguous(), table, positions, True), None, x, weight, eps, offset)
        for grad, x, weight in ((grad_q, q, q_weight), (grad_k, k, k_weight))
    ]
    return join_heads(parts[0][0], parts[1][0], grad_v, heads), parts[0][1], parts[1][1]
