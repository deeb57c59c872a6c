"""layer_norm: the norm of a row's deviations from its mean, with a weight and a bias.

Source: Ba, Kiros and Hinton 2016 (arXiv 1607.06450), section 3; `torch.nn.LayerNorm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   x, weight, bias, eps
    backward  grad, x, weight, eps
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.layer_norm import backward, reference

    return Functions(reference.layer_norm, backward.layer_norm_backward)


def _triton() -> Functions:
    from zoo.common.ops.layer_norm import backward, kernels

    return Functions(kernels.layer_norm, backward.layer_norm_backward)


CONTRACT = Contract(
    name="layer_norm",
    version=1,
    shapes="x [..., D] (rows may be strided), weight [D], bias [D] -> [..., D] in x's dtype",
    reads={"x": PROGRAM, "weight_D": PROGRAM, "bias_D": PROGRAM},
    rounds="the output once, from FP32",
    adds="x, then the squares of x - mean, in FP32 by the adjacent-pair tree over D padded to a power of two; each sum times the FP32 "
    "value of 1/D; plus eps; one rsqrt; ((x - mean) * rsqrt) * weight + bias, every product and sum rounded",
    laws=("row", "place", "fusion", "repeat"),
    backward="closed form in FP32; weight and bias add rows in FP32",
    launch="one program a row",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
)


class _LayerNorm(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.functions = provider.functions
        return provider.functions.forward(x, weight, bias, eps)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        x, weight = ctx.saved_tensors
        return *functions.backward(grad, x, weight, ctx.eps), None, None


@observed(CONTRACT)
def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, program: Program) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim. ValueError if the widths differ."""
    if not x.shape[-1:] == weight_D.shape == bias_D.shape:
        raise ValueError(
            f"layer_norm: rows of {x.shape[-1]} columns, a weight of shape {tuple(weight_D.shape)} and a bias of {tuple(bias_D.shape)}"
        )
    return _LayerNorm.run(x, weight_D, bias_D, eps, CONTRACT.provider(program))
