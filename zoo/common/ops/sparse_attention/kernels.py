"""sparse_attention on CUDA: one program a row and block of heads, lanes of its list in tiles of 64, ascending.

`list_tiles` has one accumulator of values: what the tiles before gave, times exp(their peak - the new one), is where a tile's product
begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width
from zoo.common.rows import Rows

LANES = 64
BLOCK_HEADS = 16


@triton.jit(do_not_specialize=["table_stride"])
def _sparse_attention(
    q_ptr,
    latent_ptr,
    table_ptr,
    positions_ptr,
    sequence_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    q_row,
    q_head,
    table_stride,
    listed,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """o = sum_j p_j v_j over a row's list, p = softmax(scale q . latent), by a streaming softmax over tiles of LANES entries."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequence_ptr + row)
    begin = tl.load(starts_ptr + sequence).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    value_column = tl.arange(0, BLOCK_V)
    q_base = q_ptr + row * q_row + head[:, None] * q_head
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_H,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), dtype=tl.float32)
    lane = tl.arange(0, LANES)
    tile = 0
    more = tl.load(positions_ptr + row * listed) >= 0
    while more:
        place = tl.load(positions_ptr + row * listed + tile + lane, mask=tile + lane < listed, other=-1).to(tl.int64)
        live = place >= 0
        if PAGE > 0:
            page = tl.load(table_ptr + sequence * table_stride + place // PAGE, mask=live, other=0).to(tl.int64)
            source = page * PAGE + place % PAGE
        else:
            source = begin + place
        scores = tl.zeros((BLOCK_H, LANES), dtype=tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK_C):
            column = start + tl.arange(0, BLOCK_C)
            q = tl.load(q_base + column[None, :], mask=(head[:, None] < HEADS) & (column[None, :] < WIDTH), other=0.0)
            k = tl.load(latent_ptr + source[None, :] * WIDTH + column[:, None], mask=live[None, :] & (column[:, None] < WIDTH), other=0.0)
            scores = tl.dot(q, k, scores, input_precision="ieee")
        scores = tl.where(live[None, :], scores * scale, -float("inf"))
        top = tl.maximum(peak, tl.max(scores, axis=1))
        weight = tl.where(live[None, :], tl.exp(scores - top[:, None]), 0.0)
        keep = tl.exp(peak - top)
        mass = mass * keep + pair_tree(weight, LANES)
        v = tl.load(
            latent_ptr + source[:, None] * WIDTH + value_column[None, :], mask=live[:, None] & (value_column[None, :] < VALUES), other=0.0
        )
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        peak = top
        tile += LANES
        more = tl.load(positions_ptr + row * listed + tl.minimum(tile, listed - 1)) >= 0
        more = more & (tile < listed)
    safe = tl.where(mass > 0.0, mass, 1.0)
    out = tl.div_rn(acc, tl.zeros((BLOCK_H, BLOCK_V), dtype=tl.float32) + safe[:, None])
    place_out = (row * HEADS + head[:, None]) * VALUES + value_column[None, :]
    tl.store(out_ptr + place_out, out.to(out_ptr.dtype.element_ty), mask=(head[:, None] < HEADS) & (value_column[None, :] < VALUES))
    tl.store(lse_ptr + row * HEADS + head, tl.where(mass > 0.0, peak + tl.log(safe), -float("inf")), mask=head < HEADS)


def sparse_attention(
    q_RHC: Tensor, latent: Tensor, page_table_NB: Tensor | None, positions_RK: Tensor, rows: Rows, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_RHV, log-sum-exp_RH in FP32)."""
    count, heads, width = q_RHC.shape
    out = q_RHC.new_empty(count, heads, values)
    lse = torch.empty(count, heads, dtype=torch.float32, device=q_RHC.device)
    if out.numel():
        q = q_RHC if q_RHC.stride(2) == 1 else q_RHC.contiguous()
        table = rows.starts_N1 if page_table_NB is None else page_table_NB
        positions = positions_RK.contiguous()
        _sparse_attention[(count, triton.cdiv(heads, BLOCK_HEADS))](
            q,
            latent.contiguous(),
            table,
            positions,
            rows.sequence_R,
            rows.starts_N1,
            out,
            lse,
            q.stride(0),
            q.stride(1),
            table.stride(0),
            positions.shape[1],
            scale,
            HEADS=heads,
            WIDTH=width,
            VALUES=values,
            PAGE=0 if page_table_NB is None else latent.shape[1],
            LANES=LANES,
            BLOCK_H=BLOCK_HEADS,
            BLOCK_C=min(64, max(16, padded_width(width))),
            BLOCK_V=max(16, padded_width(values)),
            num_warps=4,
            num_stages=1,
            **EXACT,
        )
    return out, lse
