"""fp8_linear on CUDA: DeepGEMM's product of E4M3 codes, whose bytes of a row depend on no other row.

Rows "gemm" and "grouped" of benchmarks.library_classes are what that rests on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.fp8_linear.reference import dequantised


def fp8_linear(x_codes_RK: Tensor, x_scales_RG: Tensor, codes_NK: Tensor, scales_BG: Tensor, out_dtype: torch.dtype) -> Tensor:
    """DeepGEMM with FP32 scales; it transposes those of x itself."""
    import deep_gemm

    y_RN = x_codes_RK.new_empty(x_codes_RK.shape[0], codes_NK.shape[0], dtype=out_dtype)
    if y_RN.numel():
        deep_gemm.fp8_gemm_nt((x_codes_RK, x_scales_RG), (codes_NK, scales_BG), y_RN)
    return y_RN


def fp8_linear_backward(grad_y_RN: Tensor, codes_NK: Tensor, scales_BG: Tensor, dtype: torch.dtype) -> Tensor:
    """One cuBLAS product in `dtype` with FP32 accumulation on the weight dequantised once."""
    return grad_y_RN.to(dtype) @ dequantised(codes_NK, scales_BG, dtype)
