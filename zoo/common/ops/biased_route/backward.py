"""biased_route's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zoo.common.ops.biased_route import Choice


def biased_route_backward(grad_RK: Tensor, logits_RX: Tensor, experts_RK: Tensor, choice: Choice) -> Tensor:
    """d logits; experts that were not chosen have none."""
    score = 1.0 / (1.0 + torch.exp(-logits_RX.gather(1, experts_RK)))
    d_score = grad_RK * choice.scale
    if choice.renormalise:
        total = score.sum(-1, keepdim=True) + 1e-20
        d_score = (d_score - (d_score * score).sum(-1, keepdim=True) / total) / total
    return torch.zeros_like(logits_RX).scatter_(1, experts_RK, d_score * score * (1.0 - score))
