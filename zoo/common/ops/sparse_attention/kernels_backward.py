"""sparse_attention's gradient on CUDA: of the listed rows only, in a fixed order, without atomics.

For a row r, head h and listed token t, with g the gradient of the output and D the sum of g times the output:

    p = exp(scale q . k_t - lse)        d = p (g . v_t - D) scale        weights
    d q_h   = sum over t, ascending, of d k_t                            query_gradients
    what r gives to t = sum over h of d q_h, and of p g_h in the columns of values         contributions
    d k_t   = sum over the rows that listed t, ascending, of what each gives               added_contributions

Query rows are taken in blocks, so that what their tokens are given fits; a token's sum stays in FP32 from block to block and is rounded
once, so a block's size moves no byte. Who listed a token: the block's lists sorted by token, which keeps rows in order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width
from zoo.common.rows import Rows

HELD = 5 << 28  # bytes that a block of query rows may hold beside inputs and gradients: 1.25 GiB
LANES = 64
BLOCK_COLUMNS = 64
WIDE_COLUMNS = 128
AT_ONCE = 4  # contributions that are read before the first is added


@triton.jit
def _products_with_output(
    grad_ptr, out_ptr, sums_ptr, HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr
):
    """D [R, H]: the sum of gradient times output over a head's values, by the adjacent-pair tree."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_V)
    place = (row * HEADS + head[:, None]) * VALUES + column[None, :]
    mask = (head[:, None] < HEADS) & (column[None, :] < VALUES)
    grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(sums_ptr + row * HEADS + head, pair_tree(grad * out, BLOCK_V), mask=head < HEADS)


@triton.jit(do_not_specialize=["first_row"])
def _weights_of_lists(
    q_ptr,
    grad_ptr,
    latent_ptr,
    tokens_ptr,
    counts_ptr,
    lse_ptr,
    sums_ptr,
    p_ptr,
    d_ptr,
    first_row,
    listed,
    scale,
    to_natural,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """p and d [block, H, K] of a row, a tile of its list and a block of heads."""
    mine = tl.program_id(0).to(tl.int64)
    row = first_row + mine
    tile = tl.program_id(1) * LANES
    if tile < tl.load(counts_ptr + mine):
        lane = tile + tl.arange(0, LANES)
        live = lane < tl.load(counts_ptr + mine)
        token = tl.load(tokens_ptr + mine * listed + lane, mask=live, other=0).to(tl.int64)
        head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
        q_base = q_ptr + (row * HEADS + head[:, None]) * WIDTH
        g_base = grad_ptr + (row * HEADS + head[:, None]) * VALUES
        scores = tl.zeros((BLOCK_H, LANES), dtype=tl.float32)
        shares = tl.zeros((BLOCK_H, LANES), dtype=tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK_C):
            column = start + tl.arange(0, BLOCK_C)
            k = tl.load(latent_ptr + token[None, :] * WIDTH + column[:, None], mask=live[None, :] & (column[:, None] < WIDTH), other=0.0)
            q = tl.load(q_base + column[None, :], mask=(head[:, None] < HEADS) & (column[None, :] < WIDTH), other=0.0)
            scores = tl.dot(q, k, scores, input_precision="ieee")
            if start < VALUES:
                g = tl.load(g_base + column[None, :], mask=(head[:, None] < HEADS) & (column[None, :] < VALUES), other=0.0)
                v = tl.where(column[:, None] < VALUES, k, tl.zeros_like(k))
                shares = tl.dot(g, v, shares, input_precision="ieee")
        lse = tl.load(lse_ptr + row * HEADS + head, mask=head < HEADS, other=0.0) * to_natural
        total = tl.load(sums_ptr + row * HEADS + head, mask=head < HEADS, other=0.0)
        inside = live[None, :] & (head[:, None] < HEADS)
        p = tl.where(inside, tl.exp(scores * scale - lse[:, None]), 0.0)
        d = p * (shares - total[:, None]) * scale
        place = (mine * HEADS + head[:, None]) * listed + lane[None, :]
        tl.store(p_ptr + place, p.to(p_ptr.dtype.element_ty), mask=inside)
        tl.store(d_ptr + place, d.to(d_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def _query_gradients(
    latent_ptr,
    tokens_ptr,
    counts_ptr,
    d_ptr,
    out_ptr,
    first_row,
    listed,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """d q of a row, a block of columns and a block of heads: the list ascending in one FP32 accumulator, one rounding."""
    mine = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    count = tl.load(counts_ptr + mine)
    acc = tl.zeros((BLOCK_H, BLOCK_C), dtype=tl.float32)
    for tile in range(0, count, LANES):
        lane = tile + tl.arange(0, LANES)
        live = lane < count
        token = tl.load(tokens_ptr + mine * listed + lane, mask=live, other=0).to(tl.int64)
        d = tl.load(
            d_ptr + (mine * HEADS + head[:, None]) * listed + lane[None, :], mask=live[None, :] & (head[:, None] < HEADS), other=0.0
        )
        k = tl.load(latent_ptr + token[:, None] * WIDTH + column[None, :], mask=live[:, None] & (column[None, :] < WIDTH), other=0.0)
        acc = tl.dot(d, k, acc, input_precision="ieee")
    place = ((first_row + mine) * HEADS + head[:, None]) * WIDTH + column[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(head[:, None] < HEADS) & (column[None, :] < WIDTH))


@triton.jit(do_not_specialize=["first_row"])
def _contributions(
    q_ptr,
    grad_ptr,
    counts_ptr,
    p_ptr,
    d_ptr,
    given_ptr,
    first_row,
    listed,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """What a row gives to a tile of its list, in a block of columns: heads ascending in one FP32 accumulator, d q before p g."""
    mine = tl.program_id(0).to(tl.int64)
    row = first_row + mine
    tile = tl.program_id(1) * LANES
    count = tl.load(counts_ptr + mine)
    if tile < count:
        lane = tile + tl.arange(0, LANES)
        live = lane < count
        column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
        acc = tl.zeros((LANES, BLOCK_C), dtype=tl.float32)
        for start in range(0, HEADS, BLOCK_H):
            head = start + tl.arange(0, BLOCK_H)
            place = (mine * HEADS + head[None, :]) * listed + lane[:, None]
            inside = live[:, None] & (head[None, :] < HEADS)
            d = tl.load(d_ptr + place, mask=inside, other=0.0)
            q = tl.load(
                q_ptr + (row * HEADS + head[:, None]) * WIDTH + column[None, :],
                mask=(head[:, None] < HEADS) & (column[None, :] < WIDTH),
                other=0.0,
            )
            acc = tl.dot(d, q, acc, input_precision="ieee")
            p = tl.load(p_ptr + place, mask=inside, other=0.0)
            g = tl.load(
                grad_ptr + (row * HEADS + head[:, None]) * VALUES + column[None, :],
                mask=(head[:, None] < HEADS) & (column[None, :] < VALUES),
                other=0.0,
            )
            acc = tl.dot(p, g, acc, input_precision="ieee")
        slot = mine * listed + lane
        tl.store(given_ptr + slot[:, None] * WIDTH + column[None, :], acc, mask=live[:, None] & (column[None, :] < WIDTH))


@triton.jit
def _added_contributions(given_ptr, order_ptr, bounds_ptr, total_ptr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, AT_ONCE: tl.constexpr):
    """A token's sum goes on with what the block's rows give it, one after another."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < WIDTH
    begin = tl.load(bounds_ptr + token)
    end = tl.load(bounds_ptr + token + 1)
    if begin < end:
        total = tl.load(total_ptr + token * WIDTH + column, mask=inside, other=0.0)
        for first in range(begin, end, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                there = first + i < end
                slot = tl.load(order_ptr + first + i, mask=there, other=0).to(tl.int64)
                given = tl.load(given_ptr + slot * WIDTH + column, mask=inside & there, other=0.0)
                total = total + given
        tl.store(total_ptr + token * WIDTH + column, total, mask=inside)


def rows_at_once(heads: int, width: int, listed: int, size: int) -> int:
    """Query rows of a block: their contributions, p and d, and the lists with their sort."""
    each = listed * (4 * width + 2 * size * heads + 64)
    return max(1, HELD // each)


def sparse_attention_backward(
    grad_RHV: Tensor,
    q_RHC: Tensor,
    latent_RC: Tensor,
    positions_RK: Tensor,
    out_RHV: Tensor,
    lse_RH: Tensor,
    rows: Rows,
    scale: float,
    base: float = math.e,
) -> tuple[Tensor, Tensor]:
    """(d queries, d latent rows). base: of the log-sum-exp. A row's list ends where its first -1 stands."""
    count, heads, width = q_RHC.shape
    values = out_RHV.shape[2]
    grad_q = torch.empty(count, heads, width, dtype=q_RHC.dtype, device=q_RHC.device)
    total = torch.zeros(latent_RC.shape, dtype=torch.float32, device=q_RHC.device)
    if not count:
        return grad_q, total.to(latent_RC.dtype)
    grad = grad_RHV.contiguous()
    q = q_RHC.contiguous()
    latent = latent_RC.contiguous()
    out = out_RHV.contiguous()
    lse = lse_RH.contiguous()
    # no row lists more than it sees; whole tiles, so that rows of p and d are aligned
    columns = min(positions_RK.shape[1], triton.cdiv(rows.max_length, LANES) * LANES)
    block_h = min(64, max(16, padded_width(heads)))
    head_blocks = triton.cdiv(heads, block_h)
    sums = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    value_block = max(16, padded_width(values))
    _products_with_output[(count, triton.cdiv(heads, 16))](
        grad, out, sums, HEADS=heads, VALUES=values, BLOCK_H=16, BLOCK_V=value_block, num_warps=4, **EXACT
    )
    step = min(count, rows_at_once(heads, width, columns, q.element_size()))
    p = torch.empty(step, heads, columns, dtype=q.dtype, device=q.device)
    d = torch.empty_like(p)
    given = torch.empty(step * columns, width, dtype=torch.float32, device=q.device)
    begin_R = rows.starts_N1[rows.sequence_R]
    edges = torch.arange(count + 1, dtype=torch.int32, device=q.device)
    sizes = {"HEADS": heads, "WIDTH": width, "LANES": LANES, "BLOCK_H": block_h}
    narrow = min(BLOCK_COLUMNS, max(16, padded_width(width)))
    wide = min(WIDE_COLUMNS, max(16, padded_width(width)))
    tiles = triton.cdiv(columns, LANES)
    for first in range(0, count, step):
        block = slice(first, min(first + step, count))
        mine = block.stop - first
        positions = positions_RK[block, :columns]
        tokens = torch.where(positions < 0, count, positions + begin_R[block, None]).to(torch.int32)
        counts = (positions >= 0).sum(1, dtype=torch.int32)
        _weights_of_lists[(mine, tiles, head_blocks)](
            q,
            grad,
            latent,
            tokens,
            counts,
            lse,
            sums,
            p,
            d,
            first,
            columns,
            scale,
            math.log(base),
            VALUES=values,
            BLOCK_C=narrow,
            num_warps=4,
            **sizes,
        )
        _query_gradients[(mine, triton.cdiv(width, wide), head_blocks)](
            latent, tokens, counts, d, grad_q, first, columns, BLOCK_C=wide, num_warps=4, **sizes
        )
        _contributions[(mine, tiles, triton.cdiv(width, wide))](
            q, grad, counts, p, d, given, first, columns, VALUES=values, BLOCK_C=wide, num_warps=4, **sizes
        )
        token, order = torch.sort(tokens.view(-1), stable=True)  # dead lanes come last
        bounds = torch.searchsorted(token, edges, out_int32=True)
        _added_contributions[(count, triton.cdiv(width, wide))](
            given, order, bounds, total, WIDTH=width, BLOCK_C=wide, AT_ONCE=AT_ONCE, num_warps=1, **EXACT
        )
    return grad_q, total.to(latent_RC.dtype)
