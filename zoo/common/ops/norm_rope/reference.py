"""norm_rope in plain torch: the two references, one after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.common.ops.rms_norm.reference import rms_norm, rms_norm_backward
from zoo.common.ops.rope.reference import rope


class Heads(NamedTuple):
    """How a row is cut: `queries` heads of `query_width` columns (the first `width` are the query), then `keys`, then as many values."""

    queries: int
    keys: int
    width: int
    query_width: int

    @property
    def columns(self) -> int:
        return self.queries * self.query_width + 2 * self.keys * self.width


def split_heads(qkv_RC: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Views (q_RHE, k_RGE, v_RGE)."""
    first = heads.queries * heads.query_width
    key_columns = heads.keys * heads.width
    q = qkv_RC[:, :first].unflatten(1, (heads.queries, heads.query_width))[..., : heads.width]
    k = qkv_RC[:, first : first + key_columns].unflatten(1, (heads.keys, heads.width))
    return q, k, value_heads(qkv_RC, heads)


def value_heads(qkv_RC: Tensor, heads: Heads) -> Tensor:
    """The view v_RGE."""
    return qkv_RC[:, -heads.keys * heads.width :].view(qkv_RC.shape[0], heads.keys, heads.width)


def join_heads(q_RHE: Tensor, k_RGE: Tensor, v_RGE: Tensor, heads: Heads) -> Tensor:
    """Rows [R, C] of what `split_heads` cut; columns beside a query are zero."""
    pad = torch.nn.functional.pad(q_RHE, (0, heads.query_width - heads.width))
    return torch.cat([pad.flatten(1), k_RGE.flatten(1), v_RGE.flatten(1)], dim=1)


def norm_rope(
    qkv_RC: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, heads: Heads, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    q, k, _ = split_heads(qkv_RC, heads)
    normed = (rms_norm(x, None, weight, eps, offset)[0] for x, weight in ((q, q_weight), (k, k_weight)))
    q, k = (rope(x, table, positions, False) for x in normed)
    return q, k


def norm_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv_RC: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Tensor,
    positions: Tensor,
    heads: Heads,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv and of the two weights."""
    q, k, _ = split_heads(qkv_RC, heads)
    parts = [
        rms_norm_backward(rope(grad, table, positions, True), None, x, weight, eps, offset)
        for grad, x, weight in ((grad_q, q, q_weight), (grad_k, k, k_weight))
    ]
    return join_heads(parts[0][0], parts[1][0], grad_v, heads), parts[0][1], parts[1][1]
