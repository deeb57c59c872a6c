"""hadamard: the rotation by Sylvester's Hadamard matrix over E^0.5, which spreads every column over all of a head's.

DeepSeek-V4's index turns queries and keys so before they become codes.

Source: Ashkboos et al. 2024 (arXiv 2404.00456), section 3; `rotate_activation` of DeepSeek-V4's published `inference/model.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward  x_RE: also the backward, the matrix is its own transpose
    """

    forward: Callable[[Tensor], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.hadamard import reference

    return Functions(reference.hadamard)


def _triton() -> Functions:
    from zoo.common.ops.hadamard import kernels

    return Functions(kernels.hadamard)


CONTRACT = Contract(
    name="hadamard",
    version=1,
    shapes="x [..., E] -> [..., E], E a power of two; column c of the result is the sum over d of (-1)^(ones in c & d) x_d, over E^0.5",
    reads={"x": PROGRAM},
    rounds="once, from FP32, at the store",
    adds="in FP32, stage by stage: columns that are 1 apart, then 2, 4 and on become their sum and difference; last times FP32 E^-0.5",
    laws=("row", "place", "repeat"),
    backward="the same rotation",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "stages", "cuda", _triton, defining=True),
    ),
)


class _Hadamard(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, provider: Provider[Functions]) -> Tensor:
        ctx.functions = provider.functions
        return provider.functions.forward(x.flatten(0, -2)).view(x.shape)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        return functions.forward(grad.flatten(0, -2)).view(grad.shape), None


@observed(CONTRACT)
def hadamard(x: Tensor, *, program: Program) -> Tensor:
    """Turns the last dimension. ValueError for a width that is no power of two."""
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"hadamard: a width must be a power of two, it is {width}")
    out: Tensor = _Hadamard.run(x, CONTRACT.provider(program))
    return out
