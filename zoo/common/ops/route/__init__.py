"""route: softmax over experts, the top k of them, their weights renormalised left to right.

Source: Shazeer et al. 2017 (arXiv 1701.06538), section 2.1, without their noise, the softmax before the choice; transformers'
`Qwen3MoeSparseMoeBlock`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   logits_RX, top_k, renormalise
    backward  grad_RK, logits_RX, experts_RK, renormalise
    """

    forward: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.route import backward, reference

    return Functions(reference.route, backward.route_backward)


def _triton() -> Functions:
    from zoo.common.ops.route import backward, kernels

    return Functions(kernels.route, backward.route_backward)


CONTRACT = Contract(
    name="route",
    version=1,
    shapes="logits_RX in FP32 -> weights_RK in FP32 and experts_RK (int64), by descending logit, the lower id first among equals",
    reads={"logits_RX": WIDE},
    rounds="never: all FP32",
    adds="exp(logit - max) over all experts by the adjacent-pair tree; the chosen probabilities left to right in slot order, then "
    "one division",
    laws=("row", "place", "repeat"),
    backward="closed form in FP32; the choice itself has no gradient",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
)


class _Route(OpFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int, renormalise: bool, provider: Provider[Functions]) -> Any:
        weights, experts = provider.functions.forward(logits, top_k, renormalise)
        ctx.save_for_backward(logits, experts)
        ctx.renormalise = renormalise
        ctx.functions = provider.functions
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        logits, experts = ctx.saved_tensors
        functions: Functions = ctx.functions
        return functions.backward(grad, logits, experts, ctx.renormalise), None, None, None


@observed(CONTRACT)
def route(logits_RX: Tensor, top_k: int, renormalise: bool, *, program: Program) -> tuple[Tensor, Tensor]:
    """(weights_RK, experts_RK). ValueError if top_k exceeds the experts."""
    if top_k > logits_RX.shape[1]:
        raise ValueError(f"route: top {top_k} of {logits_RX.shape[1]} experts")
    return _Route.run(logits_RX, top_k, renormalise, CONTRACT.provider(program))
