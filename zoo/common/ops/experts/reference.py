"""experts in plain torch: the linear and swiglu references, expert by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.linear.reference import linear, linear_backward
from zoo.common.ops.swiglu.reference import swiglu, swiglu_backward


def experts(x_RD: Tensor, experts_RK: Tensor, gate_up_X2FD: Tensor, down_XDF: Tensor, limit: float | None = None) -> Tensor:
    out = x_RD.new_empty(*experts_RK.shape, x_RD.shape[1])
    for e in experts_RK.unique().tolist():
        row, slot = (experts_RK == e).nonzero(as_tuple=True)
        hidden = swiglu(linear(x_RD[row], gate_up_X2FD[e], x_RD.dtype, 1), limit)
        out[row, slot] = linear(hidden, down_XDF[e], x_RD.dtype, 1)
    return out


def experts_backward(
    grad_RKD: Tensor, x_RD: Tensor, experts_RK: Tensor, gate_up_X2FD: Tensor, down_XDF: Tensor, limit: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Recomputes each expert's inner rows; an unused expert's gradient is zero."""
    slot_grads = x_RD.new_zeros(*experts_RK.shape, x_RD.shape[1])
    grad_gate_up = torch.zeros_like(gate_up_X2FD)
    grad_down = torch.zeros_like(down_XDF)
    for e in experts_RK.unique().tolist():
        row, slot = (experts_RK == e).nonzero(as_tuple=True)
        gate_up = linear(x_RD[row], gate_up_X2FD[e], x_RD.dtype, 1)
        grad_hidden, weight_grad = linear_backward(grad_RKD[row, slot], swiglu(gate_up, limit), down_XDF[e], True, True)
        assert grad_hidden is not None and weight_grad is not None
        grad_down[e] = weight_grad
        grad_x, weight_grad = linear_backward(swiglu_backward(grad_hidden, gate_up, limit), x_RD[row], gate_up_X2FD[e], True, True)
        assert grad_x is not None and weight_grad is not None
        grad_gate_up[e] = weight_grad
        slot_grads[row, slot] = grad_x
    return added_by_slot(slot_grads), grad_gate_up, grad_down


def added_by_slot(slot_grads_RKD: Tensor) -> Tensor:
    """A row's slots in ascending order, in FP32, rounded once: torch's sum adds in an order that depends on the width."""
    first = slot_grads_RKD[:, 0]
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    for slot in slot_grads_RKD.unbind(1):
        total = total + slot
    return total.to(first.dtype)
