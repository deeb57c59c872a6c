"""combine on CUDA: a row's contributor leaves live in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width


def _block(rows: int, contributors: int) -> int:
    """Columns of a program of 128 threads: few rows spread over more programs, and many leaves need their registers."""
    return 256 if rows <= 64 else max(256, min(1024, 8192 // padded_width(contributors)))


@triton.jit
def round_double(x, DTYPE: tl.constexpr):
    """FP64 to DTYPE with one rounding: the hop through FP32 is rounded to odd, which the rounding to BF16 can't notice."""
    near = x.to(tl.float32)
    if DTYPE == tl.float32:
        return near
    error = x - near.to(tl.float64)
    bits = near.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    # one step towards x: away from zero where the error has the number's sign (a zero keeps its sign when x underflows)
    step = tl.where((error > 0) == (bits >= 0), 1, -1)
    odd = tl.where((error != 0) & ((bits & 1) == 0) & finite, bits + step, bits)
    return odd.to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def _add_to_leaf(leaves, owner, term, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Adds `term` to leaf `owner` of the COUNT from FIRST on. The owner is the whole program's, so all take the same branches."""
    HALF: tl.constexpr = COUNT // 2
    if COUNT == 1:
        leaves = leaves[:FIRST] + (leaves[FIRST] + term,) + leaves[FIRST + 1 :]
    elif owner < FIRST + HALF:
        leaves = _add_to_leaf(leaves, owner, term, FIRST, HALF)
    else:
        leaves = _add_to_leaf(leaves, owner, term, FIRST + HALF, COUNT - HALF)
    return leaves


@triton.jit
def _combine(
    slots_ptr,
    weights_ptr,
    experts_ptr,
    shared_ptr,
    y_ptr,
    slots_row,
    slots_slot,
    shared_stride,
    width,
    SLOTS: tl.constexpr,
    LEAVES: tl.constexpr,
    EXPERTS_EACH: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A slot's contributor is the whole program's, so a branch finds its leaf and no column is masked."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    kind = slots_ptr.dtype.element_ty
    values = ()  # every load is under way before the first is waited for
    for slot in tl.static_range(SLOTS):
        values = values + (tl.load(slots_ptr + row * slots_row + slot * slots_slot + column, mask=mask, other=0.0),)
    if SHARED:
        shared = tl.load(shared_ptr + row * shared_stride + column, mask=mask, other=0.0)
    owners = ()
    weights = ()
    for slot in tl.static_range(SLOTS):
        owners = owners + ((tl.load(experts_ptr + row * SLOTS + slot).to(tl.int32) // EXPERTS_EACH) if LEAVES > 1 else 0,)
        weights = weights + (tl.load(weights_ptr + row * SLOTS + slot),)

    leaves = (tl.zeros((BLOCK,), tl.float32),) * LEAVES
    for slot in tl.static_range(SLOTS):
        term = weights[slot] * values[slot].to(tl.float32)
        leaves = _add_to_leaf(leaves, owners[slot], term, 0, LEAVES)

    level = ()
    for leaf in tl.static_range(LEAVES):
        level = level + (leaves[leaf].to(kind).to(tl.float64),)
    if SHARED:
        level = level + (shared.to(tl.float64),)
    for _ in tl.static_range((LEAVES + SHARED - 1).bit_length()):
        above = ()
        for i in tl.static_range(0, len(level) - 1, 2):
            above = above + (level[i] + level[i + 1],)
        level = above + level[len(level) // 2 * 2 :]  # an odd leaf is carried
    tl.store(y_ptr + row * width + column, round_double(level[0], y_ptr.dtype.element_ty), mask=mask)


def combine(slots_RKD: Tensor, weights_RK: Tensor, experts_RK: Tensor, shared_RD: Tensor | None, block: int, contributors: int) -> Tensor:
    """`block` experts belong to each contributor. Slot and shared rows may be strided."""
    rows, slots, width = slots_RKD.shape
    y = slots_RKD.new_empty(rows, width)
    if y.numel() == 0:
        return y
    x = slots_RKD if slots_RKD.stride(2) == 1 else slots_RKD.contiguous()
    shared = x if shared_RD is None else shared_RD if shared_RD.stride(1) == 1 else shared_RD.contiguous()
    columns = _block(rows, contributors)
    _combine[(rows, triton.cdiv(width, columns))](
        x,
        weights_RK.contiguous(),
        experts_RK.contiguous(),
        shared,
        y,
        x.stride(0),
        x.stride(1),
        shared.stride(0),
        width,
        SLOTS=slots,
        LEAVES=contributors,
        EXPERTS_EACH=block,
        SHARED=shared_RD is not None,
        BLOCK=columns,
        num_warps=4,
        maxnreg=128,
        **EXACT,
    )
    return y


@triton.jit
def _combine_backward(
    grad_ptr,
    slots_ptr,
    weights_ptr,
    grad_slots_ptr,
    grad_weights_ptr,
    slots_row,
    slots_slot,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d slot = weight d y, and d weight = slot . d y by the tree over D, of one slot of a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    grad = tl.load(grad_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(slots_ptr + row * slots_row + slot * slots_slot + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weights_ptr + row * SLOTS + slot)
    out = grad_slots_ptr + (row * SLOTS + slot) * WIDTH + column
    tl.store(out, (weight * grad).to(grad_slots_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_weights_ptr + row * SLOTS + slot, pair_tree(value * grad, BLOCK))


def combine_backward(grad_RD: Tensor, slots_RKD: Tensor, weights_RK: Tensor) -> tuple[Tensor, Tensor]:
    """(d slots, d weights); the dot products are trees over D."""
    rows, slots, width = slots_RKD.shape
    grad_slots = slots_RKD.new_empty(slots_RKD.shape)
    grad_weights = weights_RK.new_empty(weights_RK.shape)
    if grad_slots.numel():
        x = slots_RKD if slots_RKD.stride(2) == 1 else slots_RKD.contiguous()
        block = padded_width(width)
        _combine_backward[(rows, slots)](
            grad_RD.contiguous(),
            x,
            weights_RK.contiguous(),
            grad_slots,
            grad_weights,
            x.stride(0),
            x.stride(1),
            SLOTS=slots,
            WIDTH=width,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
            **EXACT,
        )
    return grad_slots, grad_weights
