"""softplus_route in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus_route(logits_RX: Tensor, bias_X: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    # -0 is made +0 so that the two zeros are equal
    order = torch.sort(score(logits_RX) + bias_X + 0.0, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return weights(logits_RX, order, scale), order


def score(logits: Tensor) -> Tensor:
    """sqrt(softplus), spelled with exp and log1p: torch's own changes bytes with the row count."""
    return torch.sqrt(torch.maximum(logits, torch.zeros_like(logits)) + torch.log1p(torch.exp(-logits.abs())))


def weights(logits_RX: Tensor, experts_RK: Tensor, scale: float) -> Tensor:
    """The chosen experts' scores over their sum, times the scale."""
    chosen = score(logits_RX.gather(1, experts_RK))
    total = chosen[:, 0]
    for slot in range(1, chosen.shape[1]):
        total = total + chosen[:, slot]
    return chosen / (total + 1e-20)[:, None] * scale
