"""norm_rope in plain torch: the two references, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.rms_norm.reference import rms_norm, rms_norm_backward
from zoo.common.ops.rope.reference import rope


def split_heads(qkv_RC: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, width = shape
    q, k, v = qkv_RC.unflatten(1, (-1, width)).split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def norm_rope(
    qkv_RC: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, shape: tuple[int, int, int], eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    q, k, _ = split_heads(qkv_RC, shape)
    normed = (rms_norm(x, None, weight, eps, offset)[0] for x, weight in ((q, q_weight), (k, k_weight)))
    q, k = (rope(x, table, positions, False) for x in normed)
    return q, k


def norm_rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv_RC: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor,
    shape: tuple[int, int, int], eps: float, offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and of the two weights."""
    q, k, _ = split_heads(qkv_RC, shape)
    parts = [
        rms_norm_backward(rope(grad, table, positions, True), None, x, weight, eps, offset)
        for grad, x, weight in ((grad_q, q, q_weight), (grad_k, k, k_weight))
    ]
    grad_qkv = torch.cat([parts[0][0], parts[1][0], grad_v], dim=1).flatten(1)
    return grad_qkv, parts[0][1], parts[1][1]
