"""embed in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(ids_R: Tensor, weight_VD: Tensor) -> Tensor:
    return weight_VD.index_select(0, ids_R)


def embed_backward(grad_RD: Tensor, ids_R: Tensor, vocabulary: int) -> Tensor:
    """The table's gradient, added in FP32 and rounded once."""
    accumulate = torch.promote_types(grad_RD.dtype, torch.float32)
    out = torch.zeros(vocabulary, grad_RD.shape[1], dtype=accumulate)
    return out.index_add_(0, ids_R, grad_RD.to(accumulate)).to(grad_RD.dtype)
