"""fp8_quantise: E4M3 codes of rows in groups of 128 columns, and a scale for each group.

Sources: E4M3, Micikevicius et al. 2022 (arXiv 2209.05433), section 3; groups of 128 with FP32 scales, DeepSeek-V3 (arXiv 2412.19437),
section 3.3.2. DeepSeek-V4 and its kernels round scales up to powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.ops.fp8_quantise.reference import GROUP
from zoo.common.program import Program

__all__ = ["CONTRACT", "FP32_SCALES", "GROUP", "POWERS_OF_TWO", "Codes", "Functions", "ScaleRule", "fp8_quantise"]


@dataclass(frozen=True)
class ScaleRule:
    """How a group's scale comes from its largest absolute value.

    floor         the least that this value is taken for
    power_of_two  whether the scale, value / 448, is rounded up to a power of two
    """

    floor: float
    power_of_two: bool


FP32_SCALES = ScaleRule(floor=1e-10, power_of_two=False)  # GLM's checkpoints, as SGLang serves them
POWERS_OF_TWO = ScaleRule(floor=1e-4, power_of_two=True)  # DeepSeek-V4


class Codes(NamedTuple):
    """codes_RK float8_e4m3fn, scales_RG float32: a value is about its code times its group's scale."""

    codes_RK: Tensor
    scales_RG: Tensor


class Functions(NamedTuple):
    """What a provider brings.

    forward  x_RK, floor, power_of_two
    """

    forward: Callable[[Tensor, float, bool], tuple[Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.fp8_quantise import reference

    return Functions(reference.fp8_quantise)


def _triton() -> Functions:
    from zoo.common.ops.fp8_quantise import kernels

    return Functions(kernels.fp8_quantise)


CONTRACT = Contract(
    name="fp8_quantise",
    version=1,
    shapes="x_RK -> codes_RK float8_e4m3fn and scales_RG float32, G = ceil(K / 128); the last group may be narrower",
    reads={"x_RK": PROGRAM},
    rounds="the scale once in FP32, max(|x|, floor) / 448 (then up to a power of two where the rule says so); the code once, from the "
    "FP32 quotient x / scale cut to +-448, to the nearest E4M3 value, ties to even",
    adds="nothing: the largest absolute value of a group has no order",
    laws=("row", "place", "repeat"),
    backward="none: codes have no gradient, and fp8_linear goes straight through them",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "nearest", "cuda", _triton, defining=True),
    ),
)


class _Quantise(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: ScaleRule, provider: Provider[Functions]) -> tuple[Tensor, Tensor]:
        codes, scales = provider.functions.forward(x, rule.floor, rule.power_of_two)
        ctx.mark_non_differentiable(codes, scales)
        return codes, scales

    @staticmethod
    @closed_form
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None


@observed(CONTRACT)
def fp8_quantise(x_RK: Tensor, rule: ScaleRule, *, program: Program) -> Codes:
    """Codes and scales of every row's groups of 128 columns. A NaN or an infinity makes its own group NaN and no other."""
    return Codes(*_Quantise.run(x_RK, rule, CONTRACT.provider(program)))
