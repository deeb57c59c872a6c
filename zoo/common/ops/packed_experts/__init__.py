"""packed_experts: the experts op on weights of four bits, E2M1 codes with E8M0 scales (MXFP4). Activations keep the program's dtype.

A product of code and scale is exact in BF16, so this is the experts op on the dequantised weights, to the last byte. Weights are frozen.

Sources: the formats, Rouhani et al. 2023 (arXiv 2310.10537) and the OCP's Microscaling Formats (MX) 1.0; the arithmetic is that of
`zoo.common.ops.experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import EXPONENTS, INTEGERS, PACKED, PROGRAM, Arguments, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.ops.e2m1 import GROUP
from zoo.common.ops.swiglu import check_limit
from zoo.common.program import Program


def _deepgemm_serves(experts: int, hidden: int, intermediate: int) -> bool:
    return hidden % 64 == 0 and intermediate % 64 == 0


def _shape(arguments: Arguments) -> tuple[int, ...]:
    count, twice, bytes_a_row = arguments["gate_up_X2FC"].shape
    return count, 2 * bytes_a_row, twice // 2


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RD, experts_RK, gate_up_X2FC, gate_up_scales_X2FG, down_XDC, down_scales_XDG, limit
    backward  grad_RKD, x_RD, experts_RK, gate_up_X2FC, gate_up_scales_X2FG, down_XDC, down_scales_XDG, limit -> grad_x_RD
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.packed_experts import reference

    return Functions(reference.packed_experts, reference.packed_experts_backward)


def _deepgemm() -> Functions:
    from zoo.common.ops.packed_experts import kernels

    return Functions(kernels.packed_experts_deepgemm, kernels.packed_experts_backward)


def _triton() -> Functions:
    from zoo.common.ops.packed_experts import kernels

    return Functions(kernels.packed_experts_triton, kernels.packed_experts_backward)


CONTRACT = Contract(
    name="packed_experts",
    version=1,
    shapes="x_RD, experts_RK, gate_up_X2FC int8 of two codes (gate first, C = D / 2) with gate_up_scales_X2FG float8_e8m0fnu (G = D / 32), "
    "down_XDC (C = F / 2) with down_scales_XDG (G = F / 32) -> slots_RKD in the program's dtype",
    reads={
        "x_RD": PROGRAM,
        "experts_RK": INTEGERS,
        "gate_up_X2FC": PACKED,
        "gate_up_scales_X2FG": EXPONENTS,
        "down_XDC": PACKED,
        "down_scales_XDG": EXPONENTS,
    },
    rounds="weights never: code times scale is exact in BF16; gate_up once, swiglu (with its limit, where there is one) once, each slot "
    "row once: the experts contract",
    adds="K ascending in one FP32 accumulator, as linear does",
    laws=("row", "place", "fusion", "shard", "repeat"),
    backward="the experts contract's, of x alone; codes and scales are frozen",
    launch="rows sorted by expert; weights are dequantised inside the products, for many rows in a launch of their own before them",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("deepgemm", "fixed_k", "cuda", _deepgemm, needs=("deep_gemm",), serves=_deepgemm_serves),
        Provider("triton", "fixed_k", "cuda", _triton, defining=True),
    ),
    shape=_shape,
)


class _PackedExperts(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        gate_up_scales: Tensor,
        down: Tensor,
        down_scales: Tensor,
        limit: float | None,
        provider: Provider[Functions],
    ) -> Tensor:
        ctx.save_for_backward(x, chosen, gate_up, gate_up_scales, down, down_scales)
        ctx.limit = limit
        ctx.functions = provider.functions
        return provider.functions.forward(x, chosen, gate_up, gate_up_scales, down, down_scales, limit)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        x, chosen, gate_up, gate_up_scales, down, down_scales = ctx.saved_tensors
        grad_x = functions.backward(grad, x, chosen, gate_up, gate_up_scales, down, down_scales, ctx.limit)
        return grad_x, None, None, None, None, None, None, None


@observed(CONTRACT)
def packed_experts(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    *,
    program: Program,
    limit: float | None = None,
) -> Tensor:
    """slots_RKD[r, s] = down_e swiglu(gate_up_e x_r) with e = experts_RK[r, s], swiglu cut to `limit` where there is one.

    ValueError if the weights' or scales' shapes disagree, for rows that are no whole groups of 32, or for a limit that is not positive.
    """
    check_limit("packed_experts", limit)
    count, twice, bytes_a_row = gate_up_X2FC.shape
    hidden = 2 * bytes_a_row
    intermediate = twice // 2
    for what, width in (("hidden", hidden), ("intermediate", intermediate)):
        if width % GROUP:
            raise ValueError(f"packed_experts: {what} size {width} is no multiple of {GROUP}, the columns of a scale")
    wanted = {
        "gate_up_scales": (gate_up_scales_X2FG, (count, twice, hidden // GROUP)),
        "down": (down_XDC, (count, hidden, intermediate // 2)),
        "down_scales": (down_scales_XDG, (count, hidden, intermediate // GROUP)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"packed_experts: gate_up {tuple(gate_up_X2FC.shape)} needs {name} {shape}, got {tuple(tensor.shape)}")
    if x_RD.shape[1] != hidden:
        raise ValueError(f"packed_experts: rows of {x_RD.shape[1]} columns, experts of {hidden}")
    provider = CONTRACT.provider(program, (count, hidden, intermediate))
    return _PackedExperts.run(x_RD, experts_RK, gate_up_X2FC, gate_up_scales_X2FG, down_XDC, down_scales_XDG, limit, provider)
