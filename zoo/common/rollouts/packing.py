"""Records as one packed batch: what `ForRL.score` takes, which rows drew a token, and the way back to each record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from zoo.common.rollouts.completion import Completion
from zoo.common.rollouts.params import SamplingParams


@dataclass(frozen=True)
class Packed:
    """Records one after another, a document each: its prompt and what was drawn.

    ids_R       int64
    cu_seqlens  int32 [N + 1]
    sampling    of each document
    drawn_R     bool: the row's target, the next token of its document, was drawn
    sampled_R   FP32, the sampler's own log-probability of that token, after the filters; 0 on other rows
    spans       of each record the rows whose targets it drew
    """

    ids_R: Tensor
    cu_seqlens: Tensor
    sampling: list[SamplingParams]
    drawn_R: Tensor
    sampled_R: Tensor
    spans: list[slice]

    def split(self, values: Tensor) -> list[Tensor]:
        """Of [R, ...] the rows of each record that drew a token, in order: views, so gradients flow. ValueError for another count."""
        self._check(values)
        return [values[span] for span in self.spans]

    def spread(self, per_record: Tensor | Sequence[float]) -> Tensor:
        """One number of each record on all of its drawn rows, 0 on the others: FP32 [R]. ValueError for another count."""
        given = torch.as_tensor(per_record, dtype=torch.float32, device=self.ids_R.device)
        if tuple(given.shape) != (len(self.spans),):
            raise ValueError(f"there are {len(self.spans)} records, not {list(given.shape)} numbers")
        out = torch.zeros_like(self.sampled_R)
        for number, span in zip(given, self.spans, strict=True):
            out[span] = number
        return out

    def differing_bytes(self, scored_R: Tensor) -> int:
        """Bytes of drawn tokens in which `score` with `sampling` differs from what the sampler reported: 0 where both are one program."""
        self._check(scored_R)
        if scored_R.dim() != 1:
            raise ValueError(f"one score a row, not {list(scored_R.shape)}")
        if scored_R.dtype != torch.float32:
            raise ValueError(f"scores are FP32, not {scored_R.dtype}")
        mine = scored_R.detach()[self.drawn_R].view(torch.uint8)
        return int((mine != self.sampled_R[self.drawn_R].view(torch.uint8)).sum())

    def _check(self, values: Tensor) -> None:
        if not isinstance(values, Tensor):
            raise ValueError(f"a tensor of rows is wanted, not a {type(values).__name__}")
        if values.shape[:1] != self.ids_R.shape:
            raise ValueError(f"the packed records have {len(self.ids_R)} rows, not {list(values.shape)}")


def pack(records: Sequence[Completion], device: torch.device | str | None = None) -> Packed:
    """Packs records that drew at least one token each. ValueError for none, for what is no record, or a record without a drawn token."""
    records = list(records)
    if not records:
        raise ValueError("there is no record to pack")
    for record in records:
        if not isinstance(record, Completion):
            raise ValueError(f"pack takes Completions, not a {type(record).__name__}")
        if not record.output_ids:
            raise ValueError(f"request {record.request_id!r} drew no token: leave it out")
    ends = list(accumulate(len(r.prompt_ids) + len(r.output_ids) for r in records))
    ids_R = torch.tensor([token for r in records for token in (*r.prompt_ids, *r.output_ids)], device=device)
    spans = [slice(end - len(r.output_ids) - 1, end - 1) for end, r in zip(ends, records, strict=True)]
    drawn_R = torch.zeros(ids_R.shape, dtype=torch.bool)
    sampled_R = torch.zeros(ids_R.shape)
    for span, record in zip(spans, records, strict=True):
        drawn_R[span] = True
        sampled_R[span] = torch.tensor(record.filtered_log_probs)
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    return Packed(ids_R, starts, [r.sampling for r in records], drawn_R.to(device), sampled_R.to(device), spans)
