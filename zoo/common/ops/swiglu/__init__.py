"""swiglu: silu(gate) * up with one rounding.

Source: Shazeer 2020 (arXiv 2002.05202), section 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program

CONTRACT = Contract(
    name="swiglu",
    version=1,
    shapes="gate_up [..., 2F], the gate first -> [..., F]",
    reads={"gate_up": PROGRAM},
    rounds="once, from FP32, at the store",
    adds="(g / (1 + exp(-g))) * u in FP32",
    laws=("row", "column", "place", "repeat"),
    backward="closed form in FP32, one rounding",
    launch="blocks of columns by the width",
    providers=(
        Provider("reference", "reference", "cpu", f"{__name__}.reference:swiglu", f"{__name__}.reference:swiglu_backward", defining=True),
        Provider("triton", "single_round", "cuda", f"{__name__}.kernels:swiglu", f"{__name__}.kernels:swiglu_backward", defining=True),
    ),
)


class _SwiGLU(OpFunction):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, provider: Provider) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.provider = provider
        return provider.function("forward")(gate_up)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.provider.function("backward")(grad, *ctx.saved_tensors), None


@observed(CONTRACT)
def swiglu(gate_up: Tensor, *, program: Program) -> Tensor:
    """silu(gate) * up; ValueError if the width is odd."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: gate and up need an even width together, got {gate_up.shape[-1]}")
    return _SwiGLU.run(gate_up, CONTRACT.provider(program))
