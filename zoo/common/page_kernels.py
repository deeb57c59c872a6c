"""Writing rows into pages on CUDA: one launch that moves bytes and computes none."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.rows import Rows

BLOCK = 1024


@triton.jit
def _write_rows(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, positions_ptr, sequence_ptr, table_ptr, k_stride, v_stride, table_stride, page_size, columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
        k, v, k_PSGE, v_PSGE, rows.positions_R, rows.sequence_R, page_table_NB, k.stride(0), v.stride(0), page_table_NB.stride(0),
        k_PSGE.shape[1], columns, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_token_rows(x_ptr, pages_ptr, positions_ptr, sequence_ptr, table_ptr, x_stride, table_stride, page_size, columns,
                      BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    page = tl.load(table_ptr + tl.load(sequence_ptr + row) * table_stride + position // page_size).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    value = tl.load(x_ptr + row * x_stride + column, mask=mask)
    tl.store(pages_ptr + (page * page_size + position % page_size) * columns + column, value, mask=mask)


def write_token_rows(x_RE: Tensor, pages_PSE: Tensor, page_table_NB: Tensor, rows: Rows) -> None:
    """Row r goes to its sequence's page at its position. x may be strided by row."""
    assert pages_PSE.is_contiguous() and page_table_NB.stride(1) == 1
    x, columns = x_RE if x_RE.stride(1) == 1 else x_RE.contiguous(), x_RE.shape[1]
    _write_token_rows[(x.shape[0], triton.cdiv(columns, BLOCK))](
        x, pages_PSE, rows.positions_R, rows.sequence_R, page_table_NB, x.stride(0), page_table_NB.stride(0), pages_PSE.shape[1], columns,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
