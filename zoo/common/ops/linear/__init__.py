"""linear: y = x W^T, one fixed order of additions for every shape of the batch.

Sources: `torch.nn.Linear` without a bias; the tree over `k_parts` is pairwise summation, Higham 1993, "The accuracy of floating point
summation", SIAM Journal on Scientific Computing 14(4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Arguments, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import HEAD, Program


def _deepgemm_serves(n: int, k: int, k_parts: int) -> bool:
    return k_parts == 1 and n % 8 == 0 and k % 8 == 0 and n >= 16


def _shape(arguments: Arguments) -> tuple[int, ...]:
    return (*arguments["weight_NK"].shape, arguments["k_parts"])


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RK, weight_NK, out_dtype, k_parts
    backward  grad_y_RN, x_RK, weight_NK, needs_x, needs_weight
    """

    forward: Callable[[Tensor, Tensor, torch.dtype, int], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, bool, bool], tuple[Tensor | None, Tensor | None]]


def _reference() -> Functions:
    from zoo.common.ops.linear import reference

    return Functions(reference.linear, reference.linear_backward)


def _deepgemm() -> Functions:
    from zoo.common.ops.linear import kernels

    return Functions(kernels.linear_deepgemm, kernels.linear_backward)


def _triton() -> Functions:
    from zoo.common.ops.linear import kernels

    return Functions(kernels.linear_triton, kernels.linear_backward)


def _reference_fp32() -> Functions:
    from zoo.common.ops.linear import reference

    return Functions(reference.linear, reference.linear_backward)


def _triton_fp32() -> Functions:
    from zoo.common.ops.linear import kernels

    return Functions(kernels.linear_fp32, kernels.linear_backward)


def _cublas() -> Functions:
    from zoo.common.ops.linear import kernels

    return Functions(kernels.linear_cublas, kernels.linear_backward)


CONTRACT = Contract(
    name="linear",
    version=1,
    shapes="x_RK, weight_NK, both the program's dtype -> y_RN in that dtype, or FP32 where the caller asks (heads, routers)",
    reads={"x_RK": PROGRAM, "weight_NK": PROGRAM},
    rounds="once, from FP32, at the store",
    adds="K ascending in one FP32 accumulator; with k_parts > 1 (a constant of op and shape) equal ascending parts, one accumulator "
    "each, added by the adjacent-pair tree; class fp32_operands widens both operands and adds by FP32 FMAs, K ascending",
    laws=("row", "column", "place", "repeat"),
    backward="dx = dy W and dW = dy^T x, FP32 accumulation, rounded once to the dtype of x and W",
    launch="rows choose the tile: 16 rows in decode, 64 or 128 in prefill and training; DeepGEMM where admitted",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("deepgemm", "fixed_k", "cuda", _deepgemm, needs=("deep_gemm",), serves=_deepgemm_serves),
        Provider("triton", "fixed_k", "cuda", _triton, defining=True),
        Provider("reference_fp32", "fp32_operands", "cpu", _reference_fp32, defining=True),
        Provider("triton_fp32", "fp32_operands", "cuda", _triton_fp32, defining=True),
        Provider("cublas", "cublas", "cuda", _cublas, defining=True),
    ),
    shape=_shape,
)


class _Linear(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out_dtype: torch.dtype, k_parts: int, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.functions = provider.functions
        return provider.functions.forward(x, weight, out_dtype, k_parts)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        functions: Functions = ctx.functions
        grad_x, grad_weight = functions.backward(grad_y, x, weight, *ctx.needs_input_grad[:2])
        return grad_x, grad_weight, None, None, None


@observed(CONTRACT)
def linear(x_RK: Tensor, weight_NK: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    """y_RN = x_RK weight_NK^T in fixed order.

    `out_dtype` defaults to x's dtype. `k_parts` must divide K into equal parts. ValueError if the widths differ.
    """
    if x_RK.shape[-1] != weight_NK.shape[1]:
        raise ValueError(f"linear: x has {x_RK.shape[-1]} columns, the weight takes {weight_NK.shape[1]}")
    if weight_NK.shape[1] % k_parts:
        raise ValueError(f"linear: K = {weight_NK.shape[1]} does not divide into {k_parts} parts")
    provider = CONTRACT.provider(program, _shape({"weight_NK": weight_NK, "k_parts": k_parts}))
    return _Linear.run(x_RK, weight_NK, out_dtype or x_RK.dtype, k_parts, provider)


def head_product(hidden_RD: Tensor, weight_VD: Tensor, program: Program) -> Tensor:
    """FP32 logits [R, V], differentiable: the vocabulary product, whose class a program may name apart."""
    provider = CONTRACT.provider(program, (*weight_VD.shape, 1), HEAD)
    return _Linear.run(hidden_RD, weight_VD, torch.promote_types(hidden_RD.dtype, torch.float32), 1, provider)
