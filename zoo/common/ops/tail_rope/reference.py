"""tail_rope in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def tail_rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, inverse: bool) -> Tensor:
    accumulate = torch.promote_types(x_RHE.dtype, torch.float32)
    still = x_RHE.shape[-1] - 2 * table_PC2.shape[1]
    cos, sin = table_PC2[positions_R][:, None].to(accumulate).unbind(-1)
    sin = -sin if inverse else sin
    a, b = x_RHE[..., still:].to(accumulate).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat([x_RHE[..., :still], turned.to(x_RHE.dtype)], dim=-1)
