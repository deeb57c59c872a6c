"""compressed_attention: each row's heads over chosen compressed rows, the newest tokens and a sink, in one softmax.

Sources: the branches of Native Sparse Attention, Yuan et al. 2025 (arXiv 2502.11089), section 3.3, in one softmax; sinks as learned logits
without a value as in gpt-oss (arXiv 2508.10925), section 2.3; keys that are also the values as transformers' `DeepseekV4Attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.history import WindowedRows
from zoo.common.ops.compressed_select import complete_rows
from zoo.common.ops.contract import INTEGERS, PROGRAM, WIDE, Arguments, Cached, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program
from zoo.common.rows import Rows


def _shape(arguments: Arguments) -> tuple[int, ...]:
    _, heads, width = arguments["q_RHE"].shape
    return width, heads


def _cached(arguments: Arguments) -> dict[str, Cached]:
    history = arguments["history"]
    found = {"window": Cached(history.window)}
    if history.compressed is not None:
        found[history.name] = complete_rows(history.compressed, history.tokens, arguments["rows"])
    return found


class Functions(NamedTuple):
    """What a provider brings.

    forward   q_RHE, history, chosen_RK, sinks_H, rows, window, scale
    backward  grad_RHE, q_RHE, window_RE, compressed_RE, sinks_H, chosen_RK, out_RHE, lse_RH, tokens, rows, window, scale
    """

    forward: Callable[[Tensor, WindowedRows, Tensor | None, Tensor, Rows, int, float], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor, int, Rows, int, float],
        tuple[Tensor, Tensor, Tensor | None, Tensor],
    ]


def _reference() -> Functions:
    from zoo.common.ops.compressed_attention import backward, reference

    return Functions(reference.compressed_attention, backward.compressed_attention_backward)


def _triton() -> Functions:
    from zoo.common.ops.compressed_attention import backward, kernels

    return Functions(kernels.compressed_attention, backward.compressed_attention_backward)


CONTRACT = Contract(
    name="compressed_attention",
    version=1,
    shapes="q_RHE; rows that are keys and values alike: one a token and one for every W tokens, packed [R, E] or paged with a page table; "
    "chosen_RK (int32 places among the compressed rows, ascending, -1 behind the last; none: all that are complete); sinks_H in FP32 -> "
    "o_RHE",
    reads={"q_RHE": PROGRAM, "history.window": PROGRAM, "history.compressed": PROGRAM, "chosen_RK": INTEGERS, "sinks_H": WIDE},
    rounds="probabilities to the program's dtype before the product with values; the output once",
    adds="sparse_attention's tiles of 64 lanes: first the compressed rows, ascending, the last tile's spare lanes empty, then the window's "
    "tokens, ascending, from its first one on; last the sink, which joins the denominator alone: mass and values times exp(peak - top), "
    "plus exp(sink - top), top the larger of the two; one division",
    laws=("row", "split", "place", "shard", "repeat"),
    backward="closed form in FP32 from the saved log-sum-exp, query rows in blocks, so a row's gradient adds in row order; a row's part as "
    "a key and its part as a value are added before the one rounding",
    launch="one pass over the whole list; heads are the matrix rows of a tile, so a row never sees another: prefill is decode, many at "
    "once; lanes without a row read nothing and change nothing",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "list_tiles", "cuda", _triton, defining=True),
    ),
    shape=_shape,
    history="history",
    cached=_cached,
)


class _CompressedAttention(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        token_rows: Tensor,
        compressed: Tensor | None,
        sinks: Tensor,
        history: WindowedRows,
        chosen: Tensor | None,
        rows: Rows,
        window: int,
        scale: float,
        provider: Provider[Functions],
    ) -> Tensor:
        out, lse = provider.functions.forward(q, history, chosen, sinks, rows, window, scale)
        if history.packed:
            ctx.save_for_backward(q, token_rows, compressed, sinks, chosen, out, lse)
        ctx.tokens = history.tokens
        ctx.rows = rows
        ctx.window = window
        ctx.scale = scale
        ctx.functions = provider.functions
        return out

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        q, token_rows, compressed, sinks, chosen, out, lse = ctx.saved_tensors
        leaves = (q, token_rows, compressed, sinks, chosen, out, lse)
        found = functions.backward(grad, *leaves, ctx.tokens, ctx.rows, ctx.window, ctx.scale)
        return *found, None, None, None, None, None, None


@observed(CONTRACT)
def compressed_attention(
    q_RHE: Tensor,
    history: WindowedRows,
    chosen_RK: Tensor | None,
    sinks_H: Tensor,
    rows: Rows,
    window: int,
    scale: float,
    *,
    program: Program,
) -> Tensor:
    """softmax(q k^T * scale, sink) v over the compressed rows listed for each row, or all of them, and the `window` newest tokens, its
    own among them. ValueError if heads, widths or rows differ. Only packed rows carry a gradient.
    """
    count, heads, width = q_RHE.shape
    if width != history.window.shape[-1]:
        raise ValueError(f"compressed_attention: queries of {width} columns, rows of {history.window.shape[-1]}")
    if history.compressed is not None and history.compressed.shape[-1] != width:
        raise ValueError(f"compressed_attention: queries of {width} columns, compressed rows of {history.compressed.shape[-1]}")
    if sinks_H.shape != (heads,):
        raise ValueError(f"compressed_attention: {heads} heads, sinks of shape {tuple(sinks_H.shape)}")
    if chosen_RK is not None and (chosen_RK.shape[0] != count or chosen_RK.dtype != torch.int32):
        raise ValueError(f"compressed_attention: choices are int32 of {count} rows, not {chosen_RK.dtype} of {chosen_RK.shape[0]}")
    if window < 1:
        raise ValueError(f"compressed_attention: a window of {window} tokens, it has at least 1")
    provider = CONTRACT.provider(program, _shape({"q_RHE": q_RHE}))
    leaves = (q_RHE, history.window, history.compressed, sinks_H)
    return _CompressedAttention.run(*leaves, history, chosen_RK, rows, window, scale, provider)
