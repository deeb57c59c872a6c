"""gated_rms_norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.trees import pair_tree


def gated_rms_norm(x_RVE: Tensor, gate_RVE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    accumulate = torch.promote_types(x_RVE.dtype, torch.float32)
    value = x_RVE.to(accumulate)
    gate = gate_RVE.to(accumulate)
    scale = torch.rsqrt(pair_tree(value * value) * torch.tensor(1.0 / value.shape[-1], dtype=accumulate) + eps)[..., None]
    return (((value * scale) * weight_E.to(accumulate)) * (gate / (1 + torch.exp(-gate)))).to(x_RVE.dtype)
