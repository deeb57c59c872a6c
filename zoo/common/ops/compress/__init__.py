"""compress: one row for every few tokens of a sequence, each of its channels a softmax-weighted mean of them.

Sources: the token compression of Native Sparse Attention, Yuan et al. 2025 (arXiv 2502.11089), section 3.3.1, with weights of the
tokens' own; transformers' `DeepseekV4HCACompressor` and `DeepseekV4CSACompressor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.history import OpenWindows, WholeWindows
from zoo.common.ops.compress.windows import Window, WindowWitness
from zoo.common.ops.contract import WIDE, Arguments, Contract, OpFunction, Provider, Witness, closed_form, observed
from zoo.common.program import Program
from zoo.common.rows import Rows


def _witness(arguments: Arguments, document: slice) -> Witness:
    history = arguments["history"]
    return WindowWitness(arguments["rows_RC"].detach()[document], _window(arguments), history.name)


def _window(arguments: Arguments) -> Window:
    tokens, columns = arguments["ape_WP"].shape
    return Window(tokens, columns > arguments["width"])


def _shape(arguments: Arguments) -> tuple[int, ...]:
    return (*arguments["ape_WP"].shape, arguments["width"])


class Functions(NamedTuple):
    """What a provider brings.

    forward   rows_RC, ape_WP, history, rows, window, dtype
    backward  grad_RE, rows_RC, ape_WP, rows, window
    advance   rows_RC, history, rows, window
    """

    forward: Callable[[Tensor, Tensor, OpenWindows | WholeWindows, Rows, Window, torch.dtype], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Rows, Window], tuple[Tensor, Tensor]]
    advance: Callable[[Tensor, OpenWindows, Rows, Window], None]


def _reference() -> Functions:
    from zoo.common.ops.compress import backward, reference

    return Functions(reference.compress, backward.compress_backward, reference.advance)


def _triton() -> Functions:
    from zoo.common.ops.compress import backward, kernels

    return Functions(kernels.compress, backward.compress_backward, kernels.advance)


CONTRACT = Contract(
    name="compress",
    version=1,
    shapes="rows_RC in FP32: P columns of values, then P of gates; ape_WP in FP32 by the position in a window of W tokens -> [R, width] "
    "in the program's dtype, pooled rows where a token completes a window and zeros elsewhere. P = width: a window pools its own "
    "tokens; P = 2 width: also the tokens of the window before, whose part are the first halves, its own are the second",
    reads={"rows_RC": WIDE, "ape_WP": WIDE},
    rounds="once, from FP32, at the store",
    adds="gate + ape; over a window's tokens, ascending, channel by channel: exp(gate - the largest), the adjacent-pair tree of them and "
    "of their products with the values, rounded one by one; one division. Tokens before a sequence's first are left out by a select",
    laws=("row", "split", "place", "repeat"),
    backward="closed form in FP32 for whole documents, to rows and ape; a token of overlapping windows adds its two parts",
    launch="training reads its packed rows; serving also reads and writes a slot with the rows of the open window, and of the one before "
    "where windows overlap; rows that complete nothing cost nothing",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
    shape=_shape,
    history="history",
    witness=_witness,
)


class _Compress(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RC: Tensor,
        ape: Tensor,
        history: OpenWindows | WholeWindows,
        rows: Rows,
        window: Window,
        dtype: torch.dtype,
        provider: Provider[Functions],
    ) -> Tensor:
        ctx.save_for_backward(rows_RC, ape)
        ctx.rows = rows
        ctx.window = window
        ctx.functions = provider.functions
        return provider.functions.forward(rows_RC, ape, history, rows, window, dtype)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        rows_RC, ape = ctx.saved_tensors
        grads = functions.backward(grad, rows_RC, ape, ctx.rows, ctx.window)
        return *grads, None, None, None, None, None


@observed(CONTRACT)
def compress(rows_RC: Tensor, ape_WP: Tensor, history: OpenWindows | WholeWindows, rows: Rows, width: int, *, program: Program) -> Tensor:
    """[R, width]. The slots of `OpenWindows` advance in place; only whole documents carry a gradient.

    ValueError if the widths, the row count or what the slots hold don't fit.
    """
    columns = ape_WP.shape[1]
    if columns not in (width, 2 * width) or rows_RC.shape[1] != 2 * columns:
        raise ValueError(f"compress: rows of {rows_RC.shape[1]} columns, ape of {columns}, pooled rows of {width}")
    if rows_RC.shape[0] != rows.count:
        raise ValueError(f"compress: {rows_RC.shape[0]} rows are given, there are {rows.count}")
    arguments = {"ape_WP": ape_WP, "width": width}
    window = _window(arguments)
    if isinstance(history, OpenWindows):
        needed = (window.held, rows_RC.shape[1])
        if history.rows_SWC.shape[1:] != needed or history.rows_SWC.dtype != rows_RC.dtype:
            found = tuple(history.rows_SWC.shape[1:])
            raise ValueError(f"compress: slots hold {found} of {history.rows_SWC.dtype}, the rows need {needed} of {rows_RC.dtype}")
    provider = CONTRACT.provider(program, _shape(arguments))
    out = _Compress.run(rows_RC, ape_WP, history, rows, window, program.torch_dtype, provider)
    if isinstance(history, OpenWindows):
        provider.functions.advance(rows_RC, history, rows, window)
    return out
