"""Log-probabilities of prompt tokens, as SGLang's prefill returns them, from training's op. [R, V] is held for few rows only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.serving import ForServing


@dataclass
class PromptScores:
    """Fields of SGLang's LogitsProcessorOutput of the same names; None where nobody asked."""

    input_token_logprobs: Tensor
    input_top_logprobs_val: list[Any] | None = None
    input_top_logprobs_idx: list[Any] | None = None
    input_token_ids_logprobs_val: list[Any] | None = None
    input_token_ids_logprobs_idx: list[Any] | None = None


def scored_rows(counts: Sequence[int], begins: Sequence[int]) -> list[int]:
    """Rows that have a prompt log-probability: of each sequence's `counts[n]` new rows those from `begins[n]` on."""
    rows: list[int] = []
    start = 0
    for count, begin in zip(counts, begins, strict=True):
        rows += range(start + begin, start + count)
        start += count
    return rows


def prompt_scores(
    model: ForServing,
    hidden_RD: Tensor,
    targets_W: Tensor,
    counts: Sequence[int],
    begins: Sequence[int],
    top_nums: Sequence[int],
    wanted_ids: Sequence[Sequence[int] | None],
) -> PromptScores | None:
    """Scores of a prefill batch, None if no row wants one. targets_W: each scored row's next prompt token."""
    index = scored_rows(counts, begins)
    if not index:
        return None
    if targets_W.shape[0] != len(index):
        raise ValueError(f"{targets_W.shape[0]} prompt tokens for {len(index)} scored rows")
    head_VD = model.model.head_weight_VD
    program = model.program
    assert isinstance(head_VD, Tensor)
    hidden_WD = hidden_RD
    if len(index) != hidden_RD.shape[0]:
        hidden_WD = hidden_RD.index_select(0, torch.tensor(index).to(hidden_RD.device, non_blocking=True))
    scores = ops.log_prob(hidden_WD, head_VD, targets_W.long(), program=program)
    out = PromptScores(scores.log_prob_R)
    lengths = [count - begin for count, begin in zip(counts, begins, strict=True)]
    if any(n > 0 for n in top_nums):
        ids, values = ops.top_log_prob(hidden_WD, head_VD, scores.lse_R, max(top_nums), program=program)
        out.input_top_logprobs_idx = _by_sequence(ids, lengths, top_nums)
        out.input_top_logprobs_val = _by_sequence(values, lengths, top_nums)
    if any(wanted is not None for wanted in wanted_ids):
        out.input_token_ids_logprobs_val = []
        out.input_token_ids_logprobs_idx = []
        start = 0
        for length, wanted in zip(lengths, wanted_ids, strict=True):
            repeated = [] if wanted is None else [list(wanted)] * max(length, 0)
            entries: list[list[float]] = [[]] * len(repeated)  # what an empty list of ids gets
            if wanted and repeated:
                rows = slice(start, start + length)
                columns = torch.tensor(wanted, device=head_VD.device)
                entries = ops.named_log_prob(hidden_WD[rows], head_VD, scores.lse_R[rows], columns, program=program).tolist()
            out.input_token_ids_logprobs_val.append(entries)
            out.input_token_ids_logprobs_idx.append(repeated)
            start += max(length, 0)
    return out


def _by_sequence(values_WK: Tensor, lengths: Sequence[int], nums: Sequence[int]) -> list[list[list[float]]]:
    """Rows cut into sequences, each row to what its sequence asked for."""
    rows = values_WK.tolist()
    out = []
    start = 0
    for length, num in zip(lengths, nums, strict=True):
        out.append([row[:num] for row in rows[start : start + max(length, 0)]])
        start += max(length, 0)
    return out
