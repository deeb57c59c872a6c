"""layer_norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.trees import pair_tree


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_width = torch.tensor(1.0 / x.shape[-1], dtype=value.dtype)
    centred = value - (pair_tree(value) * inverse_width)[..., None]
    scale = torch.rsqrt(pair_tree(centred * centred) * inverse_width + eps)[..., None]
    return ((centred * scale) * weight.to(value.dtype) + bias.to(value.dtype)).to(x.dtype)
