"""The gradient of weights from square roots of softplus: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def weights_backward(grad_RK: Tensor, logits_RX: Tensor, experts_RK: Tensor, scale: float) -> Tensor:
    """d logits; experts that were not chosen have none."""
    logits = logits_RX.gather(1, experts_RK)
    softplus = torch.clamp(logits, min=0.0) + torch.log1p(torch.exp(-logits.abs()))
    score = torch.sqrt(softplus)
    total = score.sum(-1, keepdim=True) + 1e-20
    d_score = grad_RK * scale
    d_score = (d_score - (d_score * score).sum(-1, keepdim=True) / total) / total
    d_softplus = torch.where(score > 0, d_score / (2 * score), 0.0)  # far below, softplus and its slope vanish together
    return torch.zeros_like(logits_RX).scatter_(1, experts_RK, d_softplus / (1 + torch.exp(-logits)))
