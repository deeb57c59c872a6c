"""A fault: causal_conv whose carry is off by one row. What a push leaves are the three rows before its last one."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.causal_conv.reference import TAPS, causal_conv
from zoo.common.rows import Rows

__all__ = ["advance", "causal_conv"]


def advance(x_RC: Tensor, carry_SWC: Tensor, slots_N: Tensor, rows: Rows) -> None:
    starts = rows.starts_N1.tolist()
    for n, slot in enumerate(slots_N.tolist()):
        carry_SWC[slot] = torch.cat([carry_SWC[slot], x_RC[starts[n] : starts[n + 1]]])[-TAPS:-1]
