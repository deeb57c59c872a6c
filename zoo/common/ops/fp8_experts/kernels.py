"""fp8_experts on CUDA: pairs sorted by expert, and DeepGEMM's grouped products of E4M3 codes over them.

Rows "grouped" of benchmarks.library_classes are what that rests on: its bytes of a row are those of the dense product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.common.ops.experts.kernels import Layout, lay_out
from zoo.common.ops.experts.reference import added_by_slot
from zoo.common.ops.fp8_linear.kernels import fp8_linear, fp8_linear_backward
from zoo.common.ops.fp8_quantise.kernels import fp8_quantise
from zoo.common.ops.swiglu.kernels import swiglu, swiglu_backward

if TYPE_CHECKING:
    from zoo.common.ops.fp8_experts import Weights
    from zoo.common.ops.fp8_quantise import ScaleRule


def fp8_experts(x_RD: Tensor, experts_RK: Tensor, weights: Weights, rule: ScaleRule, limit: float | None) -> Tensor:
    """Positions without a pair hold a copy of row 0 and are computed with their tile's expert; nobody reads them."""
    import deep_gemm

    rows, slots = experts_RK.shape
    out = x_RD.new_empty(rows, slots, x_RD.shape[1])
    if out.numel() == 0:
        return out
    count, _, hidden = weights.gate_up_codes_X2FD.shape
    layout = lay_out(experts_RK, count, deep_gemm.get_mk_alignment_for_contiguous_layout())
    owner_P = _owners(layout)
    row_P = layout.pair_P.clamp(min=0).div(slots, rounding_mode="floor")
    codes_RD, scales_RG = fp8_quantise(x_RD, rule.floor, rule.power_of_two)
    codes_PD = codes_RD.view(torch.uint8).index_select(0, row_P).view(torch.float8_e4m3fn)
    gate_up_P2F = _grouped(
        codes_PD, scales_RG.index_select(0, row_P), weights.gate_up_codes_X2FD, weights.gate_up_scales_XBG, owner_P, x_RD
    )
    codes_PF, scales_PG = fp8_quantise(swiglu(gate_up_P2F, limit), rule.floor, rule.power_of_two)
    down_PD = _grouped(codes_PF, scales_PG, weights.down_codes_XDF, weights.down_scales_XBG, owner_P, x_RD)
    return down_PD.index_select(0, layout.place_RK.view(-1)).view(rows, slots, hidden)


def _owners(layout: Layout) -> Tensor:
    """Each position's expert; tiles past the last one used belong to expert 0, whose rows they do not touch."""
    return layout.expert_B.clamp(min=0).repeat_interleave(layout.tile, output_size=layout.pair_P.numel())


def _grouped(codes_PK: Tensor, scales_PG: Tensor, codes_XNK: Tensor, scales_XBG: Tensor, owner_P: Tensor, like: Tensor) -> Tensor:
    import deep_gemm

    out_PN = like.new_empty(codes_PK.shape[0], codes_XNK.shape[1])
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((codes_PK, scales_PG), (codes_XNK, scales_XBG), out_PN, owner_P)
    return out_PN


def fp8_experts_backward(
    grad_RKD: Tensor, x_RD: Tensor, experts_RK: Tensor, weights: Weights, rule: ScaleRule, limit: float | None
) -> Tensor:
    """dx; recomputes each expert's inner rows, one expert after another, since dequantised weights of all of them would not fit."""
    slot_grads = x_RD.new_zeros(*experts_RK.shape, x_RD.shape[1])
    codes_RD, scales_RG = fp8_quantise(x_RD, rule.floor, rule.power_of_two)
    for e in experts_RK.unique().tolist():
        row, slot = (experts_RK == e).nonzero(as_tuple=True)
        codes = codes_RD.view(torch.uint8).index_select(0, row).view(torch.float8_e4m3fn)
        gate_up = fp8_linear(codes, scales_RG[row], weights.gate_up_codes_X2FD[e], weights.gate_up_scales_XBG[e], x_RD.dtype)
        grad_hidden = fp8_linear_backward(grad_RKD[row, slot], weights.down_codes_XDF[e], weights.down_scales_XBG[e], x_RD.dtype)
        grad_gate_up = swiglu_backward(grad_hidden.contiguous(), gate_up, limit)
        slot_grads[row, slot] = fp8_linear_backward(grad_gate_up, weights.gate_up_codes_X2FD[e], weights.gate_up_scales_XBG[e], x_RD.dtype)
    return added_by_slot(slot_grads)
