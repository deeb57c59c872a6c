"""route's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def route_backward(grad_RK: Tensor, logits_RX: Tensor, experts_RK: Tensor, renormalise: bool) -> Tensor:
    """d logits. Renormalised weights are a softmax over the chosen logits alone."""
    grad = torch.zeros_like(logits_RX)
    if renormalise:
        p = torch.softmax(logits_RX.gather(1, experts_RK), -1)
        return grad.scatter_(1, experts_RK, p * (grad_RK - (grad_RK * p).sum(-1, keepdim=True)))
    p = torch.softmax(logits_RX, -1)
    inner = (grad_RK * p.gather(1, experts_RK)).sum(-1, keepdim=True)
    return p * (grad.scatter_(1, experts_RK, grad_RK) - inner)
