"""delta_gate: a Gated DeltaNet head's log-decay and write strength from its two small projections.

Sources: log-decay -exp(A_log) softplus(a + dt_bias) as in Mamba-2, Dao and Gu 2024 (arXiv 2405.21060), and beta = sigmoid(b) of the
gated delta rule (arXiv 2412.06464, section 3.1); transformers' `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   a_RV, b_RV, a_log_V, dt_bias_V
    backward  grad_decay_RV, grad_beta_RV, a_RV, b_RV, a_log_V, dt_bias_V
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.delta_gate import backward, reference

    return Functions(reference.delta_gate, backward.delta_gate_backward)


def _triton() -> Functions:
    from zoo.common.ops.delta_gate import backward, kernels

    return Functions(kernels.delta_gate, backward.delta_gate_backward)


CONTRACT = Contract(
    name="delta_gate",
    version=1,
    shapes="a_RV, b_RV (the program's dtype, rows may be strided), A_log_V, dt_bias_V -> log_decay_RV, beta_RV, both FP32",
    reads={"a_RV": PROGRAM, "b_RV": PROGRAM, "a_log_V": WIDE, "dt_bias_V": WIDE},
    rounds="never: FP32 from the loaded values on",
    adds="log_decay = -exp(A_log) * softplus(a + dt_bias), softplus(x) = max(x, 0) + log1p(exp(-|x|)); beta = 1 / (1 + exp(-b))",
    laws=("row", "place", "shard", "repeat"),
    backward="closed form in FP32; the two vectors' gradients add rows in FP32",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "fp32", "cuda", _triton, defining=True),
    ),
)


class _DeltaGate(OpFunction):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, provider: Provider[Functions]) -> Any:
        ctx.save_for_backward(a, b, a_log, dt_bias)
        ctx.functions = provider.functions
        return provider.functions.forward(a, b, a_log, dt_bias)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad_decay: Tensor, grad_beta: Tensor) -> Any:
        functions: Functions = ctx.functions
        return *functions.backward(grad_decay, grad_beta, *ctx.saved_tensors), None


@observed(CONTRACT)
def delta_gate(a_RV: Tensor, b_RV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor, *, program: Program) -> tuple[Tensor, Tensor]:
    """(log_decay_RV <= 0, beta_RV in 0 .. 1). ValueError if the heads disagree."""
    if not a_RV.shape[1] == b_RV.shape[1] == a_log_V.shape[0] == dt_bias_V.shape[0]:
        raise ValueError(f"delta_gate: {a_RV.shape[1]}, {b_RV.shape[1]}, {a_log_V.shape[0]} and {dt_bias_V.shape[0]} heads differ")
    return _DeltaGate.run(a_RV, b_RV, a_log_V, dt_bias_V, CONTRACT.provider(program))
