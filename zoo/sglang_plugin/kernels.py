"""Moving bytes for SGLang's pools on CUDA: a decode step's page table, and the new rows of a layer."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TABLE_BLOCK = 256
ZERO_SLOTS = 4  # slots that one program zeroes at a time: more would not fit its registers
DECODE_PARTS = 8  # programs that share the zeroing of a page; only decode starts pages one row at a time


@triton.jit(do_not_specialize=["request_stride", "columns"])
def _page_table(
    request_ptr,
    index_ptr,
    length_ptr,
    table_ptr,
    lengths_ptr,
    tails_ptr,
    request_stride,
    columns,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TAILS: tl.constexpr,
):
    """Page b of a sequence is its token b * PAGE's slot over PAGE; columns beyond its length hold the reserved page 0."""
    n = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + n).to(tl.int32)
    request = request_ptr + tl.load(index_ptr + n).to(tl.int64) * request_stride
    tl.store(lengths_ptr + n, length)
    if TAILS:
        tl.store(tails_ptr + n, tl.where((length - 1) % PAGE == 0, PAGE - 1, 0))
    pages = tl.cdiv(length, PAGE)
    for start in range(0, columns, BLOCK):
        b = start + tl.arange(0, BLOCK)
        slot = tl.load(request + b * PAGE, mask=b < pages, other=0)
        tl.store(table_ptr + n * columns + b, (slot // PAGE).to(tl.int32), mask=b < columns)


def page_table(
    request_to_slot: Tensor,
    request_N: Tensor,
    length_N: Tensor,
    page: int,
    table_NB: Tensor,
    lengths_N: Tensor,
    tails_N: Tensor | None,
) -> None:
    """Fills table_NB, lengths_N (int32) and, for a decode step, tails_N: slots behind each row's own that it must zero."""
    count, columns = table_NB.shape
    tails = lengths_N if tails_N is None else tails_N
    _page_table[(count,)](
        request_to_slot,
        request_N,
        length_N,
        table_NB,
        lengths_N,
        tails,
        request_to_slot.stride(0),
        columns,
        PAGE=page,
        BLOCK=TABLE_BLOCK,
        TAILS=tails_N is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["k_stride", "v_stride"])
def _append(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slot_ptr,
    tail_ptr,
    k_stride,
    v_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Row r's key and value into its slot, and zeros into the `tail` slots behind it (the rest of a page that it starts)."""
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + r).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if part == 0:
        tl.store(k_pool_ptr + slot * WIDTH + column, tl.load(k_ptr + r * k_stride + column, mask=inside), mask=inside)
        tl.store(v_pool_ptr + slot * WIDTH + column, tl.load(v_ptr + r * v_stride + column, mask=inside), mask=inside)
    tail = tl.load(tail_ptr + r)
    zeros = tl.zeros((ZERO, BLOCK), k_pool_ptr.dtype.element_ty)
    for start in range(part * ZERO, tail, PARTS * ZERO):
        behind = start + tl.arange(0, ZERO)
        place = (slot + 1 + behind)[:, None] * WIDTH + column[None, :]
        mask = (behind < tail)[:, None] & inside[None, :]
        tl.store(k_pool_ptr + place, zeros, mask=mask)
        tl.store(v_pool_ptr + place, zeros, mask=mask)


def append(k_RGE: Tensor, v_RGE: Tensor, k_SGE: Tensor, v_SGE: Tensor, slot_R: Tensor, tail_R: Tensor, decode: bool) -> None:
    """Writes rows into their slots of one layer's pools; see `_append`."""
    rows, heads, width = k_RGE.shape
    if rows == 0:
        return
    k, v = (t if t.stride(1) == width and t.stride(2) == 1 else t.contiguous() for t in (k_RGE, v_RGE))
    parts = DECODE_PARTS if decode else 1
    _append[(rows, parts)](
        k,
        v,
        k_SGE,
        v_SGE,
        slot_R,
        tail_R,
        k.stride(0),
        v.stride(0),
        WIDTH=heads * width,
        BLOCK=triton.next_power_of_2(heads * width),
        ZERO=ZERO_SLOTS,
        PARTS=parts,
        num_warps=4,
    )
