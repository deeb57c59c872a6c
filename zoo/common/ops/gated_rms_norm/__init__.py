"""gated_rms_norm: a head's RMS norm times silu of its gate, one rounding.

Source: transformers' `Qwen3NextRMSNormGated`: the root-mean-square norm of Zhang and Sennrich 2019 (arXiv 1910.07467) before the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RVE, gate_RVE, weight_E, eps
    backward  grad, x_RVE, gate_RVE, weight_E, eps
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.gated_rms_norm import backward, reference

    return Functions(reference.gated_rms_norm, backward.gated_rms_norm_backward)


def _triton() -> Functions:
    from zoo.common.ops.gated_rms_norm import backward, kernels

    return Functions(kernels.gated_rms_norm, backward.gated_rms_norm_backward)


CONTRACT = Contract(
    name="gated_rms_norm",
    version=1,
    shapes="x_RVE, gate_RVE (heads may be strided), weight_E -> [R, V, E] in x's dtype",
    reads={"x_RVE": PROGRAM, "gate_RVE": PROGRAM, "weight_E": WIDE},
    rounds="once, from FP32, at the store",
    adds="squares as rms_norm does; ((x * rsqrt) * weight) * (gate / (1 + exp(-gate))), products rounded one by one in FP32",
    laws=("row", "place", "shard", "repeat"),
    backward="closed form in FP32; the weight's gradient adds rows and heads in FP32",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
)


class _GatedRMSNorm(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        ctx.functions = provider.functions
        return provider.functions.forward(x, gate, weight, eps)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        x, gate, weight = ctx.saved_tensors
        return *functions.backward(grad, x, gate, weight, ctx.eps), None, None


@observed(CONTRACT)
def gated_rms_norm(x_RVE: Tensor, gate_RVE: Tensor, weight_E: Tensor, eps: float, *, program: Program) -> Tensor:
    """rms_norm(x) * silu(gate) over the last dim. ValueError if the shapes disagree."""
    if x_RVE.shape != gate_RVE.shape or weight_E.shape != x_RVE.shape[-1:]:
        raise ValueError(f"gated_rms_norm: x {tuple(x_RVE.shape)}, gate {tuple(gate_RVE.shape)}, weight {tuple(weight_E.shape)} disagree")
    return _GatedRMSNorm.run(x_RVE, gate_RVE, weight_E, eps, CONTRACT.provider(program))
