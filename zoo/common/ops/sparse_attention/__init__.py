"""sparse_attention: each row's heads over the latent rows that were selected for it, one streaming softmax along the list.

Sources: DeepSeek Sparse Attention, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1, over the latent rows of multi-head latent attention,
DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.history import TokenRows
from zoo.common.ops.contract import INTEGERS, PROGRAM, Arguments, Cached, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program
from zoo.common.rows import Rows


def _shape(arguments: Arguments) -> tuple[int, ...]:
    _, heads, width = arguments["q_RHC"].shape
    return width, arguments["values"], heads


def _cached(arguments: Arguments) -> dict[str, Cached]:
    return {"latent": Cached(arguments["latent"].rows)}


class Functions(NamedTuple):
    """What a provider brings.

    forward   q_RHC, latent, page_table_NB, positions_RK, rows, values, scale
    backward  grad_RHV, q_RHC, latent_RC, positions_RK, out_RHV, lse_RH, rows, scale
    """

    forward: Callable[[Tensor, Tensor, Tensor | None, Tensor, Rows, int, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Rows, float], tuple[Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.sparse_attention import backward, reference

    return Functions(reference.sparse_attention, backward.sparse_attention_backward)


def _triton() -> Functions:
    from zoo.common.ops.sparse_attention import kernels, kernels_backward

    return Functions(kernels.sparse_attention, kernels_backward.sparse_attention_backward)


def _flash_mla() -> Functions:
    from zoo.common.ops.sparse_attention import kernels_flash_mla

    return Functions(kernels_flash_mla.sparse_attention, kernels_flash_mla.sparse_attention_backward)


def _flash_mla_serves(width: int, values: int, heads: int) -> bool:
    return width in (512, 576) and values == 512


CONTRACT = Contract(
    name="sparse_attention",
    version=2,
    shapes="q_RHC, latent rows packed [R, C] or paged [P, page, C] with a page table, positions_RK (int32, ascending, -1 behind the "
    "last) -> o_RHV; keys are whole rows, values their first V columns",
    reads={"q_RHC": PROGRAM, "latent.rows": PROGRAM, "positions_RK": INTEGERS},
    rounds="probabilities to the program's dtype before the product with values; the output once",
    adds="the list in tiles of 64 lanes, ascending: scores with C ascending in one FP32 accumulator, the row sum by the adjacent-pair tree "
    "over a tile, values in FP32 a tile after another, each behind the sum of those before times exp(their peak - the new one). CUDA, rows "
    "of 576 columns with values of 512: FlashMLA's own order, whose bytes of a row depend on its list alone",
    laws=("row", "split", "place", "shard", "repeat"),
    backward="closed form in FP32 from the saved log-sum-exp, query rows in blocks, so a latent row's gradient adds in row order. On CUDA "
    "probabilities and gradients of scores are rounded to the program's dtype as operands of products, and only listed rows are read",
    launch="one pass over the whole list; heads are the matrix rows of a tile, so a row never sees another: prefill is decode, many at "
    "once; lanes without a position read nothing and change nothing. FlashMLA takes 64 or 128 heads (others are padded with zeros) and "
    "places in one long row of tokens, packed or pages, made of the positions once for all layers that share a list",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "list_tiles", "cuda", _triton, defining=True),
        Provider(
            "flash_mla",
            "flash_mla",
            "cuda",
            _flash_mla,
            needs=("sgl_kernel.flashmla_ops",),
            serves=_flash_mla_serves,
            defining=True,
        ),
    ),
    shape=_shape,
    history="latent",
    cached=_cached,
)


class _SparseAttention(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        table: Tensor | None,
        positions: Tensor,
        rows: Rows,
        values: int,
        scale: float,
        provider: Provider,
    ) -> Tensor:
        out, lse = provider.functions.forward(q, latent, table, positions, rows, values, scale)
        if table is None:
            ctx.save_for_backward(q, latent, positions, out, lse)
        ctx.rows = rows
        ctx.scale = scale
        ctx.functions = provider.functions
        return out

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        q, latent, positions, out, lse = ctx.saved_tensors
        grads = functions.backward(grad, q, latent, positions, out, lse, ctx.rows, ctx.scale)
        return *grads, None, None, None, None, None, None


@observed(CONTRACT)
def sparse_attention(
    q_RHC: Tensor, latent: TokenRows, positions_RK: Tensor, rows: Rows, values: int, scale: float, *, program: Program
) -> Tensor:
    """softmax(q k^T * scale) v over the positions listed for each row, in its own sequence and none beyond its own.

    A row without any position gives zeros. ValueError if the widths differ. Only packed rows carry a gradient.
    """
    if q_RHC.shape[2] != latent.rows.shape[-1]:
        raise ValueError(f"sparse_attention: queries of {q_RHC.shape[2]} columns, latent rows of {latent.rows.shape[-1]}")
    if not 0 < values <= q_RHC.shape[2]:
        raise ValueError(f"sparse_attention: values are the first {values} of {q_RHC.shape[2]} columns")
    if positions_RK.shape[0] != q_RHC.shape[0] or positions_RK.dtype != torch.int32:
        raise ValueError(
            f"sparse_attention: positions are int32 of {q_RHC.shape[0]} rows, not {positions_RK.dtype} of {positions_RK.shape[0]}"
        )
    provider = CONTRACT.provider(program, _shape({"q_RHC": q_RHC, "values": values}))
    return _SparseAttention.run(q_RHC, latent.rows, latent.page_table_NB, positions_RK, rows, values, scale, provider)
