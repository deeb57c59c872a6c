"""causal_conv in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.causal_conv.taps import TAPS, sum_taps
from zoo.common.rows import Rows


def causal_conv(x_RC: Tensor, weight_C4: Tensor, carry: Tensor | None, slots_N: Tensor | None, rows: Rows) -> Tensor:
    """carry [S, 3, C] by slot (by sequence where there are no slots), oldest first; None: zeros."""
    accumulate = torch.promote_types(x_RC.dtype, torch.float32)
    y = sum_taps(x_RC, weight_C4.to(accumulate), carry, slots_N, rows)
    return (y / (1 + torch.exp(-y))).to(x_RC.dtype)


def advance(x_RC: Tensor, carry_SWC: Tensor, slots_N: Tensor, rows: Rows) -> None:
    """The last three rows of each sequence become its carry."""
    starts = rows.starts_N1.tolist()
    for n, slot in enumerate(slots_N.tolist()):
        mine = torch.cat([carry_SWC[slot], x_RC[starts[n] : starts[n + 1]]])
        carry_SWC[slot] = mine[-(TAPS - 1) :]
