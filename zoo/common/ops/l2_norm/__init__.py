"""l2_norm: each head's row over its Euclidean length.

Source: the norm of queries and keys in Gated DeltaNet (arXiv 2412.06464, section 3.4); transformers' `l2norm` of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program

EPS = 1e-6


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RHK, eps
    backward  grad, x_RHK, eps
    """

    forward: Callable[[Tensor, float], Tensor]
    backward: Callable[[Tensor, Tensor, float], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.l2_norm import backward, reference

    return Functions(reference.l2_norm, backward.l2_norm_backward)


def _triton() -> Functions:
    from zoo.common.ops.l2_norm import backward, kernels

    return Functions(kernels.l2_norm, backward.l2_norm_backward)


CONTRACT = Contract(
    name="l2_norm",
    version=1,
    shapes="x_RHK (heads may be strided) -> [R, H, K] in x's dtype",
    reads={"x_RHK": PROGRAM},
    rounds="once, from FP32, at the store",
    adds="squares in FP32 by the adjacent-pair tree over K padded to a power of two, plus eps (1e-6), one rsqrt, one product",
    laws=("row", "place", "shard", "repeat"),
    backward="closed form in FP32",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
)


class _L2Norm(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.functions = provider.functions
        return provider.functions.forward(x, EPS)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        (x,) = ctx.saved_tensors
        return functions.backward(grad, x, EPS), None


@observed(CONTRACT)
def l2_norm(x_RHK: Tensor, *, program: Program) -> Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last dim: the sum, not the mean, and eps inside the root."""
    return _L2Norm.run(x_RHK, CONTRACT.provider(program))
