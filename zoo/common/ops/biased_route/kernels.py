"""biased_route on CUDA: one program a row; choices are by integer keys, so that they have no ties and no order of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT
from zoo.common.ops.trees import padded_width

if TYPE_CHECKING:
    from zoo.common.ops.biased_route import Choice


@triton.jit
def _ordered(x, place, BLOCK: tl.constexpr):
    """One integer that orders by (value, lower place): the float's bits made monotonic (-0 as +0, NaN first), then the place."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64)
    return key * BLOCK + (BLOCK - 1 - place)


@triton.jit
def _biased_route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    row_stride,
    scale,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    OPEN: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """score = sigmoid(logit); the TOP_K largest of score + bias, of open groups alone; weight = scale score / sum of the chosen scores."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    live = expert < EXPERTS
    logit = tl.load(logits_ptr + row * row_stride + expert, mask=live, other=0.0)
    score = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), 1.0 + tl.exp(-logit))
    biased = score + tl.load(bias_ptr + expert, mask=live, other=0.0)
    least: tl.constexpr = -0x4000000000000000
    key = tl.where(live, _ordered(biased, expert, BLOCK), least)
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        group = tl.arange(0, BLOCK_G)
        worth = tl.zeros((BLOCK_G,), dtype=tl.float32)
        for g in tl.static_range(GROUPS):
            mine = tl.where(expert // SIZE == g, key, least)
            first = tl.max(mine, axis=0)
            second = tl.max(tl.where(mine == first, least, mine), axis=0)
            # one lane each is not zero: sums with no rounding
            best = tl.sum(tl.where(mine == first, biased, 0.0), axis=0) + tl.sum(tl.where((mine == second) & live, biased, 0.0), axis=0)
            worth = tl.where(group == g, best, worth)
        group_key = tl.where(group < GROUPS, _ordered(worth, group, BLOCK_G), least)
        open_key = tl.full((BLOCK,), least, tl.int64)
        for _ in tl.static_range(OPEN):
            best_key = tl.max(group_key, axis=0)
            chosen = tl.sum(tl.where(group_key == best_key, group, 0), axis=0)
            open_key = tl.where(expert // SIZE == chosen, key, open_key)
            group_key = tl.where(group_key == best_key, least, group_key)
        key = tl.where(live, open_key, least)
    slot = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    experts = tl.zeros((BLOCK_K,), dtype=tl.int64)
    total = 0.0
    for k in tl.static_range(TOP_K):
        best_key = tl.max(key, axis=0)
        hit = key == best_key
        weight = tl.sum(tl.where(hit, score, 0.0), axis=0)
        total = total + weight
        weights = tl.where(slot == k, weight, weights)
        experts = tl.where(slot == k, tl.sum(tl.where(hit, expert, 0), axis=0).to(tl.int64), experts)
        key = tl.where(hit, least, key)
    if RENORMALISE:
        weights = tl.div_rn(weights, tl.zeros((BLOCK_K,), dtype=tl.float32) + (total + 1e-20))
    place = row * TOP_K + slot
    tl.store(weights_ptr + place, weights * scale, mask=slot < TOP_K)
    tl.store(experts_ptr + place, experts, mask=slot < TOP_K)


def biased_route(logits_RX: Tensor, bias_X: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """(weights_RK FP32, experts_RK int64), by descending biased score, the lower id first among equals."""
    rows, experts = logits_RX.shape
    weights = logits_RX.new_empty(rows, choice.top_k)
    ids = torch.empty(rows, choice.top_k, dtype=torch.int64, device=logits_RX.device)
    if ids.numel():
        assert logits_RX.dtype == torch.float32
        logits = logits_RX if logits_RX.stride(1) == 1 else logits_RX.contiguous()
        _biased_route[(rows,)](
            logits,
            bias_X.contiguous(),
            weights,
            ids,
            logits.stride(0),
            choice.scale,
            EXPERTS=experts,
            GROUPS=choice.groups,
            OPEN=choice.open_groups,
            TOP_K=choice.top_k,
            RENORMALISE=choice.renormalise,
            BLOCK=padded_width(experts),
            BLOCK_G=padded_width(choice.groups),
            BLOCK_K=padded_width(choice.top_k),
            num_warps=1,
            **EXACT,
        )
    return weights, ids
