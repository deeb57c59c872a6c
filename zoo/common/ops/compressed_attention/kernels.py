"""compressed_attention on CUDA: one program a row and block of heads; tiles of 64 lanes of its compressed rows, then of its window.

`list_tiles` has one accumulator of values: what the tiles before gave, times exp(their peak - the new one), is where a tile's product
begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.history import WindowedRows
from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width
from zoo.common.rows import Rows

LANES = 64
BLOCK_HEADS = 16


@triton.jit
def _list_tile(
    q_base,
    rows_ptr,
    source,
    live,
    head,
    scale,
    peak,
    mass,
    acc,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """(peak, mass, values) of a streaming softmax behind one more tile of rows, which are keys and values alike."""
    scores = tl.zeros((BLOCK_H, LANES), dtype=tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        q = tl.load(q_base + column[None, :], mask=(head[:, None] < HEADS) & (column[None, :] < WIDTH), other=0.0)
        k = tl.load(rows_ptr + source[None, :] * WIDTH + column[:, None], mask=live[None, :] & (column[:, None] < WIDTH), other=0.0)
        scores = tl.dot(q, k, scores, input_precision="ieee")
    scores = tl.where(live[None, :], scores * scale, -float("inf"))
    top = tl.maximum(peak, tl.max(scores, axis=1))
    weight = tl.where(live[None, :], tl.exp(scores - top[:, None]), 0.0)
    keep = tl.exp(peak - top)
    value_column = tl.arange(0, BLOCK_V)
    v = tl.load(rows_ptr + source[:, None] * WIDTH + value_column[None, :], mask=live[:, None] & (value_column[None, :] < WIDTH), other=0.0)
    acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return top, mass * keep + pair_tree(weight, LANES), acc


@triton.jit(do_not_specialize=["table_stride", "listed"])
def _compressed_attention(
    q_ptr,
    window_ptr,
    compressed_ptr,
    table_ptr,
    chosen_ptr,
    sinks_ptr,
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
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHOSEN: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """o = sum_j p_j v_j, p = softmax(scale q . v, sink): compressed rows (TOKENS 0: none; CHOSEN: those of a list), then the window."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequence_ptr + row)
    begin = tl.load(starts_ptr + sequence).to(tl.int64)
    position = tl.load(positions_ptr + row)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    q_base = q_ptr + row * q_row + head[:, None] * q_head
    lane = tl.arange(0, LANES)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_H,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), dtype=tl.float32)
    if TOKENS > 0:
        count = (position + 1) // TOKENS
        if CHOSEN:
            count = tl.minimum(count, listed)
        tile = count * 0
        more = count > 0
        if CHOSEN:
            more = more & (tl.load(chosen_ptr + row * listed) >= 0)
        while more:
            if CHOSEN:
                place = tl.load(chosen_ptr + row * listed + tile + lane, mask=tile + lane < listed, other=-1).to(tl.int64)
                live = place >= 0
            else:
                place = (tile + lane).to(tl.int64)
                live = place < count
            if PAGE > 0:
                rows_a_page: tl.constexpr = PAGE // TOKENS
                page = tl.load(table_ptr + sequence * table_stride + place // rows_a_page, mask=live, other=0).to(tl.int64)
                source = page * rows_a_page + place % rows_a_page
            else:
                source = begin + (place + 1) * TOKENS - 1
            peak, mass, acc = _list_tile(
                q_base, compressed_ptr, source, live, head, scale, peak, mass, acc, HEADS, WIDTH, LANES, BLOCK_H, BLOCK_C, BLOCK_V
            )
            tile += LANES
            more = tile < count
            if CHOSEN:
                more = more & (tl.load(chosen_ptr + row * listed + tl.minimum(tile, listed - 1)) >= 0)
    first = tl.maximum(position + 1 - WINDOW, 0)
    tile = first
    while tile <= position:
        place = (tile + lane).to(tl.int64)
        live = place <= position
        if PAGE > 0:
            page = tl.load(table_ptr + sequence * table_stride + place // PAGE, mask=live, other=0).to(tl.int64)
            source = page * PAGE + place % PAGE
        else:
            source = begin + place
        peak, mass, acc = _list_tile(
            q_base, window_ptr, source, live, head, scale, peak, mass, acc, HEADS, WIDTH, LANES, BLOCK_H, BLOCK_C, BLOCK_V
        )
        tile += LANES
    sink = tl.load(sinks_ptr + head, mask=head < HEADS, other=0.0)
    top = tl.maximum(peak, sink)
    keep = tl.exp(peak - top)
    mass = mass * keep + tl.exp(sink - top)
    out = tl.div_rn(acc * keep[:, None], tl.zeros((BLOCK_H, BLOCK_V), dtype=tl.float32) + mass[:, None])
    value_column = tl.arange(0, BLOCK_V)
    place_out = (row * HEADS + head[:, None]) * WIDTH + value_column[None, :]
    tl.store(out_ptr + place_out, out.to(out_ptr.dtype.element_ty), mask=(head[:, None] < HEADS) & (value_column[None, :] < WIDTH))
    tl.store(lse_ptr + row * HEADS + head, top + tl.log(mass), mask=head < HEADS)


def compressed_attention(
    q_RHE: Tensor, history: WindowedRows, chosen_RK: Tensor | None, sinks_H: Tensor, rows: Rows, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_RHE, log-sum-exp_RH in FP32, the sink's part in it)."""
    count, heads, width = q_RHE.shape
    out = q_RHE.new_empty(count, heads, width)
    lse = torch.empty(count, heads, dtype=torch.float32, device=q_RHE.device)
    if out.numel():
        q = q_RHE if q_RHE.stride(2) == 1 else q_RHE.contiguous()
        table = rows.starts_N1 if history.page_table_NB is None else history.page_table_NB
        token_rows = history.window.contiguous()
        chosen = rows.starts_N1[None] if chosen_RK is None else chosen_RK.contiguous()
        _compressed_attention[(count, triton.cdiv(heads, BLOCK_HEADS))](
            q,
            token_rows,
            token_rows if history.compressed is None else history.compressed.contiguous(),
            table,
            chosen,
            sinks_H.contiguous(),
            rows.positions_R,
            rows.sequence_R,
            rows.starts_N1,
            out,
            lse,
            q.stride(0),
            q.stride(1),
            table.stride(0),
            chosen.shape[1],
            scale,
            HEADS=heads,
            WIDTH=width,
            TOKENS=history.tokens,
            WINDOW=window,
            CHOSEN=chosen_RK is not None,
            PAGE=0 if history.page_table_NB is None else history.window.shape[1],
            LANES=LANES,
            BLOCK_H=BLOCK_HEADS,
            BLOCK_C=min(64, max(16, padded_width(width))),
            BLOCK_V=max(16, padded_width(width)),
            num_warps=4,
            num_stages=1,
            **EXACT,
        )
    return out, lse
