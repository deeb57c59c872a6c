"""embed on CUDA: a gather, and aten's sorted (atomic-free) scatter for the gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(ids_R: Tensor, weight_VD: Tensor) -> Tensor:
    return weight_VD.index_select(0, ids_R)


def embed_backward(grad_RD: Tensor, ids_R: Tensor, vocabulary: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad_RD, ids_R, vocabulary, -1, False)
