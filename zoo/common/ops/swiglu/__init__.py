"""swiglu: silu(gate) * up with one rounding; with a limit both are cut to it first.

Sources: Shazeer 2020 (arXiv 2002.05202), section 2; the limit as DeepSeek-V4's published code has it, the gate from above alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   gate_up, limit
    backward  grad, gate_up, limit
    """

    forward: Callable[[Tensor, float | None], Tensor]
    backward: Callable[[Tensor, Tensor, float | None], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.swiglu import reference

    return Functions(reference.swiglu, reference.swiglu_backward)


def _triton() -> Functions:
    from zoo.common.ops.swiglu import kernels

    return Functions(kernels.swiglu, kernels.swiglu_backward)


CONTRACT = Contract(
    name="swiglu",
    version=1,
    shapes="gate_up [..., 2F], the gate first -> [..., F]",
    reads={"gate_up": PROGRAM},
    rounds="once, from FP32, at the store",
    adds="(g / (1 + exp(-g))) * u in FP32; with a limit g is min(gate, limit) and u is up cut to +-limit, both exactly",
    laws=("row", "column", "place", "repeat"),
    backward="closed form in FP32, one rounding; zero where a limit cut",
    launch="blocks of columns by the width",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "single_round", "cuda", _triton, defining=True),
    ),
)


class _SwiGLU(OpFunction):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float | None, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        ctx.functions = provider.functions
        return provider.functions.forward(gate_up, limit)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        (gate_up,) = ctx.saved_tensors
        return functions.backward(grad, gate_up, ctx.limit), None, None


@observed(CONTRACT)
def swiglu(gate_up: Tensor, *, program: Program, limit: float | None = None) -> Tensor:
    """silu(gate) * up, with a `limit` of min(gate, limit) and of up cut to +-limit.

    ValueError if the width is odd, or for a limit that is not positive.
    """
    check_limit("swiglu", limit)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: gate and up need an even width together, got {gate_up.shape[-1]}")
    return _SwiGLU.run(gate_up, limit, CONTRACT.provider(program))


def check_limit(op: str, limit: float | None) -> None:
    """ValueError unless it is none, or a positive number."""
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: gate and up are cut to a positive limit, not to {limit}")
