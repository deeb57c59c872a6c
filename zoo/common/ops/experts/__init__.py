"""experts: each row through its chosen experts' SwiGLU, a slot row per choice.

Sources: routed experts, Shazeer et al. 2017 (arXiv 1701.06538), section 2; each of them the SwiGLU of Shazeer 2020 (arXiv 2002.05202),
section 2; transformers' `Qwen3MoeExperts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import INTEGERS, PROGRAM, Arguments, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.ops.swiglu import check_limit
from zoo.common.program import Program


def _deepgemm_serves(experts: int, hidden: int, intermediate: int) -> bool:
    return hidden % 64 == 0 and intermediate % 64 == 0


def _shape(arguments: Arguments) -> tuple[int, ...]:
    count, twice, hidden = arguments["gate_up_X2FD"].shape
    return count, hidden, twice // 2


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RD, experts_RK, gate_up_X2FD, down_XDF, limit
    backward  grad_RKD, x_RD, experts_RK, gate_up_X2FD, down_XDF, limit
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.experts import reference

    return Functions(reference.experts, reference.experts_backward)


def _deepgemm() -> Functions:
    from zoo.common.ops.experts import kernels

    return Functions(kernels.experts_deepgemm, kernels.experts_backward)


def _triton() -> Functions:
    from zoo.common.ops.experts import kernels

    return Functions(kernels.experts_triton, kernels.experts_backward)


def _grouped_mm() -> Functions:
    from zoo.common.ops.experts import kernels

    return Functions(kernels.experts_grouped_mm, kernels.experts_backward)


CONTRACT = Contract(
    name="experts",
    version=1,
    shapes="x_RD, experts_RK, gate_up_X2FD (gate first), down_XDF -> slots_RKD in the program's dtype",
    reads={"x_RD": PROGRAM, "experts_RK": INTEGERS, "gate_up_X2FD": PROGRAM, "down_XDF": PROGRAM},
    rounds="gate_up once, swiglu (with its limit, where there is one) once, each slot row once: the linear and swiglu contracts, expert by "
    "expert",
    adds="K ascending in one FP32 accumulator, as linear does",
    laws=("row", "place", "fusion", "shard", "repeat"),
    backward="grouped products with FP32 accumulation; a row's slots are added in slot order",
    launch="rows sorted by expert; few rows take 16-row tiles, many take 128-row tiles",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("deepgemm", "fixed_k", "cuda", _deepgemm, needs=("deep_gemm",), serves=_deepgemm_serves, version=2),
        Provider("triton", "fixed_k", "cuda", _triton, defining=True),
        Provider("grouped_mm", "grouped_mm", "cuda", _grouped_mm, defining=True),
    ),
    shape=_shape,
)


class _Experts(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        down: Tensor,
        limit: float | None,
        provider: Provider[Functions],
    ) -> Tensor:
        ctx.save_for_backward(x, chosen, gate_up, down)
        ctx.limit = limit
        ctx.functions = provider.functions
        return provider.functions.forward(x, chosen, gate_up, down, limit)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        x, chosen, gate_up, down = ctx.saved_tensors
        grad_x, grad_gate_up, grad_down = functions.backward(grad, x, chosen, gate_up, down, ctx.limit)
        return grad_x, None, grad_gate_up, grad_down, None, None


@observed(CONTRACT)
def experts(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FD: Tensor,
    down_XDF: Tensor,
    *,
    program: Program,
    limit: float | None = None,
) -> Tensor:
    """slots_RKD[r, s] = down_e swiglu(gate_up_e x_r) with e = experts_RK[r, s], swiglu cut to `limit` where there is one.

    ValueError if the weights' shapes disagree, or for a limit that is not positive.
    """
    check_limit("experts", limit)
    count, twice, hidden = gate_up_X2FD.shape
    if down_XDF.shape != (count, hidden, twice // 2):
        raise ValueError(
            f"experts: gate_up {tuple(gate_up_X2FD.shape)} needs down {(count, hidden, twice // 2)}, got {tuple(down_XDF.shape)}"
        )
    if x_RD.shape[1] != hidden:
        raise ValueError(f"experts: rows of {x_RD.shape[1]} columns, experts of {hidden}")
    provider = CONTRACT.provider(program, _shape({"gate_up_X2FD": gate_up_X2FD}))
    return _Experts.run(x_RD, experts_RK, gate_up_X2FD, down_XDF, limit, provider)
