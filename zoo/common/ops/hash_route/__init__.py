"""hash_route: a token's experts from a table, and their scores, square roots of softplus, as weights.

Sources: Hash Layers, Roller et al. 2021 (arXiv 2106.04426), section 3; the score as transformers' `DeepseekV4HashRouter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import INTEGERS, WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   logits_RX, ids_R, table_VK, scale
    backward  grad_RK, logits_RX, experts_RK, scale
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.hash_route import reference
    from zoo.common.ops.softplus_route import backward

    return Functions(reference.hash_route, backward.weights_backward)


def _triton() -> Functions:
    from zoo.common.ops.hash_route import kernels
    from zoo.common.ops.softplus_route import backward

    return Functions(kernels.hash_route, backward.weights_backward)


CONTRACT = Contract(
    name="hash_route",
    version=1,
    shapes="logits_RX in FP32, ids_R, table_VK (int64) -> weights_RK in FP32 and experts_RK (int64), in the table's order",
    reads={"logits_RX": WIDE, "ids_R": INTEGERS, "table_VK": INTEGERS},
    rounds="never: all FP32",
    adds="softplus_route's weights of the table's experts",
    laws=("row", "place", "repeat"),
    backward="softplus_route's",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "fp32", "cuda", _triton, defining=True),
    ),
)


class _HashRoute(OpFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, table: Tensor, scale: float, provider: Provider[Functions]) -> Any:
        weights, experts = provider.functions.forward(logits, ids, table, scale)
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
def hash_route(logits_RX: Tensor, ids_R: Tensor, table_VK: Tensor, scale: float, *, program: Program) -> tuple[Tensor, Tensor]:
    """(weights_RK, experts_RK). ValueError for another count of ids than of rows; what a table may hold is looked at where
    weights are loaded: zoo.common.weights.check_table."""
    if ids_R.shape != logits_RX.shape[:1]:
        raise ValueError(f"hash_route: {logits_RX.shape[0]} rows, token ids of shape {tuple(ids_R.shape)}")
    return _HashRoute.run(logits_RX, ids_R, table_VK, scale, CONTRACT.provider(program))
