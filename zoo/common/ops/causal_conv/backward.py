"""causal_conv's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.causal_conv.taps import TAPS, sum_taps, tap
from zoo.common.rows import Rows


def causal_conv_backward(
    grad: Tensor, x_RC: Tensor, weight_C4: Tensor, carry: Tensor | None, rows: Rows
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and the carried rows [N, 3, C]; of these None where there are none."""
    accumulate = torch.promote_types(x_RC.dtype, torch.float32)
    weight = weight_C4.to(accumulate)
    y = sum_taps(x_RC, weight, carry, None, rows)
    sigmoid = 1 / (1 + torch.exp(-y))
    inner = grad.to(accumulate) * sigmoid * (1 + y * (1 - sigmoid))
    left_R = rows.starts_N1.long()[1:][rows.sequence_R] - torch.arange(x_RC.shape[0], device=x_RC.device)
    grad_x = torch.zeros_like(inner)
    grad_weight = torch.empty_like(weight)
    for j in range(TAPS):
        back = TAPS - 1 - j
        grad_x += torch.where((left_R > back)[:, None], inner.roll(-back, 0), 0.0) * weight[:, j]
        grad_weight[:, j] = (inner * tap(x_RC, back, carry, None, rows).to(accumulate)).sum(0)
    grad_carry = None if carry is None else _of_carry(inner, weight, rows).to(carry.dtype)
    return grad_x.to(x_RC.dtype), grad_weight.to(weight_C4.dtype), grad_carry


def _of_carry(inner_RC: Tensor, weight_C4: Tensor, rows: Rows) -> Tensor:
    """Carried row i stands 3 - i rows before its sequence's first, so row t sees it through the tap 3 - i + t rows back."""
    starts = rows.starts_N1.long()
    first = starts[:-1]
    count = starts.diff()
    out = inner_RC.new_zeros(count.shape[0], TAPS - 1, inner_RC.shape[1])
    for i in range(TAPS - 1):
        for t in reversed(range(i + 1)):  # taps oldest first, as in the gradient of rows
            seen = inner_RC[(first + t).clamp(max=inner_RC.shape[0] - 1)] * weight_C4[:, i - t]
            out[:, i] += torch.where((t < count)[:, None], seen, 0.0)
    return out
