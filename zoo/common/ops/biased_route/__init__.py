"""biased_route: sigmoid scores of experts, the k largest of score plus a bias per expert, and the chosen scores as weights.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; groups of experts as transformers' `DeepseekV3TopkRouter` chooses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   logits_RX, bias_X, choice
    backward  grad_RK, logits_RX, experts_RK, choice
    """

    forward: Callable[[Tensor, Tensor, Choice], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Choice], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.biased_route import backward, reference

    return Functions(reference.biased_route, backward.biased_route_backward)


def _triton() -> Functions:
    from zoo.common.ops.biased_route import backward, kernels

    return Functions(kernels.biased_route, backward.biased_route_backward)


CONTRACT = Contract(
    name="biased_route",
    version=1,
    shapes="logits_RX and bias_X in FP32 -> weights_RK in FP32 and experts_RK (int64), by descending biased score, the lower id first "
    "among equals",
    reads={"logits_RX": WIDE, "bias_X": WIDE},
    rounds="never: all FP32",
    adds="score 1 / (1 + exp(-logit)); biased score = score + bias; a group's worth is the sum of its two best biased scores, the best "
    "groups alone are open (the lower first among equals); the chosen scores left to right in slot order, plus 1e-20, one division "
    "each, times the scale",
    laws=("row", "place", "repeat"),
    backward="closed form in FP32; the choice has no gradient, so the bias has none",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "fp32", "cuda", _triton, defining=True),
    ),
)


class Choice(NamedTuple):
    """top_k experts out of the `open_groups` best of `groups` equal, contiguous groups; weights add up to `scale` if renormalised."""

    top_k: int
    groups: int = 1
    open_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0


class _BiasedRoute(OpFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor, choice: Choice, provider: Provider[Functions]) -> Any:
        weights, experts = provider.functions.forward(logits, bias, choice)
        ctx.save_for_backward(logits, experts)
        ctx.choice = choice
        ctx.functions = provider.functions
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        logits, experts = ctx.saved_tensors
        functions: Functions = ctx.functions
        return functions.backward(grad, logits, experts, ctx.choice), None, None, None


@observed(CONTRACT)
def biased_route(logits_RX: Tensor, bias_X: Tensor, choice: Choice, *, program: Program) -> tuple[Tensor, Tensor]:
    """(weights_RK, experts_RK). ValueError if the experts, groups and slots don't fit each other."""
    experts = logits_RX.shape[1]
    if bias_X.shape != (experts,):
        raise ValueError(f"biased_route: {experts} experts, a bias of shape {tuple(bias_X.shape)}")
    check_groups("biased_route", experts, choice)
    return _BiasedRoute.run(logits_RX, bias_X, choice, CONTRACT.provider(program))


def check_groups(what: str, experts: int, choice: Choice) -> None:
    """ValueError unless a row can choose its experts. `what` begins the sentence."""
    top_k, groups, open_groups = choice[:3]
    if experts % groups:
        raise ValueError(f"{what}: {experts} experts do not divide into {groups} groups")
    if open_groups > groups:
        raise ValueError(f"{what}: {open_groups} open groups of {groups}")
    if experts < 2 * groups:
        raise ValueError(f"{what}: {groups} groups of {experts} experts, a group needs at least 2")
    if top_k > experts // groups * open_groups:
        raise ValueError(f"{what}: top {top_k} of {experts // groups * open_groups} experts in {open_groups} open groups")
