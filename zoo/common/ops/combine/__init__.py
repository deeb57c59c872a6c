"""combine: slot rows and route weights into one row, through the contributors' tree.

Sources: y = sum of gate times expert, Shazeer et al. 2017 (arXiv 1701.06538), section 2; the shared expert beside it, DeepSeekMoE
(arXiv 2401.06066), section 3.2. The tree of contributors is this project's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import INTEGERS, PROGRAM, WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   slots_RKD, weights_RK, experts_RK, shared_RD, block, contributors
    backward  grad_RD, slots_RKD, weights_RK
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, int, int], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.combine import reference

    return Functions(reference.combine, reference.combine_backward)


def _triton() -> Functions:
    from zoo.common.ops.combine import kernels

    return Functions(kernels.combine, kernels.combine_backward)


CONTRACT = Contract(
    name="combine",
    version=1,
    shapes="slots_RKD, weights_RK (FP32), experts_RK, optional shared_RD (the last leaf) -> [R, D]",
    reads={"slots_RKD": PROGRAM, "weights_RK": WIDE, "experts_RK": INTEGERS, "shared_RD": PROGRAM},
    rounds="each contributor's leaf once, from FP32, to the program's dtype; the result once, straight from FP64",
    adds="expert e belongs to contributor e // ceil(experts / contributors); inside a contributor weight * slot in FP32, products rounded, "
    "slots ascending from +0; contributors as adjacent pairs in FP64, an odd one carried",
    laws=("row", "place", "shard", "fusion", "repeat"),
    backward="d slots = weight * dy, d weights = slot . dy, d shared = dy, all FP32 with one rounding",
    launch="on one GPU the leaves live in registers, few rows take narrow blocks; under EP each contributor's owner sends its leaf",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "contributor_tree", "cuda", _triton, defining=True),
    ),
)


class _Combine(OpFunction):
    @staticmethod
    def forward(
        ctx: Any, slots: Tensor, weights: Tensor, experts: Tensor, shared: Tensor | None, block: int, contributors: int, provider: Provider
    ) -> Tensor:
        ctx.save_for_backward(slots, weights)
        ctx.shared = shared is not None
        ctx.functions = provider.functions
        return provider.functions.forward(slots, weights, experts, shared, block, contributors)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        grad_slots, grad_weights = functions.backward(grad, *ctx.saved_tensors)
        return grad_slots, grad_weights, None, grad if ctx.shared else None, None, None, None


@observed(CONTRACT)
def combine(
    slots_RKD: Tensor, weights_RK: Tensor, experts_RK: Tensor, num_experts: int, *, program: Program, shared_RD: Tensor | None = None
) -> Tensor:
    """The weighted sum of a row's slots, by contributors. ValueError if slots and weights disagree."""
    if slots_RKD.shape[:2] != weights_RK.shape or weights_RK.shape != experts_RK.shape:
        raise ValueError(
            f"combine: slots {tuple(slots_RKD.shape[:2])}, weights {tuple(weights_RK.shape)} and experts {tuple(experts_RK.shape)} differ"
        )
    block = -(-num_experts // program.contributors)
    return _Combine.run(slots_RKD, weights_RK, experts_RK, shared_RD, block, program.contributors, CONTRACT.provider(program))
