"""The shifted rows that a convolution of width 4 adds, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.rows import Rows

TAPS = 4


def tap(x_RC: Tensor, back: int, carry: Tensor | None, slots_N: Tensor | None, rows: Rows) -> Tensor:
    """x of the row `back` before each row, in its own sequence."""
    local_R = torch.arange(x_RC.shape[0], device=x_RC.device) - rows.starts_N1.long()[rows.sequence_R]
    shifted = x_RC.roll(back, 0)
    before = (local_R < back)[:, None]
    if carry is None:
        return torch.where(before, 0.0, shifted)
    slot_R = rows.sequence_R if slots_N is None else slots_N[rows.sequence_R]
    return torch.where(before, carry[slot_R, (TAPS - 1 - back + local_R).clamp(max=TAPS - 2)], shifted)


def sum_taps(x_RC: Tensor, weight: Tensor, carry: Tensor | None, slots_N: Tensor | None, rows: Rows) -> Tensor:
    terms = [tap(x_RC, TAPS - 1 - j, carry, slots_N, rows).to(weight.dtype) * weight[:, j] for j in range(TAPS)]
    return ((terms[0] + terms[1]) + terms[2]) + terms[3]
