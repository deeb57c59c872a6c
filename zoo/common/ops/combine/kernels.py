"""combine on CUDA: a row's contributor leaves live in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree, pair_tree_first
from zoo.common.ops.trees import padded_width

BLOCK = 256


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
def _combine(slots_ptr, weights_ptr, experts_ptr, shared_ptr, y_ptr, slots_row, slots_slot, shared_stride, width, experts_each,
             SLOTS: tl.constexpr, LEAVES: tl.constexpr, BLOCK_L: tl.constexpr, SHARED: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    contributor = tl.arange(0, BLOCK_L)
    leaves = tl.zeros((BLOCK_L, BLOCK), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        owner = tl.load(experts_ptr + row * SLOTS + slot) // experts_each
        weight = tl.load(weights_ptr + row * SLOTS + slot)
        value = tl.load(slots_ptr + row * slots_row + slot * slots_slot + column, mask=mask, other=0.0).to(tl.float32)
        leaves = tl.where((contributor == owner)[:, None], leaves + (weight * value)[None, :], leaves)
    leaf = leaves.to(slots_ptr.dtype.element_ty).to(tl.float32)
    if LEAVES < BLOCK_L:
        # x + -0 is x for every x, so leaves of -0 are what "an odd one is carried" means
        # (by its bits: Triton makes +0 of a literal -0.0)
        minus_zero = tl.full((1, 1), -2147483648, tl.int32).to(tl.float32, bitcast=True)
        leaf = tl.where((contributor < LEAVES)[:, None], leaf, minus_zero)
    if SHARED:
        shared = tl.load(shared_ptr + row * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
        if LEAVES < BLOCK_L:
            leaf = tl.where((contributor == LEAVES)[:, None], shared[None, :], leaf)
    total = pair_tree_first(leaf.to(tl.float64), BLOCK_L, BLOCK)
    if SHARED:
        if LEAVES == BLOCK_L:
            total += shared.to(tl.float64)
    tl.store(y_ptr + row * width + column, round_double(total, y_ptr.dtype.element_ty), mask=mask)


def combine(slots_RKD: Tensor, weights_RK: Tensor, experts_RK: Tensor, shared_RD: Tensor | None, block: int, contributors: int) -> Tensor:
    """`block` experts belong to each contributor. Slot and shared rows may be strided."""
    rows, slots, width = slots_RKD.shape
    y = slots_RKD.new_empty(rows, width)
    if y.numel() == 0:
        return y
    x = slots_RKD if slots_RKD.stride(2) == 1 else slots_RKD.contiguous()
    shared = x if shared_RD is None else shared_RD if shared_RD.stride(1) == 1 else shared_RD.contiguous()
    _combine[(rows, triton.cdiv(width, BLOCK))](
        x, weights_RK.contiguous(), experts_RK.contiguous(), shared, y, x.stride(0), x.stride(1), shared.stride(0), width, block,
        SLOTS=slots, LEAVES=contributors, BLOCK_L=padded_width(contributors), SHARED=shared_RD is not None, BLOCK=BLOCK,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return y


@triton.jit
def _combine_backward(grad_ptr, slots_ptr, weights_ptr, grad_slots_ptr, grad_weights_ptr, slots_row, slots_slot,
                      SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
            grad_RD.contiguous(), x, weights_RK.contiguous(), grad_slots, grad_weights, x.stride(0), x.stride(1),
            SLOTS=slots, WIDTH=width, BLOCK=block, num_warps=4 if block <= 2048 else 8, **EXACT,
        )  # fmt: skip
    return grad_slots, grad_weights
