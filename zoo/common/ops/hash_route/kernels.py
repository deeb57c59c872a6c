"""hash_route on CUDA: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.softplus_route.kernels import score_of
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.ops.trees import padded_width


@triton.jit
def _hash_route(logits_ptr, ids_ptr, table_ptr, weights_ptr, experts_ptr, row_stride, scale, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The table's experts of a row's token; weight = scale score / sum of their scores, left to right."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_K)
    live = slot < TOP_K
    expert = tl.load(table_ptr + tl.load(ids_ptr + row).to(tl.int64) * TOP_K + slot, mask=live, other=0).to(tl.int64)
    score = score_of(tl.load(logits_ptr + row * row_stride + expert, mask=live, other=0.0))
    total = 0.0
    for k in tl.static_range(TOP_K):
        total = total + tl.sum(tl.where(slot == k, score, 0.0), axis=0)  # one lane is not zero: no rounding
    weights = tl.div_rn(score, tl.zeros((BLOCK_K,), dtype=tl.float32) + (total + 1e-20))
    tl.store(weights_ptr + row * TOP_K + slot, weights * scale, mask=live)
    tl.store(experts_ptr + row * TOP_K + slot, expert, mask=live)


def hash_route(logits_RX: Tensor, ids_R: Tensor, table_VK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(weights_RK FP32, experts_RK int64)."""
    rows = logits_RX.shape[0]
    top_k = table_VK.shape[1]
    weights = logits_RX.new_empty(rows, top_k)
    experts = torch.empty(rows, top_k, dtype=torch.int64, device=logits_RX.device)
    if experts.numel():
        logits = logits_RX if logits_RX.stride(1) == 1 else logits_RX.contiguous()
        operands = (logits, ids_R.contiguous(), table_VK.contiguous(), weights, experts, logits.stride(0), scale)
        _hash_route[(rows,)](*operands, TOP_K=top_k, BLOCK_K=padded_width(top_k), num_warps=1, **EXACT)
    return weights, experts
