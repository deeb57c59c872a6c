"""compress on CUDA: one program a row and block of channels, which ends at once unless the row's token completes a window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.history import OpenWindows, WholeWindows
from zoo.common.ops.compress.windows import Window
from zoo.common.ops.tree_kernels import EXACT, pair_tree_first
from zoo.common.ops.trees import padded_width
from zoo.common.rows import Rows


@triton.jit
def _load(rows_ptr, pool_ptr, source, slot, position, columns, live, pushed, inside, HELD: tl.constexpr, WIDTH2: tl.constexpr):
    """[slots of a window, channels]: of the rows that are pushed, or of the sequence's slot."""
    here = (live & pushed)[:, None] & inside
    kept = (live & (pushed == 0))[:, None] & inside
    new = tl.load(rows_ptr + source[:, None] * WIDTH2 + columns, mask=here, other=0.0)
    old = tl.load(pool_ptr + (slot * HELD + position[:, None] % HELD) * WIDTH2 + columns, mask=kept, other=0.0)
    return tl.where(here, new, old)


@triton.jit
def _compress(
    rows_ptr,
    ape_ptr,
    pool_ptr,
    slot_ptr,
    positions_ptr,
    sequence_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    width,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = sum_j v_j e_j / sum_j e_j, e = exp(gate + ape - the largest), over a window's tokens, zero where none is complete."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < width)[None, :]
    position = tl.load(positions_ptr + row)
    out = tl.zeros((BLOCK,), dtype=tl.float32)
    if (position + 1) % TOKENS == 0:
        sequence = tl.load(sequence_ptr + row)
        begin = tl.load(starts_ptr + sequence).to(tl.int64)
        end = tl.load(starts_ptr + sequence + 1).to(tl.int64)
        before = tl.load(lengths_ptr + sequence).to(tl.int64) - (end - begin)
        slot = tl.load(slot_ptr + sequence).to(tl.int64)
        j = tl.arange(0, BLOCK_J)
        at = position + 1 - SLOTS + j
        live = (j < SLOTS) & (at >= 0)
        pushed = at >= before
        source = begin + at - before
        second = (j // TOKENS) if OVERLAPS else (j * 0)
        columns = second[:, None] * width + channel[None, :]
        value = _load(rows_ptr, pool_ptr, source, slot, at, columns, live, pushed, inside, HELD, 2 * COLUMNS)
        gate = _load(rows_ptr, pool_ptr, source, slot, at, COLUMNS + columns, live, pushed, inside, HELD, 2 * COLUMNS)
        seen = live[:, None] & inside
        gate = gate + tl.load(ape_ptr + (j % TOKENS)[:, None] * COLUMNS + columns, mask=seen, other=0.0)
        peak = tl.max(tl.where(seen, gate, -float("inf")), axis=0)
        weight = tl.where(seen, tl.exp(gate - tl.where(channel < width, peak, 0.0)[None, :]), 0.0)
        total = tl.where(channel < width, pair_tree_first(weight, BLOCK_J, BLOCK), 1.0)
        out = tl.div_rn(pair_tree_first(weight * tl.where(seen, value, 0.0), BLOCK_J, BLOCK), total)
    tl.store(out_ptr + row * width + channel, out.to(out_ptr.dtype.element_ty), mask=channel < width)


@triton.jit
def _advance(
    rows_ptr,
    pool_ptr,
    slot_ptr,
    positions_ptr,
    sequence_ptr,
    lengths_ptr,
    columns,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A sequence's newest HELD rows into its slot, position p at p % HELD."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + row)
    sequence = tl.load(sequence_ptr + row)
    if position + HELD >= tl.load(lengths_ptr + sequence):
        place = (tl.load(slot_ptr + sequence).to(tl.int64) * HELD + position % HELD) * columns + column
        value = tl.load(rows_ptr + row * columns + column, mask=column < columns)
        tl.store(pool_ptr + place, value, mask=column < columns)


def compress(
    rows_RC: Tensor, ape_WP: Tensor, history: OpenWindows | WholeWindows, rows: Rows, window: Window, dtype: torch.dtype
) -> Tensor:
    """[R, width]; whole documents read no slot."""
    columns = ape_WP.shape[1]
    width = columns // (2 if window.overlaps else 1)
    out = rows_RC.new_empty(rows_RC.shape[0], width, dtype=dtype)
    if out.numel():
        x = rows_RC.contiguous()
        opened = isinstance(history, OpenWindows)
        block = min(64, padded_width(width))
        _compress[(rows_RC.shape[0], triton.cdiv(width, block))](
            x,
            ape_WP.contiguous(),
            history.rows_SWC if opened else x,
            history.slot_N if opened else rows.sequence_R,
            rows.positions_R,
            rows.sequence_R,
            rows.starts_N1,
            rows.lengths_N,
            out,
            width,
            TOKENS=window.tokens,
            OVERLAPS=window.overlaps,
            SLOTS=window.held,
            COLUMNS=columns,
            HELD=window.held,
            BLOCK_J=padded_width(window.held),
            BLOCK=block,
            **EXACT,
        )
    return out


def advance(rows_RC: Tensor, history: OpenWindows, rows: Rows, window: Window) -> None:
    """The newest rows of each sequence go into its slot. ValueError unless the pool is contiguous: it is written in place."""
    if not history.rows_SWC.is_contiguous():
        raise ValueError(f"compress: a pool of open windows must be contiguous, its strides are {history.rows_SWC.stride()}")
    if rows_RC.numel():
        columns = rows_RC.shape[1]
        block = min(1024, padded_width(columns))
        operands = (rows_RC.contiguous(), history.rows_SWC, history.slot_N, rows.positions_R, rows.sequence_R, rows.lengths_N, columns)
        _advance[(rows_RC.shape[0], triton.cdiv(columns, block))](*operands, HELD=window.held, BLOCK=block)
