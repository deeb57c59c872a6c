"""combine in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def combine(slots_RKD: Tensor, weights_RK: Tensor, experts_RK: Tensor, shared_RD: Tensor | None, block: int, contributors: int) -> Tensor:
    """`block` experts belong to each contributor."""
    accumulate = torch.promote_types(slots_RKD.dtype, torch.float32)
    owner_RK = experts_RK // block
    leaves = []
    for contributor in range(contributors):
        leaf = torch.zeros(slots_RKD.shape[0], slots_RKD.shape[2], dtype=accumulate)
        for slot in range(slots_RKD.shape[1]):
            term = leaf + weights_RK[:, slot, None] * slots_RKD[:, slot].to(accumulate)
            leaf = torch.where(owner_RK[:, slot, None] == contributor, term, leaf)
        leaves.append(leaf.to(slots_RKD.dtype).double())
    if shared_RD is not None:
        leaves.append(shared_RD.double())
    return round_double(contributor_tree(leaves), slots_RKD.dtype)


def contributor_tree(leaves: list[Tensor]) -> Tensor:
    """Adjacent pairs in FP64; an odd leaf is carried to the next level."""
    while len(leaves) > 1:
        paired = [a + b for a, b in zip(leaves[0::2], leaves[1::2], strict=False)]
        leaves = paired + leaves[len(paired) * 2 :]
    return leaves[0]


def round_double(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP64 to `dtype` with one rounding. torch goes through FP32: make that hop round to odd, which later rounding can't notice."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    near = x.float()
    error = x - near.double()
    even = (near.view(torch.int32) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf).float()
    odd = torch.where((error != 0) & even & near.isfinite(), torch.nextafter(near, toward), near)
    return odd.to(dtype)


def combine_backward(grad_RD: Tensor, slots_RKD: Tensor, weights_RK: Tensor) -> tuple[Tensor, Tensor]:
    accumulate = torch.promote_types(slots_RKD.dtype, torch.float32)
    grad = grad_RD.to(accumulate)[:, None]
    return (weights_RK[..., None] * grad).to(slots_RKD.dtype), (slots_RKD.to(accumulate) * grad).sum(-1)
