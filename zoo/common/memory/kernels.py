"""Writing rows into pages on CUDA: one launch that moves bytes and computes none."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.memory.parts import in_bytes
from zoo.common.rows import Rows

BLOCK = 1024


@triton.jit
def _write_rows(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    positions_ptr,
    sequence_ptr,
    table_ptr,
    k_stride,
    v_stride,
    table_stride,
    page_size,
    columns,
    BLOCK: tl.constexpr,
):
    """A row's key and value go to its position's place in its sequence's page."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    page = tl.load(table_ptr + tl.load(sequence_ptr + row) * table_stride + position // page_size).to(tl.int64)
    slot = page * page_size + position % page_size
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    tl.store(k_pages_ptr + slot * columns + column, tl.load(k_ptr + row * k_stride + column, mask=mask), mask=mask)
    tl.store(v_pages_ptr + slot * columns + column, tl.load(v_ptr + row * v_stride + column, mask=mask), mask=mask)


def write_rows(k_RGE: Tensor, v_RGE: Tensor, k_PSGE: Tensor, v_PSGE: Tensor, page_table_NB: Tensor, rows: Rows) -> None:
    """Row r goes to its sequence's page at its position. k and v may be strided by row."""
    columns = k_RGE.shape[1] * k_RGE.shape[2]
    assert k_PSGE.is_contiguous() and v_PSGE.is_contiguous() and page_table_NB.stride(1) == 1
    k, v = (t if t.stride()[1:] == (t.shape[2], 1) else t.contiguous() for t in (k_RGE, v_RGE))
    _write_rows[(k.shape[0], triton.cdiv(columns, BLOCK))](
        k,
        v,
        k_PSGE,
        v_PSGE,
        rows.positions_R,
        rows.sequence_R,
        page_table_NB,
        k.stride(0),
        v.stride(0),
        page_table_NB.stride(0),
        k_PSGE.shape[1],
        columns,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def _write_token_rows(
    x_ptr,
    pages_ptr,
    positions_ptr,
    sequence_ptr,
    table_ptr,
    x_stride,
    table_stride,
    page_stride,
    page_rows,
    columns,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row r of x, if its token completes a row of TOKENS tokens."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    index = position // TOKENS
    page = tl.load(table_ptr + tl.load(sequence_ptr + row) * table_stride + index // page_rows).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    if TOKENS > 1:
        mask = mask & ((position + 1) % TOKENS == 0)
    value = tl.load(x_ptr + row * x_stride + column, mask=mask)
    tl.store(pages_ptr + page * page_stride + (index % page_rows) * columns + column, value, mask=mask)


def write_token_rows(x_RE: Tensor, pages_PSE: Tensor, page_table_NB: Tensor, rows: Rows, tokens_a_row: int = 1) -> None:
    """Row r goes to its sequence's page at its position. x may be strided by row, and pages by page."""
    assert pages_PSE.stride()[1:] == (pages_PSE.shape[2], 1) and page_table_NB.stride(1) == 1
    x = x_RE if x_RE.stride(1) == 1 else x_RE.contiguous()
    columns = x_RE.shape[1]
    _write_token_rows[(x.shape[0], triton.cdiv(columns, BLOCK))](
        x,
        pages_PSE,
        rows.positions_R,
        rows.sequence_R,
        page_table_NB,
        x.stride(0),
        page_table_NB.stride(0),
        pages_PSE.stride(0),
        pages_PSE.shape[1],
        columns,
        TOKENS=tokens_a_row,
        BLOCK=BLOCK,
        num_warps=4,
    )


def write_pages(new: Sequence[Tensor], pages: Sequence[Tensor], page_table_NB: Tensor, rows: Rows, tokens_a_row: int) -> None:
    """Each of `new` [R, ...] into its pages [P, rows, ...]: keys and values of one shape by one launch."""
    if tokens_a_row == 1 and len(new) == 2 and new[0].shape == new[1].shape and new[0].dim() == 3:
        write_rows(new[0], new[1], pages[0], pages[1], page_table_NB, rows)
        return
    for row_R, page in zip(new, pages, strict=True):
        write_token_rows(in_bytes(row_R).flatten(1), in_bytes(page).flatten(2), page_table_NB, rows, tokens_a_row)
