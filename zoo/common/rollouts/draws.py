"""Whether the seeds and filters that records name drew their tokens: a trainer draws them again."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.sample import Drawn, sample
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
    position table. Where FSDP2 shards the model over processes all call it, each with records of its own or with none, and all raise
    if one does.
    """
    processes = model.processes()
    with processes.agreed():
        drawn_from = _drawn_from(records)
    if not drawn_from and not processes.sharded:
        return
    mine = model.weights_version
    with processes.agreed():
        ids_R, starts_N1, wanted_R, sampling = _again(drawn_from, mine, model)
        model.packed_rows(ids_R, starts_N1)
    # FSDP2 gathers for forward
    hidden_RD = model(ids_R, cu_seqlens=starts_N1).hidden_states
    logits_RV = model.logits(hidden_RD[wanted_R])
    with processes.agreed():
        if drawn_from:
            with torch.autocast(logits_RV.device.type, enabled=False):
                drawn = sample(logits_RV, sampling, model.program)
            _compare(drawn_from, drawn)


def _drawn_from(records: tuple[Completion, ...]) -> list[Completion]:
    for record in records:
        if not isinstance(record, Completion):
            raise ValueError(f"check_draws takes Completions, one argument each (*records), not a {type(record).__name__}")
    return [record for record in records if record.output_ids]


def _again(drawn_from: list[Completion], mine: str, model: ForRL) -> tuple[Tensor, Tensor, Tensor, RowSampling]:
    """Packed ids and bounds of the records, the rows that drew a token, and how. One row that nothing is
    compared of where there are no records."""
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
    ids = [token for record in drawn_from for token in (*record.prompt_ids, *record.output_ids)]
    ids_R = torch.tensor(ids or [0], device=device)
    starts_N1 = torch.tensor(starts if drawn_from else [0, 1], device=device)
    return ids_R, starts_N1, torch.tensor(rows_drawn or [0], device=device), RowSampling.of(params, positions, device)


def _compare(drawn_from: list[Completion], drawn: Drawn) -> None:
    again = zip(drawn.token_R.tolist(), drawn.log_prob_R.tolist(), drawn.filtered_log_prob_R.tolist(), strict=True)
    for record in drawn_from:
        recorded = zip(record.output_ids, record.log_probs, record.filtered_log_probs, strict=True)
        for n, given in enumerate(recorded):
            found = next(again)
            if found[0] != given[0] or write_floats(found[1:]) != write_floats(given[1:]):
                raise ValueError(f"output token {n} of request {record.request_id!r} is {given}, drawn again it is {found}")
