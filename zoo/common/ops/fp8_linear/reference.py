"""fp8_linear in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.fp8_quantise import GROUP
from zoo.common.ops.linear.reference import panels


def fp8_linear(x_codes_RK: Tensor, x_scales_RG: Tensor, codes_NK: Tensor, scales_BG: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A product of codes has at most eight significant bits and is exact in FP32; a group's 128 are added by one matmul of one shape."""
    rows = x_codes_RK.shape[0]
    columns, depth = codes_NK.shape
    x = x_codes_RK.float()
    w = codes_NK.float()
    total_RN = x.new_zeros(rows, columns)
    for group, first in enumerate(range(0, depth, GROUP)):
        part_RN = panels(_columns(x, first), _columns(w, first))
        scale_N = scales_BG[:, group].float().repeat_interleave(GROUP)[:columns]
        scale_RN = x_scales_RG[:, group, None] * scale_N
        # an FMA: the product is exact in FP64
        total_RN = (part_RN.double() * scale_RN.double() + total_RN.double()).float()
    return total_RN.to(out_dtype)


def _columns(x: Tensor, first: int) -> Tensor:
    """128 columns from `first` on, zeros beyond the last: every matmul has one depth."""
    part = x[:, first : first + GROUP]
    return torch.nn.functional.pad(part, (0, GROUP - part.shape[1])).contiguous()


def dequantised(codes_NK: Tensor, scales_BG: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight's values: one FP32 product each, rounded once to `dtype`."""
    n, k = codes_NK.shape
    scales_NK = scales_BG.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]
    return (codes_NK.to(scales_BG.dtype) * scales_NK).to(dtype)


def fp8_linear_backward(grad_y_RN: Tensor, codes_NK: Tensor, scales_BG: Tensor, dtype: torch.dtype) -> Tensor:
    """dx in FP32 (float64 for a float64 gradient), rounded once to `dtype`."""
    accumulate = torch.promote_types(grad_y_RN.dtype, torch.float32)
    weight_NK = dequantised(codes_NK, scales_BG, dtype).to(accumulate)
    return (grad_y_RN.to(accumulate) @ weight_NK).to(dtype)
