"""delta_gate's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_gate_backward(
    grad_decay_RV: Tensor, grad_beta_RV: Tensor, a_RV: Tensor, b_RV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, a_log, dt_bias = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (a_RV, b_RV, a_log_V, dt_bias_V))
    x = a + dt_bias
    rate = torch.exp(a_log)
    # 1 - beta has no digits left where beta is near 1
    beta = 1 / (1 + torch.exp(-b))
    rest = 1 / (1 + torch.exp(b))
    grad_x = grad_decay_RV * -rate / (1 + torch.exp(-x))
    # the log-decay is linear in the rate: its gradient in A_log is itself
    log_decay = -rate * (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))
    grad_a_log = (grad_decay_RV * log_decay).sum(0)
    grad_b = grad_beta_RV * beta * rest
    return grad_x.to(a_RV.dtype), grad_b.to(b_RV.dtype), grad_a_log.to(a_log_V.dtype), grad_x.sum(0).to(dt_bias_V.dtype)
