"""output_gate's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def output_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    accumulate = torch.promote_types(x.dtype, torch.float32)
    upstream = grad.to(accumulate)
    wide = gate.to(accumulate)
    # 1 - sigmoid has no digits left where it is near 1
    sigmoid = 1 / (1 + torch.exp(-wide))
    rest = 1 / (1 + torch.exp(wide))
    grad_gate = upstream * x.to(accumulate) * sigmoid * rest
    if gate.shape != x.shape:
        grad_gate = grad_gate.sum(-1, keepdim=True)
    return (upstream * sigmoid).to(x.dtype), grad_gate.to(gate.dtype)
