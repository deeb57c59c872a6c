"""fp8_experts: each row through its chosen experts' SwiGLU, both products with E4M3 codes, a slot row per choice.

It is fp8_linear, swiglu and fp8_linear again, expert by expert.

Sources: routed experts, Shazeer et al. 2017 (arXiv 1701.06538); FP8 products, DeepSeek-V3 (arXiv 2412.19437), and the public DeepGEMM,
whose grouped product gives a row the bytes of its dense one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import FP8, INTEGERS, PROGRAM, WIDE, Arguments, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.ops.fp8_quantise import GROUP, ScaleRule
from zoo.common.ops.swiglu import check_limit
from zoo.common.program import Program


class Weights(NamedTuple):
    """The experts' codes, and their scales of blocks of 128 by 128."""

    gate_up_codes_X2FD: Tensor
    gate_up_scales_XBG: Tensor
    down_codes_XDF: Tensor
    down_scales_XBG: Tensor


def _serves(experts: int, hidden: int, intermediate: int) -> bool:
    return hidden % GROUP == 0 and intermediate % GROUP == 0


def _shape(arguments: Arguments) -> tuple[int, ...]:
    count, hidden, intermediate = arguments["down_codes_XDF"].shape
    return count, hidden, intermediate


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RD, experts_RK, weights, rule, limit
    backward  grad_RKD, x_RD, experts_RK, weights, rule, limit
    """

    forward: Callable[[Tensor, Tensor, Weights, ScaleRule, float | None], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Weights, ScaleRule, float | None], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.fp8_experts import reference

    return Functions(reference.fp8_experts, reference.fp8_experts_backward)


def _deepgemm() -> Functions:
    from zoo.common.ops.fp8_experts import kernels

    return Functions(kernels.fp8_experts, kernels.fp8_experts_backward)


CONTRACT = Contract(
    name="fp8_experts",
    version=1,
    shapes="x_RD, experts_RK; codes of X experts, gate over up [X, 2F, D] and down [X, D, F], and their scales of blocks -> [R, K, D]",
    reads={
        "x_RD": PROGRAM,
        "experts_RK": INTEGERS,
        "gate_up_codes_X2FD": FP8,
        "gate_up_scales_XBG": WIDE,
        "down_codes_XDF": FP8,
        "down_scales_XBG": WIDE,
    },
    rounds="x to codes by fp8_quantise; gate and up once each; swiglu once, then to codes; the slot row once",
    adds="both products as fp8_linear",
    laws=("row", "place", "fusion", "shard", "repeat"),
    backward="straight through both quantisers, with weights dequantised to x's dtype; slots of a row added in FP32 by slot; the codes are "
    "frozen",
    launch="pairs sorted by expert, each expert's rows padded to DeepGEMM's tile; no other shape is served on CUDA than its own",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("deepgemm", "deepgemm_fp8", "cuda", _deepgemm, needs=("deep_gemm",), serves=_serves, defining=True),
    ),
    shape=_shape,
)


class _Fp8Experts(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        chosen: Tensor,
        gate_up_codes: Tensor,
        gate_up_scales: Tensor,
        down_codes: Tensor,
        down_scales: Tensor,
        rule: ScaleRule,
        limit: float | None,
        provider: Provider[Functions],
    ) -> Tensor:
        ctx.save_for_backward(x, chosen, gate_up_codes, gate_up_scales, down_codes, down_scales)
        ctx.rule = rule
        ctx.limit = limit
        ctx.functions = provider.functions
        return provider.functions.forward(x, chosen, Weights(gate_up_codes, gate_up_scales, down_codes, down_scales), rule, limit)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        x, chosen, gate_up_codes, gate_up_scales, down_codes, down_scales = ctx.saved_tensors
        weights = Weights(gate_up_codes, gate_up_scales, down_codes, down_scales)
        return functions.backward(grad, x, chosen, weights, ctx.rule, ctx.limit), None, None, None, None, None, None, None, None


@observed(CONTRACT)
def fp8_experts(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_codes_X2FD: Tensor,
    gate_up_scales_XBG: Tensor,
    down_codes_XDF: Tensor,
    down_scales_XBG: Tensor,
    rule: ScaleRule,
    *,
    program: Program,
    limit: float | None = None,
) -> Tensor:
    """slots_RKD[r, s] = down_e swiglu(gate_up_e x_r) with e = experts_RK[r, s]. `rule` is that of the scales of rows.

    ValueError if widths differ, for scales of other blocks than 128 by 128, for an intermediate width that is no multiple of 128, where
    a block would be gate in part and up in part, or for a limit that is not positive.
    """
    check_limit("fp8_experts", limit)
    count, hidden, intermediate = down_codes_XDF.shape
    if tuple(gate_up_codes_X2FD.shape) != (count, 2 * intermediate, hidden) or x_RD.shape[-1] != hidden:
        raise ValueError(
            f"fp8_experts: x has {x_RD.shape[-1]} columns, gate and up are {list(gate_up_codes_X2FD.shape)}, down is "
            f"{[count, hidden, intermediate]}"
        )
    if intermediate % GROUP:
        raise ValueError(f"fp8_experts: an intermediate width of {intermediate} is no multiple of {GROUP}, the rows of a block")
    for name, codes, scales in (
        ("gate and up", gate_up_codes_X2FD, gate_up_scales_XBG),
        ("down", down_codes_XDF, down_scales_XBG),
    ):
        wanted = (count, -(-codes.shape[1] // GROUP), -(-codes.shape[2] // GROUP))
        if tuple(scales.shape) != wanted:
            raise ValueError(f"fp8_experts: {name} of {list(codes.shape)} have scales {list(wanted)}, not {list(scales.shape)}")
    provider = CONTRACT.provider(program, (count, hidden, intermediate))
    return _Fp8Experts.run(
        x_RD,
        experts_RK,
        gate_up_codes_X2FD,
        gate_up_scales_XBG,
        down_codes_XDF,
        down_scales_XBG,
        rule,
        limit,
        provider,
    )
