"""attention: causal grouped-query attention over packed or paged keys, one streaming softmax per key segment.

Sources: scaled dot-product attention, Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1; grouped heads, Ainslie et al. 2023 (arXiv
2305.13245), section 2.2; the streaming softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867), section 3, and FlashAttention-2, Dao 2023
(arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.history import KeyValues
from zoo.common.ops.contract import PROGRAM, Arguments, Cached, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program
from zoo.common.rows import Rows


def _fa4_serves(head_dim: int, query_heads: int, kv_heads: int) -> bool:
    return head_dim in (64, 128, 256)


def _shape(arguments: Arguments) -> tuple[int, ...]:
    _, heads, width = arguments["q_RHE"].shape
    return width, heads, arguments["history"].k.shape[-2]


def _cached(arguments: Arguments) -> dict[str, Cached]:
    return {"k": Cached(arguments["history"].k), "v": Cached(arguments["history"].v)}


class Functions(NamedTuple):
    """What a provider brings.

    forward   q_RHE, k, v, page_table_NB, rows, scale, segment
    backward  grad, q_RHE, k_RGE, v_RGE, out_RHE, lse_RH, rows, scale
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Rows, float, int | None], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Rows, float], tuple[Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.attention import reference

    return Functions(reference.attention, reference.attention_backward)


def _fa4() -> Functions:
    from zoo.common.ops.attention import kernels

    return Functions(kernels.attention_fa4, kernels.attention_backward)


def _split_kv() -> Functions:
    from zoo.common.ops.attention import kernels

    return Functions(kernels.attention_split_kv, kernels.attention_backward)


CONTRACT = Contract(
    name="attention",
    version=2,
    shapes="q_RHE, keys and values packed [R, G, E] or paged [P, page, G, E] with a page table -> o_RHE; H a multiple of G",
    reads={"q_RHE": PROGRAM, "history.k": PROGRAM, "history.v": PROGRAM},
    rounds="probabilities to the program's dtype before the product with values; the output once; with key segments each segment's "
    "output too, before the left-to-right merge in FP32",
    adds="key tiles in one fixed direction inside a segment (FA4: downwards; reference: upwards), segments left to right (FA4: times "
    "exp(lse - the row's largest lse), an FMA each, one division; reference: two by two); one segment alone keeps its bytes",
    laws=("row", "split", "place", "shard", "repeat"),
    backward="flash backward from the saved output and log-sum-exp, deterministic order",
    launch="training reads packed rows, serving reads pages; decode runs all segments of a sequence side by side; a masked weight of 0 "
    "times a non-finite value is NaN, so values must be finite in every key tile that a row reads: later rows of its own sequence (CPU "
    "and CUDA), on CUDA a packed neighbour's too, and dead lanes of a page (pages are zeroed); on CUDA a score times scale times "
    "log2(e) must stay below 2^30 in size: beyond it FlashAttention 4's exponent of the largest score is wrong by a rounding's error",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("fa4", "fa4", "cuda", _fa4, needs=("flash_attn.cute",), serves=_fa4_serves, defining=True),
        Provider("split_kv", "split_kv", "cuda", _split_kv, needs=("flash_attn.cute",), serves=_fa4_serves, defining=True),
    ),
    shape=_shape,
    history="history",
    cached=_cached,
)


class _Attention(OpFunction):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, rows: Rows, scale: float, segment: int | None, provider: Provider
    ) -> Tensor:
        out, lse = provider.functions.forward(q, k, v, table, rows, scale, segment)
        if table is None:
            ctx.save_for_backward(q, k, v, out, lse)
        ctx.rows = rows
        ctx.scale = scale
        ctx.segment = segment
        ctx.functions = provider.functions
        return out

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        q, k, v, out, lse = ctx.saved_tensors
        grads = functions.backward(grad, q, k, v, out, lse, ctx.rows, ctx.scale)
        return *grads, None, None, None, None, None


@observed(CONTRACT)
def attention(q_RHE: Tensor, history: KeyValues, rows: Rows, scale: float, *, program: Program) -> Tensor:
    """softmax(q k^T * scale) v over each row's own sequence up to its own position.

    ValueError if the query heads are not a multiple of the key heads. Only packed keys carry a gradient.
    """
    heads = q_RHE.shape[1]
    kv_heads = history.k.shape[-2]
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {kv_heads} key heads")
    provider = CONTRACT.provider(program, _shape({"q_RHE": q_RHE, "history": history}))
    return _Attention.run(q_RHE, history.k, history.v, history.page_table_NB, rows, scale, program.key_segment(q_RHE.shape[2]), provider)
