"""causal_conv: a short depthwise convolution over each sequence's rows, and SiLU.

Sources: the short convolution of Mamba, Gu and Dao 2023 (arXiv 2312.00752), section 3.4, as Gated DeltaNet puts it before its heads
(arXiv 2412.06464, section 3.4); transformers' `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.history import ConvCarry, PackedDelta
from zoo.common.ops.causal_conv.witness import CarryWitness
from zoo.common.ops.contract import PROGRAM, Arguments, Contract, OpFunction, Provider, Witness, closed_form, observed
from zoo.common.program import Program
from zoo.common.rows import Rows

CARRY = 3  # rows that a sequence hands on: those before the newest under a filter of 4 taps


def _witness(arguments: Arguments, document: slice) -> Witness:
    return CarryWitness(arguments["x_RC"].detach()[document], CARRY)


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RC, weight_C4, carry, slots_N, rows
    backward  grad, x_RC, weight_C4, carry, rows
    advance   x_RC, carry_SWC, slots_N, rows
    """

    forward: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Rows], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Rows], tuple[Tensor, Tensor, Tensor | None]]
    advance: Callable[[Tensor, Tensor, Tensor, Rows], None]


def _reference() -> Functions:
    from zoo.common.ops.causal_conv import backward, reference

    return Functions(reference.causal_conv, backward.causal_conv_backward, reference.advance)


def _triton() -> Functions:
    from zoo.common.ops.causal_conv import backward, kernels

    return Functions(kernels.causal_conv, backward.causal_conv_backward, kernels.advance)


CONTRACT = Contract(
    name="causal_conv",
    version=1,
    shapes="x_RC (rows may be strided), weight_C4, the three rows before each sequence's first (zeros at a document's start) -> [R, C]",
    reads={"x_RC": PROGRAM, "weight_C4": PROGRAM},
    rounds="once, from FP32, after SiLU",
    adds="taps oldest first: ((x[-3] w0 + x[-2] w1) + x[-1] w2) + x[0] w3, products rounded; y / (1 + exp(-y))",
    laws=("row", "column", "split", "place", "shard", "repeat"),
    backward="closed form in FP32; the weight's gradient adds rows in FP32; documents don't mix",
    launch="16 rows a program, one in decode; training reads its packed rows; serving also reads and writes three carried rows a sequence",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "single_round", "cuda", _triton, defining=True),
    ),
    history="history",
    witness=_witness,
)


class _CausalConv(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        carry: Tensor | None,
        slots: Tensor | None,
        rows: Rows,
        provider: Provider[Functions],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, carry)
        ctx.rows = rows
        ctx.functions = provider.functions
        return provider.functions.forward(x, weight, carry, slots, rows)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        x, weight, carry = ctx.saved_tensors
        return *functions.backward(grad, x, weight, carry, ctx.rows), None, None, None


def _check(x_RC: Tensor, weight_C4: Tensor, history: ConvCarry | PackedDelta, rows: Rows) -> None:
    channels = x_RC.shape[1]
    sequences = rows.starts_N1.shape[0] - 1
    if weight_C4.shape != (channels, 4):
        raise ValueError(f"causal_conv: rows of {channels} channels, a weight of shape {tuple(weight_C4.shape)}")
    if x_RC.shape[0] != rows.count:
        raise ValueError(f"causal_conv: x has {x_RC.shape[0]} rows, there are {rows.count}")
    if isinstance(history, PackedDelta):
        carry = history.carry_NWC
        needed = (sequences, CARRY, channels)
    else:
        carry = history.rows_SWC
        needed = (history.rows_SWC.shape[0], CARRY, channels)
        if history.slot_N.shape != (sequences,):
            raise ValueError(f"causal_conv: slots {tuple(history.slot_N.shape)} for {sequences} sequences")
    if carry is not None and (carry.shape != needed or carry.dtype != x_RC.dtype):
        raise ValueError(f"causal_conv: carried rows {tuple(carry.shape)} of {carry.dtype}, the rows need {needed} of {x_RC.dtype}")
    if isinstance(history, ConvCarry) and not history.rows_SWC.is_contiguous():  # it is written in place
        strides = history.rows_SWC.stride()
        dense = (CARRY * channels, channels, 1)
        raise ValueError(f"causal_conv: a pool of carried rows must be contiguous, of strides {dense}, not {strides}")


@observed(CONTRACT)
def causal_conv(x_RC: Tensor, weight_C4: Tensor, history: ConvCarry | PackedDelta, rows: Rows, *, program: Program) -> Tensor:
    """silu(conv(x)). A `ConvCarry`'s slots advance in place.

    Gradients are for whole documents and for parts of them, then also of the rows that a `PackedDelta` carries in. ValueError,
    naming both sides, if the weight is not [C, 4], x has not the rows' count, what is carried is not three rows of C channels in
    x's dtype for each sequence, or a `ConvCarry`'s pool is not contiguous.
    """
    _check(x_RC, weight_C4, history, rows)
    provider = CONTRACT.provider(program)
    if isinstance(history, PackedDelta):
        return _CausalConv.run(x_RC, weight_C4, history.carry_NWC, None, rows, provider)
    y = _CausalConv.run(x_RC, weight_C4, history.rows_SWC, history.slot_N, rows, provider)
    provider.functions.advance(x_RC, history.rows_SWC, history.slot_N, rows)
    return y
