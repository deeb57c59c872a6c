"""l2_norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.trees import pair_tree


def l2_norm(x_RHK: Tensor, eps: float) -> Tensor:
    value = x_RHK.to(torch.promote_types(x_RHK.dtype, torch.float32))
    return (value * torch.rsqrt(pair_tree(value * value) + eps)[..., None]).to(x_RHK.dtype)
