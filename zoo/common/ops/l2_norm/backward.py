"""l2_norm's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def l2_norm_backward(grad: Tensor, x_RHK: Tensor, eps: float) -> Tensor:
    accumulate = torch.promote_types(x_RHK.dtype, torch.float32)
    value = x_RHK.to(accumulate)
    upstream = grad.to(accumulate)
    scale = torch.rsqrt((value * value).sum(-1, keepdim=True) + eps)
    normal = value * scale
    return (scale * (upstream - normal * (upstream * normal).sum(-1, keepdim=True))).to(x_RHK.dtype)
