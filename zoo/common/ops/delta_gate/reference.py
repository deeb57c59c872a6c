"""delta_gate in plain torch. Softplus and sigmoid are spelled with exp and log1p: the vectorised ones change bytes with the row count."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_gate(a_RV: Tensor, b_RV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    a, b, a_log, dt_bias = _wide(a_RV, b_RV, a_log_V, dt_bias_V)
    x = a + dt_bias
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return -torch.exp(a_log) * softplus, 1 / (1 + torch.exp(-b))


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
