"""causal_conv in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.rows import Rows

TAPS = 4


def causal_conv(x_RC: Tensor, weight_C4: Tensor, carry: Tensor | None, slots_N: Tensor | None, rows: Rows) -> Tensor:
    """carry [S, 3, C] by slot (by sequence where there are no slots), oldest first; None: zeros."""
    accumulate = torch.promote_types(x_RC.dtype, torch.float32)
    y = _sum_taps(x_RC, weight_C4.to(accumulate), carry, slots_N, rows)
    return (y / (1 + torch.exp(-y))).to(x_RC.dtype)


def advance(x_RC: Tensor, carry_SWC: Tensor, slots_N: Tensor, rows: Rows) -> None:
    """The last three rows of each sequence become its carry."""
    starts = rows.starts_N1.tolist()
    for n, slot in enumerate(slots_N.tolist()):
        mine = torch.cat([carry_SWC[slot], x_RC[starts[n] : starts[n + 1]]])
        carry_SWC[slot] = mine[-(TAPS - 1) :]


def _tap(x_RC: Tensor, back: int, carry: Tensor | None, slots_N: Tensor | None, rows: Rows) -> Tensor:
    """x of the row `back` before each row, in its own sequence."""
    local_R = torch.arange(x_RC.shape[0], device=x_RC.device) - rows.starts_N1.long()[rows.sequence_R]
    shifted = x_RC.roll(back, 0)
    before = (local_R < back)[:, None]
    if carry is None:
        return torch.where(before, 0.0, shifted)
    slot_R = rows.sequence_R if slots_N is None else slots_N[rows.sequence_R]
    return torch.where(before, carry[slot_R, (TAPS - 1 - back + local_R).clamp(max=TAPS - 2)], shifted)


def _sum_taps(x_RC: Tensor, weight: Tensor, carry: Tensor | None, slots_N: Tensor | None, rows: Rows) -> Tensor:
    terms = [_tap(x_RC, TAPS - 1 - j, carry, slots_N, rows).to(weight.dtype) * weight[:, j] for j in range(TAPS)]
    return ((terms[0] + terms[1]) + terms[2]) + terms[3]


def causal_conv_backward(grad: Tensor, x_RC: Tensor, weight_C4: Tensor, carry: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    accumulate = torch.promote_types(x_RC.dtype, torch.float32)
    weight = weight_C4.to(accumulate)
    y = _sum_taps(x_RC, weight, carry, None, rows)
    sigmoid = 1 / (1 + torch.exp(-y))
    inner = grad.to(accumulate) * sigmoid * (1 + y * (1 - sigmoid))
    left_R = rows.starts_N1.long()[1:][rows.sequence_R] - torch.arange(x_RC.shape[0], device=x_RC.device)
    grad_x, grad_weight = torch.zeros_like(inner), torch.empty_like(weight)
    for j in range(TAPS):
        back = TAPS - 1 - j
        grad_x += torch.where((left_R > back)[:, None], inner.roll(-back, 0), 0.0) * weight[:, j]
        grad_weight[:, j] = (inner * _tap(x_RC, back, carry, None, rows).to(accumulate)).sum(0)
    return grad_x.to(x_RC.dtype), grad_weight.to(weight_C4.dtype)
