"""route on CUDA: one program a row; the choice is by integer keys, so that it has no ties and no order of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width


@triton.jit
def _route(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    row_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """p = softmax(logit) over the experts, the TOP_K largest logits one after another, their p renormalised left to right."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    live = expert < EXPERTS
    logit = tl.load(logits_ptr + row * row_stride + expert, mask=live, other=-float("inf"))
    exponential = tl.where(live, tl.exp(logit - tl.max(logit, axis=0)), 0.0)
    mass = pair_tree(exponential, BLOCK)
    # one integer orders by (logit, lower id): the float's bits made monotonic (-0 as +0, NaN first), then the id from the far end
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    key = tl.where(logit != logit, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64)
    least: tl.constexpr = -0x4000000000000000
    key = tl.where(live, key * BLOCK + (BLOCK - 1 - expert), least)
    slot = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    experts = tl.zeros((BLOCK_K,), dtype=tl.int64)
    total = 0.0
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        hit = key == best
        # one lane is not zero: a sum with no rounding
        weight = tl.div_rn(tl.sum(tl.where(hit, exponential, 0.0), axis=0), mass)
        total = total + weight
        weights = tl.where(slot == k, weight, weights)
        experts = tl.where(slot == k, tl.sum(tl.where(hit, expert, 0), axis=0).to(tl.int64), experts)
        key = tl.where(hit, least, key)
    if RENORMALISE:
        weights = tl.div_rn(weights, tl.zeros((BLOCK_K,), dtype=tl.float32) + total)
    place = row * TOP_K + slot
    tl.store(weights_ptr + place, weights, mask=slot < TOP_K)
    tl.store(experts_ptr + place, experts, mask=slot < TOP_K)


def route(logits_RX: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights_RK FP32, experts_RK int64), by descending logit, the lower id first among equals."""
    rows, experts = logits_RX.shape
    weights = logits_RX.new_empty(rows, top_k)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits_RX.device)
    if ids.numel():
        assert logits_RX.dtype == torch.float32
        logits = logits_RX if logits_RX.stride(1) == 1 else logits_RX.contiguous()
        _route[(rows,)](
            logits,
            weights,
            ids,
            logits.stride(0),
            EXPERTS=experts,
            TOP_K=top_k,
            BLOCK=padded_width(experts),
            BLOCK_K=padded_width(top_k),
            RENORMALISE=renormalise,
            num_warps=1,
            **EXACT,
        )
    return weights, ids
