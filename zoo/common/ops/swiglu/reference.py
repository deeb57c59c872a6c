"""swiglu in plain torch. Sigmoid is spelled with exp: torch's vectorised sigmoid changes bytes with the row count."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return ((gate / (1 + torch.exp(-gate))) * up).to(gate_up.dtype)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    accumulate = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(accumulate).chunk(2, dim=-1)
    upstream = grad.to(accumulate)
    sigmoid = 1 / (1 + torch.exp(-gate))
    silu = gate * sigmoid
    grad_gate = upstream * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([grad_gate, upstream * silu], dim=-1).to(gate_up.dtype)
