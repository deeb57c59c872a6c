"""head_linear: every head's rows through a weight of its own, in linear's order.

Source: the per-head key and value matrices of multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, applied to
queries and outputs instead of to every cached row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Arguments, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


def _shape(arguments: Arguments) -> tuple[int, ...]:
    return tuple(arguments["weight_HNK"].shape)


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RHK, weight_HNK
    backward  grad_RHN, x_RHK, weight_HNK
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.head_linear import reference

    return Functions(reference.head_linear, reference.head_linear_backward)


def _triton() -> Functions:
    from zoo.common.ops.head_linear import kernels

    return Functions(kernels.head_linear, kernels.head_linear_backward)


CONTRACT = Contract(
    name="head_linear",
    version=1,
    shapes="x_RHK, weight_HNK, both the program's dtype and any strides -> y_RHN in that dtype",
    reads={"x_RHK": PROGRAM, "weight_HNK": PROGRAM},
    rounds="once, from FP32, at the store",
    adds="as linear with one part, head by head: K ascending in one FP32 accumulator",
    laws=("row", "column", "place", "shard", "fusion", "repeat"),
    backward="linear's, head by head",
    launch="one program a head and tile of rows and columns; a weight may be read transposed where it lies",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "fixed_k", "cuda", _triton, defining=True),
    ),
    shape=_shape,
)


class _HeadLinear(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.functions = provider.functions
        return provider.functions.forward(x, weight)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        return *functions.backward(grad, *ctx.saved_tensors), None


@observed(CONTRACT)
def head_linear(x_RHK: Tensor, weight_HNK: Tensor, *, program: Program) -> Tensor:
    """y_RHN[:, h] = x_RHK[:, h] weight_HNK[h]^T. ValueError if heads or widths differ."""
    if x_RHK.shape[1] != weight_HNK.shape[0] or x_RHK.shape[2] != weight_HNK.shape[2]:
        raise ValueError(f"head_linear: x has heads and columns {tuple(x_RHK.shape[1:])}, the weight is {tuple(weight_HNK.shape)}")
    provider = CONTRACT.provider(program, _shape({"weight_HNK": weight_HNK}))
    return _HeadLinear.run(x_RHK, weight_HNK, provider)
