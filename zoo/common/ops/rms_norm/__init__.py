"""rms_norm and add_rms_norm: root-mean-square norms over the last dim, alone or after a residual sum.

Source: Zhang and Sennrich 2019 (arXiv 1910.07467), section 4; with the offset 1 as transformers' `Qwen3NextRMSNorm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import EITHER, PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   x, residual, weight, eps, offset
    backward  grad, grad_total, total, weight, eps, offset
    """

    forward: Callable[[Tensor, Tensor | None, Tensor, float, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor | None, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.rms_norm import reference

    return Functions(reference.rms_norm, reference.rms_norm_backward)


def _triton() -> Functions:
    from zoo.common.ops.rms_norm import kernels

    return Functions(kernels.rms_norm, kernels.rms_norm_backward)


CONTRACT = Contract(
    name="rms_norm",
    version=1,
    shapes="x [..., D], weight [D] -> [..., D] in x's dtype; D is a hidden size or a head's width",
    reads={"x": PROGRAM, "x_RD": PROGRAM, "residual_RD": PROGRAM, "weight_D": EITHER},
    rounds="residual sum once, from FP32, before anything else; the output once, from FP32",
    adds="squares in FP32 by the adjacent-pair tree over D padded to a power of two; times the FP32 value of 1/D; plus eps; one rsqrt; "
    "(x * rsqrt) * weight, products rounded one by one (zero-centred: 1 + weight in FP32 first)",
    laws=("row", "place", "fusion", "repeat"),
    backward="closed form in FP32 from the rounded input; the weight's gradient adds rows in fixed blocks",
    launch="one program a row; a few very wide rows are split over several launches that build the same tree",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
)


class _RMSNorm(OpFunction):
    """x (+ residual) -> normalised, sum. With no residual the sum is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, provider: Provider[Functions]
    ) -> Any:
        normed, total = provider.functions.forward(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.offset = offset
        ctx.functions = provider.functions
        ctx.added = residual is not None
        if residual is None:
            return normed
        return normed, total

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor | None = None) -> Any:
        total, weight = ctx.saved_tensors
        functions: Functions = ctx.functions
        grad_x, grad_weight = functions.backward(grad, grad_total, total, weight, ctx.eps, ctx.offset)
        return grad_x, grad_x if ctx.added else None, grad_weight, None, None, None


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: rows of {x.shape[-1]} columns, a weight of shape {tuple(weight.shape)}")


@observed(CONTRACT)
def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, program: Program, zero_centred: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dim ([R, D], or [R, H, E] per head); `zero_centred` models store weight - 1."""
    _check(x, weight_D)
    return _RMSNorm.run(x, None, weight_D, eps, float(zero_centred), CONTRACT.provider(program))


@observed(CONTRACT)
def add_rms_norm(
    x_RD: Tensor, residual_RD: Tensor, weight_D: Tensor, eps: float, *, program: Program, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """total = round(x + residual), then rms_norm of it: returns (normed_RD, total_RD)."""
    _check(x_RD, weight_D)
    if x_RD.shape != residual_RD.shape:
        raise ValueError(f"add_rms_norm: x {tuple(x_RD.shape)} and residual {tuple(residual_RD.shape)} differ")
    return _RMSNorm.run(x_RD, residual_RD, weight_D, eps, float(zero_centred), CONTRACT.provider(program))
