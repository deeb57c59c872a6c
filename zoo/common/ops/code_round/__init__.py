"""code_round: columns as codes of few bits with a scale for each group would hold them, in the dtype that they came in.

Cached rows and index keys of DeepSeek-V4 are trained and served so.

Source: scales shared by a group, Rouhani et al. 2023 (arXiv 2310.10537), section 5; the roundings are those of `act_quant` and
`fp4_act_quant` with `inplace` in DeepSeek-V4's published `inference/kernel.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


@dataclass(frozen=True)
class Grid:
    """Codes and their scales.

    group     columns with one scale
    mantissa  bits of a code's mantissa
    least     exponent of the least normal code; below it codes are evenly spaced
    largest   largest code
    floor     the least that a group's largest absolute value is taken for
    """

    group: int
    mantissa: int
    least: int
    largest: float
    floor: float


FP8_ROWS = Grid(64, 3, -6, 448.0, 1e-4)  # E4M3: a row of keys and values
FP4_INDEX = Grid(32, 1, 0, 6.0, 6 * 2.0**-126)  # E2M1: queries and keys of an index


class Functions(NamedTuple):
    """What a provider brings.

    forward  x_RE, columns, grid
    """

    forward: Callable[[Tensor, int, Grid], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.code_round import reference

    return Functions(reference.code_round)


def _triton() -> Functions:
    from zoo.common.ops.code_round import kernels

    return Functions(kernels.code_round)


CONTRACT = Contract(
    name="code_round",
    version=1,
    shapes="x [..., E] -> [..., E]; the first `columns` columns in groups from the left, the last of which may be narrower; the others "
    "pass through",
    reads={"x": PROGRAM},
    rounds="the scale, max(|x|, floor) / largest, up to a power of two; the code once, from the FP32 quotient x / scale cut to +-largest, "
    "to the nearest, ties to even, a zero keeps its sign; code x scale at the store, exact but at the dtype's ends",
    adds="nothing: the largest absolute value of a group has no order",
    laws=("row", "place", "repeat"),
    backward="straight through: dx = dy",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "nearest", "cuda", _triton, defining=True),
    ),
)


class _CodeRound(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int, grid: Grid, provider: Provider[Functions]) -> Tensor:
        return provider.functions.forward(x.flatten(0, -2), columns, grid).view(x.shape)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None


@observed(CONTRACT)
def code_round(x: Tensor, columns: int, grid: Grid, *, program: Program) -> Tensor:
    """The first `columns` columns as their codes' values. A NaN or an infinity makes its own group NaN and no other.

    ValueError for more columns than there are, or none.
    """
    if not 0 < columns <= x.shape[-1]:
        raise ValueError(f"code_round: {columns} columns of rows of {x.shape[-1]}")
    out: Tensor = _CodeRound.run(x, columns, grid, CONTRACT.provider(program))
    return out
