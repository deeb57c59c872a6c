"""Log-probabilities of other tokens than the drawn one, for reports, without a gradient: the most likely of every row, by a walk over
vocabulary chunks, those that somebody names, and all that logits in memory have."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.contract import observed
from zoo.common.ops.log_prob import CONTRACT, VOCABULARY_CHUNK, _logits, log_prob_of_logits
from zoo.common.program import Program

TOP_ROWS = 1024  # rows whose logits and keys exist at once; moves no byte


def _keys(logits_RC: Tensor, first: int) -> Tensor:
    """int64 [R, C] that order logits, then lower ids: no two are equal, so any top-k gives the same list. -0 counts as +0."""
    bits = (logits_RC + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(first, first + logits_RC.shape[1], device=logits_RC.device)
    return (ordered.long() << 32) + (0xFFFFFFFF - ids)


@observed(CONTRACT)
@torch.no_grad()
def top_log_prob(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    lse_R: Tensor,
    top_k: int,
    *,
    program: Program,
    inverse_temperature_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids int64 [R, K], log-probabilities FP32 [R, K]) of the `top_k` highest logits, lower id first among equals.

    `lse_R` is log_prob's of the same rows at the same temperature; a log-probability has the bytes that `log_prob` gives for its
    id. [R, V] is never held. ValueError unless 1 <= top_k <= V.
    """
    vocabulary = weight_VD.shape[0]
    if not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k must be between 1 and the vocabulary of {vocabulary}, not {top_k}")
    rows = hidden_RD.shape[0]
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=hidden_RD.device)
    values = torch.empty(rows, top_k, dtype=torch.float32, device=hidden_RD.device)
    for r in range(0, rows, TOP_ROWS):
        row = slice(r, min(r + TOP_ROWS, rows))
        temperature = None if inverse_temperature_R is None else inverse_temperature_R[row]
        keys = ids[row, :0]
        best = values[row, :0]
        for c in range(0, vocabulary, VOCABULARY_CHUNK):
            logits = _logits(hidden_RD[row], weight_VD[c : c + VOCABULARY_CHUNK], temperature, program)
            keys = torch.cat([keys, _keys(logits, c)], 1)
            keys, place = keys.topk(min(top_k, keys.shape[1]), dim=1)
            best = torch.cat([best, logits], 1).gather(1, place)
        ids[row] = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
        values[row] = torch.clamp(best - lse_R[row, None], max=0.0)
    return ids, values


@observed(CONTRACT)
@torch.no_grad()
def top_of_logits(logits_RV: Tensor, inverse_temperature_R: Tensor | None, top_k: int, *, program: Program) -> tuple[Tensor, Tensor]:
    """(ids int64 [R, K], log-probabilities FP32 [R, K]) as `top_log_prob` has them, from logits that already exist before the temperature.

    ValueError unless 1 <= top_k <= V.
    """
    vocabulary = logits_RV.shape[1]
    if not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k must be between 1 and the vocabulary of {vocabulary}, not {top_k}")
    scaled_RV = logits_RV if inverse_temperature_R is None else logits_RV * inverse_temperature_R[:, None]
    first_R = torch.zeros(len(scaled_RV), dtype=torch.int64, device=scaled_RV.device)
    lse_R = log_prob_of_logits(scaled_RV, first_R, program=program).lse_R
    ids_RK = _keys(scaled_RV, 0).topk(top_k, dim=1).indices
    return ids_RK, torch.clamp(scaled_RV.gather(1, ids_RK) - lse_R[:, None], max=0.0)


@observed(CONTRACT)
@torch.no_grad()
def named_log_prob(hidden_RD: Tensor, weight_VD: Tensor, lse_R: Tensor, ids_K: Tensor, *, program: Program) -> Tensor:
    """FP32 [R, K]: at every row the log-probabilities of the tokens `ids_K`, with the bytes that `log_prob` gives for each.

    `lse_R` is log_prob's of the same rows at temperature 1.
    """
    logits_RK = _logits(hidden_RD, weight_VD.index_select(0, ids_K), None, program)
    return torch.clamp(logits_RK - lse_R[:, None], max=0.0)


@observed(CONTRACT)
@torch.no_grad()
def every_log_prob(logits_RV: Tensor, inverse_temperature_R: Tensor | None, *, program: Program) -> Tensor:
    """FP32 [R, V]: the log-probability of every token, after the temperature, from logits that already exist before it.

    A column has the bytes that `log_prob` gives for its token.
    """
    scaled_RV = logits_RV if inverse_temperature_R is None else logits_RV * inverse_temperature_R[:, None]
    first_R = torch.zeros(len(scaled_RV), dtype=torch.int64, device=scaled_RV.device)
    lse_R = log_prob_of_logits(scaled_RV, first_R, program=program).lse_R
    return torch.clamp(scaled_RV - lse_R[:, None], max=0.0)
