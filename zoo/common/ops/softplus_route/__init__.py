"""softplus_route: square roots of softplus as the experts' scores, the k largest of score plus a bias, and the chosen scores as weights.

Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, for the bias; the score as transformers' `DeepseekV4TopKRouter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   logits_RX, bias_X, top_k, scale
    backward  grad_RK, logits_RX, experts_RK, scale
    """

    forward: Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.softplus_route import backward, reference

    return Functions(reference.softplus_route, backward.weights_backward)


def _triton() -> Functions:
    from zoo.common.ops.softplus_route import backward, kernels

    return Functions(kernels.softplus_route, backward.weights_backward)


CONTRACT = Contract(
    name="softplus_route",
    version=1,
    shapes="logits_RX and bias_X in FP32 -> weights_RK in FP32 and experts_RK (int64), by descending biased score, the lower id first "
    "among equals",
    reads={"logits_RX": WIDE, "bias_X": WIDE},
    rounds="never: all FP32",
    adds="score = sqrt(max(logit, 0) + log1p(exp(-|logit|))); biased score = score + bias; the chosen scores left to right in slot order, "
    "plus 1e-20, one division each, times the scale",
    laws=("row", "place", "repeat"),
    backward="closed form in FP32; the choice has no gradient, so the bias has none",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "fp32", "cuda", _triton, defining=True),
    ),
)


class _SoftplusRoute(OpFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor, top_k: int, scale: float, provider: Provider[Functions]) -> Any:
        weights, experts = provider.functions.forward(logits, bias, top_k, scale)
        ctx.save_for_backward(logits, experts)
        ctx.scale = scale
        ctx.functions = provider.functions
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        functions: Functions = ctx.functions
        logits, experts = ctx.saved_tensors
        return functions.backward(grad, logits, experts, ctx.scale), None, None, None, None


@observed(CONTRACT)
def softplus_route(logits_RX: Tensor, bias_X: Tensor, top_k: int, scale: float, *, program: Program) -> tuple[Tensor, Tensor]:
    """(weights_RK, experts_RK). ValueError if the experts, the bias and the slots don't fit each other."""
    experts = logits_RX.shape[1]
    if bias_X.shape != (experts,):
        raise ValueError(f"softplus_route: {experts} experts, a bias of shape {tuple(bias_X.shape)}")
    if not 0 < top_k <= experts:
        raise ValueError(f"softplus_route: top {top_k} of {experts} experts")
    return _SoftplusRoute.run(logits_RX, bias_X, top_k, scale, CONTRACT.provider(program))
