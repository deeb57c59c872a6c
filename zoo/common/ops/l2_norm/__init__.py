"""l2_norm: each head's row over its Euclidean length.

Source: the norm of queries and keys in Gated DeltaNet (arXiv 2412.06464, section 3.4); transformers' `l2norm` of Qwen3-Next.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program

EPS = 1e-6

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
        Provider("reference", "reference", "cpu", f"{__name__}.reference:l2_norm", f"{__name__}.backward:l2_norm_backward", defining=True),
        Provider("triton", "pair_tree", "cuda", f"{__name__}.kernels:l2_norm", f"{__name__}.backward:l2_norm_backward", defining=True),
    ),
)


class _L2Norm(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, provider: Provider) -> Tensor:
        ctx.save_for_backward(x)
        ctx.provider = provider
        return provider.function("forward")(x, EPS)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.provider.function("backward")(grad, *ctx.saved_tensors, EPS), None


@observed(CONTRACT)
def l2_norm(x_RHK: Tensor, *, program: Program) -> Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last dim: the sum, not the mean, and eps inside the root."""
    return _L2Norm.run(x_RHK, CONTRACT.provider(program))
