"""fp8_linear: y = x W^T with both operands in E4M3 codes, by groups of 128 columns of K.

The order is that of DeepGEMM's product for Hopper: each group has an accumulator of its own, and its sum joins the result by one FMA
with the product of both scales.

Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, and the public DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.ops.contract import FP8, PROGRAM, WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.ops.fp8_quantise import CONTRACT as QUANTISER
from zoo.common.ops.fp8_quantise import GROUP, ScaleRule
from zoo.common.ops.fp8_quantise import Functions as QuantiserFunctions
from zoo.common.program import Program


def _serves(n: int, k: int) -> bool:
    return n % 8 == 0 and k % GROUP == 0


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_codes_RK, x_scales_RG, codes_NK, scales_BG, out_dtype
    backward  grad_y_RN, codes_NK, scales_BG, dtype
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.fp8_linear import reference

    return Functions(reference.fp8_linear, reference.fp8_linear_backward)


def _deepgemm() -> Functions:
    from zoo.common.ops.fp8_linear import kernels

    return Functions(kernels.fp8_linear, kernels.fp8_linear_backward)


CONTRACT = Contract(
    name="fp8_linear",
    version=1,
    shapes="x_RK, codes_NK float8_e4m3fn and scales_BG float32 of the weight's blocks of 128 by 128 -> y_RN in x's dtype",
    reads={"x_RK": PROGRAM, "codes_NK": FP8, "scales_BG": WIDE},
    rounds="x to codes by fp8_quantise; the product of both scales once in FP32; the result once, from FP32, at the store",
    adds="K ascending in groups of 128: a fresh accumulator each (CUDA: the tensor core's own, narrower than FP32), which joins one FP32 "
    "accumulator by an FMA with the product of the two scales",
    laws=("row", "column", "place", "repeat"),
    backward="straight through the quantiser: dx = dy W with the weight dequantised to x's dtype; the codes are frozen",
    launch="DeepGEMM, which picks a tile by the row count and keeps a row's bytes; no other shape is served on CUDA than its own",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("deepgemm", "deepgemm_fp8", "cuda", _deepgemm, needs=("deep_gemm",), serves=_serves, defining=True),
    ),
)


class _Fp8Linear(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        rule: ScaleRule,
        provider: Provider[Functions],
        quantiser: Provider[QuantiserFunctions],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.functions = provider.functions
        ctx.dtype = x.dtype
        x_codes, x_scales = quantiser.functions.forward(x, rule.floor, rule.power_of_two)
        return provider.functions.forward(x_codes, x_scales, codes, scales, x.dtype)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        functions: Functions = ctx.functions
        codes, scales = ctx.saved_tensors
        grad_x = functions.backward(grad_y, codes, scales, ctx.dtype)
        return grad_x, None, None, None, None, None


@observed(CONTRACT)
def fp8_linear(x_RK: Tensor, codes_NK: Tensor, scales_BG: Tensor, rule: ScaleRule, *, program: Program) -> Tensor:
    """y_RN = x_RK W^T in x's dtype, W the values of codes and scales. `rule` is that of x's scales.

    ValueError if the widths differ, or if the scales are not those of blocks of 128 by 128.
    """
    n, k = codes_NK.shape
    blocks = tuple(scales_BG.shape)
    if x_RK.shape[-1] != k:
        raise ValueError(f"fp8_linear: x has {x_RK.shape[-1]} columns, the weight takes {k}")
    wanted = (-(-n // GROUP), -(-k // GROUP))
    if blocks != wanted:
        raise ValueError(f"fp8_linear: a weight of {n} x {k} has {wanted[0]} x {wanted[1]} scales, not {blocks[0]} x {blocks[1]}")
    provider = CONTRACT.provider(program, (n, k))
    return _Fp8Linear.run(x_RK, codes_NK, scales_BG, rule, provider, QUANTISER.provider(program))
