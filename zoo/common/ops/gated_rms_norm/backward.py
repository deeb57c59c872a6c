"""gated_rms_norm's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_rms_norm_backward(grad: Tensor, x_RVE: Tensor, gate_RVE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and weight."""
    accumulate = torch.promote_types(x_RVE.dtype, torch.float32)
    value, gate, weight, upstream = (t.to(accumulate) for t in (x_RVE, gate_RVE, weight_E, grad))
    scale = torch.rsqrt((value * value).mean(-1, keepdim=True) + eps)
    normal = value * scale
    sigmoid = 1 / (1 + torch.exp(-gate))
    silu = gate * sigmoid
    grad_weight = (upstream * silu * normal).flatten(0, -2).sum(0)
    grad_gate = upstream * normal * weight * (sigmoid + silu * (1 - sigmoid))
    scaled = upstream * silu * weight
    grad_x = scale * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return grad_x.to(x_RVE.dtype), grad_gate.to(gate_RVE.dtype), grad_weight.to(weight_E.dtype)
