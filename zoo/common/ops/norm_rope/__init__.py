"""norm_rope: the norms of query and key heads and their rotation, read straight from a fused projection's rows.

Sources: the norms of query and key heads, Qwen3 (arXiv 2505.09388), section 2; the rotation, RoFormer, Su et al. 2021 (arXiv 2104.09864),
section 3.4.2; transformers' `Qwen3Attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import FLOAT32, INTEGERS, PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.ops.norm_rope.reference import Heads, value_heads
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   qkv_RC, q_weight, k_weight, table, positions, heads, eps, offset
    backward  grad_q, grad_k, grad_v, qkv_RC, q_weight, k_weight, table, positions, heads, eps, offset
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Heads, float, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Heads, float, float], tuple[Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.norm_rope import reference

    return Functions(reference.norm_rope, reference.norm_rope_backward)


def _triton() -> Functions:
    from zoo.common.ops.norm_rope import kernels

    return Functions(kernels.norm_rope, kernels.norm_rope_backward)


CONTRACT = Contract(
    name="norm_rope",
    version=1,
    shapes="qkv_RC (query, key and value heads side by side), weights [E], table_PC2 (FP32), positions_R -> q_RHE, k_RGE, v_RGE (a view)",
    reads={"qkv_RC": PROGRAM, "q_weight_E": PROGRAM, "k_weight_E": PROGRAM, "table_PC2": FLOAT32, "positions_R": INTEGERS},
    rounds="the norm's output once, the rotation's output once: rms_norm, then rope",
    adds="as rms_norm over each head",
    laws=("row", "place", "fusion", "repeat"),
    backward="rope's, then rms_norm's, on each head",
    launch="one launch for all query and key heads of a row",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
)


class _NormRope(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        table: Tensor,
        positions: Tensor,
        heads: Heads,
        eps: float,
        offset: float,
        provider: Provider,
    ) -> Any:
        ctx.save_for_backward(qkv, q_weight, k_weight, table, positions)
        ctx.constants = (heads, eps, offset)
        ctx.functions = provider.functions
        q, k = provider.functions.forward(qkv, q_weight, k_weight, table, positions, *ctx.constants)
        return q, k, value_heads(qkv, heads)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Any:
        functions: Functions = ctx.functions
        grads = functions.backward(grad_q, grad_k, grad_v, *ctx.saved_tensors, *ctx.constants)
        return *grads, *[None] * 6


@observed(CONTRACT)
def norm_rope(
    qkv_RC: Tensor,
    q_weight_E: Tensor,
    k_weight_E: Tensor,
    table_PC2: Tensor,
    positions_R: Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    program: Program,
    query_width: int | None = None,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q_RHE, k_RGE, v_RGE). `query_width`: columns that a query head has in the row, if a gate of its own follows it there.

    ValueError if the row has another width, or the table is wider than a head.
    """
    width = q_weight_E.shape[0]
    shape = Heads(heads, kv_heads, width, query_width or width)
    if qkv_RC.shape[1] != shape.columns:
        raise ValueError(f"norm_rope: rows of {qkv_RC.shape[1]} columns, {shape} needs {shape.columns}")
    if 2 * table_PC2.shape[1] > width:
        raise ValueError(f"norm_rope: a table for {2 * table_PC2.shape[1]} columns, heads of {width}")
    provider = CONTRACT.provider(program)
    return _NormRope.run(qkv_RC, q_weight_E, k_weight_E, table_PC2, positions_R, shape, eps, float(zero_centred), provider)
