"""rope in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, inverse: bool) -> Tensor:
    """Half-split rotation; `inverse` turns the other way (the gradient)."""
    accumulate = torch.promote_types(x_RHE.dtype, torch.float32)
    half = table_PC2.shape[1]
    cos, sin = table_PC2[positions_R][:, None].to(accumulate).unbind(-1)
    sin = -sin if inverse else sin
    a, b = x_RHE[..., :half].to(accumulate), x_RHE[..., half : 2 * half].to(accumulate)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_RHE.dtype)
    return torch.cat([rotated, x_RHE[..., 2 * half :]], dim=-1)
