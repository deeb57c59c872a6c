"""norm_rope on CUDA: the fused forward, and the backward composed of rope's and rms_norm's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.norm_rope.reference import split_heads
from zoo.common.ops.rms_norm.kernels import norm_rope as fused
from zoo.common.ops.rms_norm.kernels import rms_norm_backward
from zoo.common.ops.rope.kernels import rope


def norm_rope(
    qkv_RC: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, shape: tuple[int, int, int], eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    return fused(qkv_RC, q_weight, k_weight, eps, offset, table, positions, *shape)


def norm_rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv_RC: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor,
    shape: tuple[int, int, int], eps: float, offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and of the two weights."""
    q, k, _ = split_heads(qkv_RC, shape)
    parts = [
        rms_norm_backward(rope(grad.contiguous(), table, positions, True), None, x, weight, eps, offset)
        for grad, x, weight in ((grad_q, q, q_weight), (grad_k, k, k_weight))
    ]
    return torch.cat([parts[0][0], parts[1][0], grad_v], dim=1).flatten(1), parts[0][1], parts[1][1]
