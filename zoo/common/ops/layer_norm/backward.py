"""layer_norm's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, the weight and the bias."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    upstream = grad.to(value.dtype)
    centred = value - value.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    normal = centred * scale
    scaled = upstream * weight.to(value.dtype)
    grad_x = scale * (scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True))
    grad_weight = (upstream * normal).flatten(0, -2).sum(0)
    grad_bias = upstream.flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
