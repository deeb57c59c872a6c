"""head_linear in plain torch: the linear reference, head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.linear.reference import linear, linear_backward


def head_linear(x_RHK: Tensor, weight_HNK: Tensor) -> Tensor:
    heads = zip(x_RHK.unbind(1), weight_HNK, strict=True)
    return torch.stack([linear(x.contiguous(), weight.contiguous(), x.dtype, 1) for x, weight in heads], 1)


def head_linear_backward(grad_RHN: Tensor, x_RHK: Tensor, weight_HNK: Tensor) -> tuple[Tensor, Tensor]:
    grad_x = x_RHK.new_empty(x_RHK.shape)
    grad_weight = weight_HNK.new_empty(weight_HNK.shape)
    for h, weight in enumerate(weight_HNK):
        of_x, of_weight = linear_backward(grad_RHN[:, h], x_RHK[:, h], weight, True, True)
        assert of_x is not None and of_weight is not None
        grad_x[:, h] = of_x
        grad_weight[h] = of_weight
    return grad_x, grad_weight
