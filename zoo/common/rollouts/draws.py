"""Whether the seeds and filters that records name drew their tokens: a trainer draws them again."""

from __future__ import annotations

import torch

from zoo.common.ops.sample import sample
from zoo.common.rollouts.completion import Completion
from zoo.common.rollouts.params import SamplingParams
from zoo.common.rollouts.readers import write_floats
from zoo.common.row_sampling import RowSampling
from zoo.common.training import ForRL


@torch.no_grad()
def check_draws(model: ForRL, *records: Completion) -> None:
    """Draws every token of some records again from the trainer's rows, packed, with the seeds and filters recorded.

    ValueError naming the first token that other weights drew, that comes out otherwise, or whose log-probabilities differ by a bit,
    and for what is no record, has no seed, or what `score` would refuse: token ids outside the vocabulary, a document beyond the
    position table.
    """
    for record in records:
        if not isinstance(record, Completion):
            raise ValueError(f"check_draws takes Completions, one argument each (*records), not a {type(record).__name__}")
    drawn_from = [record for record in records if record.output_ids]
    if not drawn_from:
        return
    mine = model.weights_version
    for record in drawn_from:
        if record.sampling.seed is None and not record.sampling.is_greedy:
            raise ValueError(f"request {record.request_id!r} names no seed: its tokens can't be drawn again")
        for n, version in enumerate(record.output_versions):
            if version != mine:
                raise ValueError(f"output token {n} of request {record.request_id!r} was drawn by weights {version}, this model has {mine}")
    device = next(model.parameters()).device
    starts = [0]
    rows_drawn: list[int] = []
    positions: list[int] = []
    params: list[SamplingParams] = []
    for record in drawn_from:
        first = len(record.prompt_ids)
        count = len(record.output_ids)
        rows_drawn += range(starts[-1] + first - 1, starts[-1] + first + count - 1)
        positions += range(first, first + count)
        params += [record.sampling] * count
        starts.append(starts[-1] + first + count)
    ids_R = torch.tensor([token for record in drawn_from for token in (*record.prompt_ids, *record.output_ids)], device=device)
    rows = model.packed_rows(ids_R, torch.tensor(starts, device=device))
    with torch.autocast(device.type, enabled=False):
        hidden_RD = model.hidden_rows(ids_R, rows)
        sampling = RowSampling.of(params, positions, device)
        drawn = sample(model.logits(hidden_RD[torch.tensor(rows_drawn, device=device)]), sampling, model.program)
    again = zip(drawn.token_R.tolist(), drawn.log_prob_R.tolist(), drawn.filtered_log_prob_R.tolist(), strict=True)
    for record in drawn_from:
        recorded = zip(record.output_ids, record.log_probs, record.filtered_log_probs, strict=True)
        for n, given in enumerate(recorded):
            found = next(again)
            if found[0] != given[0] or write_floats(found[1:]) != write_floats(given[1:]):
                raise ValueError(f"output token {n} of request {record.request_id!r} is {given}, drawn again it is {found}")
