"""causal_conv on CUDA: one launch for the rows, one for the carries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT
from zoo.common.rows import Rows

BLOCK = 512
# rows and channels of a program, where sequences have one row or several: neither moves a byte
SHAPES = ((1, BLOCK), (16, 1024))
TURN = tl.constexpr(2)  # rows loaded together; it divides every number of rows above 1 in SHAPES


@triton.jit
def _taps(weight_ptr, column, mask, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight's four columns in FP32. Cutting one contiguous tile costs barriers, for which a single row does not stay."""
    if ROWS > 1:
        weight = tl.load(weight_ptr + column[:, None] * 4 + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(weight, (BLOCK, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
    else:
        w0 = tl.load(weight_ptr + column * 4, mask=mask, other=0.0).to(tl.float32)
        w1 = tl.load(weight_ptr + column * 4 + 1, mask=mask, other=0.0).to(tl.float32)
        w2 = tl.load(weight_ptr + column * 4 + 2, mask=mask, other=0.0).to(tl.float32)
        w3 = tl.load(weight_ptr + column * 4 + 3, mask=mask, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _tap(x_ptr, carry_ptr, row, local, slot, x_stride, channels, column, mask, BACK: tl.constexpr, CARRY: tl.constexpr):
    """x of the row BACK before this one: of this push, of the carry, or zero before a document's start."""
    inside = local >= BACK
    value = tl.load(x_ptr + (row - BACK) * x_stride + column, mask=mask & inside, other=0.0).to(tl.float32)
    if CARRY:
        place = carry_ptr + (slot * 3 + (3 - BACK + local)) * channels + column
        value = tl.where(inside, value, tl.load(place, mask=mask & (inside == 0), other=0.0).to(tl.float32))
    return value


@triton.jit
def _all_inside(sequence_ptr, starts_ptr, first, rows, ROWS: tl.constexpr):
    """Whether there are ROWS rows, with three of its own push before each."""
    row = first + tl.arange(0, ROWS)
    sequence = tl.load(sequence_ptr + row, mask=row < rows, other=0)
    local = row - tl.load(starts_ptr + sequence).to(tl.int64)
    return tl.min(tl.where(row < rows, local, 0), axis=0) >= 3


@triton.jit
def _silu_sum(third, second, last, own, weight):
    """silu of the four rows times their weights, added from the oldest on, each product rounded."""
    total = third * weight[0]
    total = total + second * weight[1]
    total = total + last * weight[2]
    total = total + own * weight[3]
    return tl.div_rn(total, 1.0 + tl.exp(-total))


@triton.jit
def _causal_conv(
    x_ptr,
    weight_ptr,
    carry_ptr,
    slots_ptr,
    sequence_ptr,
    starts_ptr,
    y_ptr,
    rows,
    x_stride,
    channels,
    CARRY: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of BLOCK channels. Where each has three rows of its own push before it, they slide through registers."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < channels
    inside = _all_inside(sequence_ptr, starts_ptr, first, rows, ROWS) if ROWS > 1 else False
    weight = _taps(weight_ptr, column, mask, ROWS, BLOCK)
    if inside:
        here_ptr = x_ptr + first * x_stride + column
        out_ptr = y_ptr + first * channels + column
        third = tl.load(here_ptr - 3 * x_stride, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(here_ptr - 2 * x_stride, mask=mask, other=0.0).to(tl.float32)
        last = tl.load(here_ptr - x_stride, mask=mask, other=0.0).to(tl.float32)
        for _ in range(0, ROWS, TURN):
            loaded = ()
            for i in tl.static_range(TURN):
                loaded = loaded + (tl.load(here_ptr + i * x_stride, mask=mask, other=0.0),)
            for i in tl.static_range(TURN):
                own = loaded[i].to(tl.float32)
                y = _silu_sum(third, second, last, own, weight)
                tl.store(out_ptr + i * channels, y.to(y_ptr.dtype.element_ty), mask=mask)
                third = second
                second = last
                last = own
            here_ptr += TURN * x_stride
            out_ptr += TURN * channels
    else:
        for row in range(first, tl.minimum(first + ROWS, rows)):
            sequence = tl.load(sequence_ptr + row)
            local = row - tl.load(starts_ptr + sequence).to(tl.int64)
            slot = tl.load(slots_ptr + sequence).to(tl.int64) if SLOTS else sequence.to(tl.int64)
            third = _tap(x_ptr, carry_ptr, row, local, slot, x_stride, channels, column, mask, 3, CARRY)
            second = _tap(x_ptr, carry_ptr, row, local, slot, x_stride, channels, column, mask, 2, CARRY)
            last = _tap(x_ptr, carry_ptr, row, local, slot, x_stride, channels, column, mask, 1, CARRY)
            own = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
            y = _silu_sum(third, second, last, own, weight)
            tl.store(y_ptr + row * channels + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _advance(x_ptr, carry_ptr, slots_ptr, starts_ptr, x_stride, channels, BLOCK: tl.constexpr):
    """The last three rows of the old carry and the pushed rows; all are read before any is written."""
    sequence = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < channels
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    count = tl.load(starts_ptr + sequence + 1).to(tl.int64) - start
    carry = carry_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * 3 * channels + column
    first = _last(x_ptr, carry, start, count - 3, x_stride, channels, column, mask)
    second = _last(x_ptr, carry, start, count - 2, x_stride, channels, column, mask)
    third = _last(x_ptr, carry, start, count - 1, x_stride, channels, column, mask)
    tl.store(carry, first, mask=mask)
    tl.store(carry + channels, second, mask=mask)
    tl.store(carry + 2 * channels, third, mask=mask)


@triton.jit
def _last(x_ptr, carry, start, local, x_stride, channels, column, mask):
    """Row `local` of a push, or where it is negative one of the three rows carried from before."""
    pushed = tl.load(x_ptr + (start + local) * x_stride + column, mask=mask & (local >= 0), other=0.0)
    return tl.where(local >= 0, pushed, tl.load(carry + (3 + local) * channels, mask=mask & (local < 0), other=0.0))


def causal_conv(x_RC: Tensor, weight_C4: Tensor, carry: Tensor | None, slots_N: Tensor | None, rows: Rows) -> Tensor:
    """carry [S, 3, C] by slot (by sequence where there are no slots), oldest first; None: zeros."""
    y = torch.empty(x_RC.shape, dtype=x_RC.dtype, device=x_RC.device)
    if carry is not None and slots_N is None:
        carry = carry.contiguous()  # handed on, often cut out of wider rows; a pool is contiguous, or `advance` would miss it
    if y.numel():
        count, channels = x_RC.shape
        height, width = SHAPES[rows.max_rows > 1]
        _causal_conv[(triton.cdiv(count, height), triton.cdiv(channels, width))](
            x_RC,
            weight_C4,
            x_RC if carry is None else carry,
            rows.starts_N1 if slots_N is None else slots_N,
            rows.sequence_R,
            rows.starts_N1,
            y,
            count,
            x_RC.stride(0),
            channels,
            CARRY=carry is not None,
            SLOTS=slots_N is not None,
            ROWS=height,
            BLOCK=width,
            num_warps=4,
            **EXACT,
        )
    return y


def advance(x_RC: Tensor, carry_SWC: Tensor, slots_N: Tensor, rows: Rows) -> None:
    """The last three rows of each sequence become its carry."""
    channels = x_RC.shape[1]
    grid = (slots_N.shape[0], triton.cdiv(channels, BLOCK))
    _advance[grid](x_RC, carry_SWC, slots_N, rows.starts_N1, x_RC.stride(0), channels, BLOCK=BLOCK, num_warps=4, **EXACT)
