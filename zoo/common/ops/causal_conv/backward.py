"""causal_conv's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.causal_conv.taps import TAPS, sum_taps, tap
from zoo.common.rows import Rows


def causal_conv_backward(grad: Tensor, x_RC: Tensor, weight_C4: Tensor, carry: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    accumulate = torch.promote_types(x_RC.dtype, torch.float32)
    weight = weight_C4.to(accumulate)
    y = sum_taps(x_RC, weight, carry, None, rows)
    sigmoid = 1 / (1 + torch.exp(-y))
    inner = grad.to(accumulate) * sigmoid * (1 + y * (1 - sigmoid))
    left_R = rows.starts_N1.long()[1:][rows.sequence_R] - torch.arange(x_RC.shape[0], device=x_RC.device)
    grad_x, grad_weight = torch.zeros_like(inner), torch.empty_like(weight)
    for j in range(TAPS):
        back = TAPS - 1 - j
        grad_x += torch.where((left_R > back)[:, None], inner.roll(-back, 0), 0.0) * weight[:, j]
        grad_weight[:, j] = (inner * tap(x_RC, back, carry, None, rows).to(accumulate)).sum(0)
    return grad_x.to(x_RC.dtype), grad_weight.to(weight_C4.dtype)
