"""fp8_experts in plain torch: the references of fp8_quantise, fp8_linear and swiglu, expert by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from zoo.common.ops.experts.reference import added_by_slot
from zoo.common.ops.fp8_linear.reference import fp8_linear, fp8_linear_backward
from zoo.common.ops.fp8_quantise.reference import fp8_quantise
from zoo.common.ops.swiglu.reference import swiglu, swiglu_backward

if TYPE_CHECKING:
    from zoo.common.ops.fp8_experts import Weights
    from zoo.common.ops.fp8_quantise import ScaleRule


def fp8_experts(x_RD: Tensor, experts_RK: Tensor, weights: Weights, rule: ScaleRule, limit: float | None) -> Tensor:
    out = x_RD.new_empty(*experts_RK.shape, x_RD.shape[1])
    for e in experts_RK.unique().tolist():
        row, slot = (experts_RK == e).nonzero(as_tuple=True)
        hidden = swiglu(_product(x_RD[row], weights.gate_up_codes_X2FD[e], weights.gate_up_scales_XBG[e], rule), limit)
        out[row, slot] = _product(hidden, weights.down_codes_XDF[e], weights.down_scales_XBG[e], rule)
    return out


def _product(x_RK: Tensor, codes_NK: Tensor, scales_BG: Tensor, rule: ScaleRule) -> Tensor:
    x_codes, x_scales = fp8_quantise(x_RK, rule.floor, rule.power_of_two)
    return fp8_linear(x_codes, x_scales, codes_NK, scales_BG, x_RK.dtype)


def fp8_experts_backward(
    grad_RKD: Tensor, x_RD: Tensor, experts_RK: Tensor, weights: Weights, rule: ScaleRule, limit: float | None
) -> Tensor:
    """dx; recomputes each expert's inner rows."""
    slot_grads = x_RD.new_zeros(*experts_RK.shape, x_RD.shape[1])
    for e in experts_RK.unique().tolist():
        row, slot = (experts_RK == e).nonzero(as_tuple=True)
        gate_up = _product(x_RD[row], weights.gate_up_codes_X2FD[e], weights.gate_up_scales_XBG[e], rule)
        grad_hidden = fp8_linear_backward(grad_RKD[row, slot], weights.down_codes_XDF[e], weights.down_scales_XBG[e], x_RD.dtype)
        grad_gate_up = swiglu_backward(grad_hidden, gate_up, limit)
        slot_grads[row, slot] = fp8_linear_backward(grad_gate_up, weights.gate_up_codes_X2FD[e], weights.gate_up_scales_XBG[e], x_RD.dtype)
    return added_by_slot(slot_grads)
