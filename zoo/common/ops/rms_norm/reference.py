"""rms_norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.trees import pair_tree


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(normed, total); total is x where there is no residual. offset is 1.0 for a zero-centred weight, else 0.0."""
    accumulate = torch.promote_types(x.dtype, torch.float32)
    total = x if residual is None else (x.to(accumulate) + residual.to(accumulate)).to(x.dtype)
    value = total.to(accumulate)
    scale = _rsqrt_mean(value, eps)
    gain = weight.to(accumulate) + offset if offset else weight.to(accumulate)
    return ((value * scale) * gain).to(x.dtype), total


def _rsqrt_mean(value: Tensor, eps: float) -> Tensor:
    inverse_width = torch.tensor(1.0 / value.shape[-1], dtype=value.dtype)
    return torch.rsqrt(pair_tree(value * value) * inverse_width + eps)[..., None]


def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x (and, equally, of the residual) and of the weight."""
    accumulate = torch.promote_types(total.dtype, torch.float32)
    value = total.to(accumulate)
    upstream = grad.to(accumulate)
    scale = _rsqrt_mean(value, eps)
    normal = value * scale
    grad_weight = (upstream * normal).flatten(0, -2).sum(0).to(weight.dtype)
    scaled = upstream * (weight.to(accumulate) + offset)
    grad_x = scale * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    if grad_total is not None:
        grad_x = grad_x + grad_total.to(accumulate)
    return grad_x.to(total.dtype), grad_weight
