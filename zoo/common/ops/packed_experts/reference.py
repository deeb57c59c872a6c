"""packed_experts in plain torch: the experts reference on the dequantised weights of the experts that were chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.e2m1 import dequantised
from zoo.common.ops.experts.reference import experts, experts_backward


def packed_experts(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    limit: float | None = None,
) -> Tensor:
    chosen, gate_up, down = _used(x_RD, experts_RK, gate_up_X2FC, gate_up_scales_X2FG, down_XDC, down_scales_XDG)
    return experts(x_RD, chosen, gate_up, down, limit)


def packed_experts_backward(
    grad_RKD: Tensor,
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    limit: float | None = None,
) -> Tensor:
    """The gradient of x; the weights are frozen."""
    chosen, gate_up, down = _used(x_RD, experts_RK, gate_up_X2FC, gate_up_scales_X2FG, down_XDC, down_scales_XDG)
    return experts_backward(grad_RKD, x_RD, chosen, gate_up, down, limit)[0]


def _used(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each choice's place among the experts that occur, and their weights in x's dtype."""
    used, places = torch.unique(experts_RK, return_inverse=True)
    gate_up = dequantised(gate_up_X2FC[used], gate_up_scales_X2FG[used], x_RD.dtype)
    down = dequantised(down_XDC[used], down_scales_XDG[used], x_RD.dtype)
    return places, gate_up, down
