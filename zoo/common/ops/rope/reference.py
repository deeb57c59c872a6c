"""rope in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, inverse: bool, neighbours: bool = False) -> Tensor:
    """`inverse` turns the other way and back to where the pairs came from (the gradient)."""
    accumulate = torch.promote_types(x_RHE.dtype, torch.float32)
    half = table_PC2.shape[1]
    cos, sin = table_PC2[positions_R][:, None].to(accumulate).unbind(-1)
    sin = -sin if inverse else sin
    turning = x_RHE[..., : 2 * half].to(accumulate)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if neighbours and not inverse else turning.split(half, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(turned, -1).flatten(-2) if neighbours and inverse else torch.cat(turned, -1)
    return torch.cat([rotated.to(x_RHE.dtype), x_RHE[..., 2 * half :]], dim=-1)
