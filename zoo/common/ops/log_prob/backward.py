"""The two products behind a gradient of logits, by chunks of at most 4096 rows and 16384 columns (2^26 logits)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# columns of the vocabulary and rows whose logits exist at once; a multiple of the group, so they move no byte
VOCABULARY_CHUNK = 16384
ROW_CHUNK = 4096


def through_logits(
    hidden_RD: Tensor, weight_VD: Tensor, needs: tuple[bool, bool], grad_of_logits: Callable[[slice, int, Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """(d hidden, d weight), each None unless needed; chunks are added in FP32 and rounded once.

    grad_of_logits(rows, first, part) gives d logits [R', C] of these rows against `part`, the weight's rows from `first` on.
    """
    needs_hidden, needs_weight = needs
    accumulate = torch.promote_types(hidden_RD.dtype, torch.float32)
    total_hidden = torch.zeros(hidden_RD.shape, dtype=accumulate, device=hidden_RD.device) if needs_hidden else None
    grad_weight = torch.empty_like(weight_VD) if needs_weight else None
    for first in range(0, weight_VD.shape[0], VOCABULARY_CHUNK):
        part = weight_VD[first : first + VOCABULARY_CHUNK]
        total_weight = torch.zeros(part.shape, dtype=accumulate, device=weight_VD.device) if needs_weight else None
        for r in range(0, hidden_RD.shape[0], ROW_CHUNK):
            rows = slice(r, min(r + ROW_CHUNK, hidden_RD.shape[0]))
            d_logits = grad_of_logits(rows, first, part)
            if total_hidden is not None:
                total_hidden[rows] += d_logits @ part
            if total_weight is not None:
                total_weight += d_logits.T @ hidden_RD[rows]
        if grad_weight is not None and total_weight is not None:
            grad_weight[first : first + VOCABULARY_CHUNK] = total_weight
    return None if total_hidden is None else total_hidden.to(hidden_RD.dtype), grad_weight
