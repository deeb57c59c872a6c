"""output_gate: rows times the sigmoid of a gate, per column or one gate a row.

Sources: the gate on attention's output, Qiu et al. 2025 (arXiv 2505.06708), as transformers' `Qwen3NextAttention`; one gate a row, the
shared expert's in transformers' `Qwen2MoeSparseMoeBlock`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import EITHER, PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   x, gate
    backward  grad, x, gate
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.output_gate import backward, reference

    return Functions(reference.output_gate, backward.output_gate_backward)


def _triton() -> Functions:
    from zoo.common.ops.output_gate import backward, kernels

    return Functions(kernels.output_gate, backward.output_gate_backward)


CONTRACT = Contract(
    name="output_gate",
    version=1,
    shapes="x [R, H, E], gate [R, H, E] (heads may be strided) or x [R, D], gate [R, 1] -> like x, contiguous",
    reads={"x": PROGRAM, "gate": EITHER},
    rounds="once, from FP32, at the store",
    adds="x * (1 / (1 + exp(-gate))) in FP32",
    laws=("row", "place", "repeat"),
    backward="closed form in FP32, one rounding; a row's one gate adds its columns in FP32",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "single_round", "cuda", _triton, defining=True),
    ),
)


class _OutputGate(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.functions = provider.functions
        return provider.functions.forward(x, gate)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        return *functions.backward(grad, *ctx.saved_tensors), None


@observed(CONTRACT)
def output_gate(x: Tensor, gate: Tensor, *, program: Program) -> Tensor:
    """x * sigmoid(gate). ValueError unless the gate has x's shape or one column a row."""
    if gate.shape not in (x.shape, (x.shape[0], 1)):
        raise ValueError(f"output_gate: rows {tuple(x.shape)}, gate {tuple(gate.shape)}")
    return _OutputGate.run(x, gate, CONTRACT.provider(program))
