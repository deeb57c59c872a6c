"""softplus_route on CUDA: one program a row; choices are by integer keys, so that they have no ties and no order of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.delta_gate.kernels import _log1p as log1p
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.ops.trees import padded_width


@triton.jit
def score_of(logit):
    """The root of softplus."""
    return tl.sqrt_rn(tl.maximum(logit, 0.0) + log1p(tl.exp(-tl.abs(logit))))


@triton.jit
def _softplus_route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    row_stride,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The TOP_K largest of score + bias, the lower expert first among equals; weight = scale score / sum of the chosen scores."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    live = expert < EXPERTS
    score = score_of(tl.load(logits_ptr + row * row_stride + expert, mask=live, other=0.0))
    biased = score + tl.load(bias_ptr + expert, mask=live, other=0.0)
    least: tl.constexpr = -0x4000000000000000
    bits = tl.where(biased == 0.0, 0.0, biased).to(tl.int32, bitcast=True)
    ordered = tl.where(biased != biased, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64)
    key = tl.where(live, ordered * BLOCK + (BLOCK - 1 - expert), least)
    slot = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    experts = tl.zeros((BLOCK_K,), dtype=tl.int64)
    total = 0.0
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        hit = key == best
        weight = tl.sum(tl.where(hit, score, 0.0), axis=0)  # one lane is not zero: no rounding
        total = total + weight
        weights = tl.where(slot == k, weight, weights)
        experts = tl.where(slot == k, tl.sum(tl.where(hit, expert, 0), axis=0).to(tl.int64), experts)
        key = tl.where(hit, least, key)
    weights = tl.div_rn(weights, tl.zeros((BLOCK_K,), dtype=tl.float32) + (total + 1e-20))
    place = row * TOP_K + slot
    tl.store(weights_ptr + place, weights * scale, mask=slot < TOP_K)
    tl.store(experts_ptr + place, experts, mask=slot < TOP_K)


def softplus_route(logits_RX: Tensor, bias_X: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """(weights_RK FP32, experts_RK int64)."""
    rows, experts = logits_RX.shape
    weights = logits_RX.new_empty(rows, top_k)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits_RX.device)
    if ids.numel():
        logits = logits_RX if logits_RX.stride(1) == 1 else logits_RX.contiguous()
        _softplus_route[(rows,)](
            logits,
            bias_X.contiguous(),
            weights,
            ids,
            logits.stride(0),
            scale,
            EXPERTS=experts,
            TOP_K=top_k,
            BLOCK=padded_width(experts),
            BLOCK_K=padded_width(top_k),
            num_warps=1,
            **EXACT,
        )
    return weights, ids
