"""swiglu in plain torch. Sigmoid is spelled with exp: torch's vectorised sigmoid changes bytes with the row count."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_up: Tensor, limit: float | None = None) -> Tensor:
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return ((gate / (1 + torch.exp(-gate))) * up).to(gate_up.dtype)


def swiglu_backward(grad: Tensor, gate_up: Tensor, limit: float | None = None) -> Tensor:
    """A limit that was reached exactly still lets the gradient through."""
    accumulate = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(accumulate).chunk(2, dim=-1)
    upstream = grad.to(accumulate)
    whole_gate = gate
    whole_up = up
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    sigmoid = 1 / (1 + torch.exp(-gate))
    silu = gate * sigmoid
    grad_gate = upstream * up * (sigmoid + silu * (1 - sigmoid))
    grad_up = upstream * silu
    if limit is not None:
        grad_gate = torch.where(whole_gate > limit, 0.0, grad_gate)
        grad_up = torch.where(whole_up.abs() > limit, 0.0, grad_up)
    return torch.cat([grad_gate, grad_up], dim=-1).to(gate_up.dtype)
