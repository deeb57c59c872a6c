"""delta_gate in plain torch. Softplus and sigmoid are spelled with exp and log1p: the vectorised ones change bytes with the row count."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_gate(a_RV: Tensor, b_RV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    a, b, a_log, dt_bias = _wide(a_RV, b_RV, a_log_V, dt_bias_V)
    x = a + dt_bias
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return -torch.exp(a_log) * softplus, 1 / (1 + torch.exp(-b))


def delta_gate_backward(
    grad_decay_RV: Tensor, grad_beta_RV: Tensor, a_RV: Tensor, b_RV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_decay, beta = delta_gate(a_RV, b_RV, a_log_V, dt_bias_V)
    a, _, a_log, dt_bias = _wide(a_RV, b_RV, a_log_V, dt_bias_V)
    grad_x = grad_decay_RV * -torch.exp(a_log) / (1 + torch.exp(-(a + dt_bias)))
    grad_a_log = (grad_decay_RV * log_decay).sum(0)
    grad_b = grad_beta_RV * beta * (1 - beta)
    return grad_x.to(a_RV.dtype), grad_b.to(b_RV.dtype), grad_a_log.to(a_log_V.dtype), grad_x.sum(0).to(dt_bias_V.dtype)


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
