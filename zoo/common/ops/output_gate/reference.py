"""output_gate in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    accumulate = torch.promote_types(x.dtype, torch.float32)
    return (x.to(accumulate) * (1 / (1 + torch.exp(-gate.to(accumulate))))).to(x.dtype)
