"""The record of one finished request: everything that a trainer needs to score the same tokens under the same program."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch

from zoo.common.fingerprint import Fingerprint
from zoo.common.sampling import RowSampling, SamplingParams, sample, shown
from zoo.common.training import ForRL

REASONS = ("stop", "length", "text", "abort")
IDS = 1 << 31  # no vocabulary is larger
HEXADECIMAL = re.compile("([0-9a-f]{8})*")


@dataclass(frozen=True)
class Completion:
    """What was asked and what came out; log-probabilities are Python floats that hold FP32 values unchanged.

    output_ids           the drawn tokens, the one that ended the request included
    log_probs            of each drawn token, after the temperature only
    filtered_log_probs   of each drawn token, after top-k, top-p and min-p too: the law it was drawn from
    sampling             what was asked, with its seed and every token that ends the request filled in: `stop_token_ids` holds the
                         model's own too, unless `ignore_eos`. A greedy request may have no seed
    prompt_log_probs     None unless asked for; entry r is the model's own (temperature 1) of prompt token r + 1 after row r
    versions             entry r: the weights (content hash) that made this record's numbers at row r; output token i stands on
                         row len(prompt_ids) - 1 + i. Rows of an aborted request that were never pushed have no entry
    exact                False iff some row was read by other weights than wrote it (`update_weights(mode="keep")`), or a number is NaN
    finish_reason        "stop" (an end token), "length" (max_new_tokens), "text" (a stop string, which servers beside the embedded
                         engine look for) or "abort"
    fingerprint          of the engine's model when the request ended

    Whether a trainer may treat a record as drawn by its own weights is `on_policy(trainer.fingerprint())`; `exact` alone does not say it.
    Scoring a record confirms its log-probabilities and not that `sampling.seed` drew its tokens; `check_draws` draws them again.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    filtered_log_probs: tuple[float, ...]
    prompt_log_probs: tuple[float, ...] | None
    sampling: SamplingParams
    versions: tuple[str, ...]
    exact: bool
    finish_reason: str
    fingerprint: Fingerprint

    @property
    def output_versions(self) -> tuple[str, ...]:
        """The weights that scored each output token."""
        return self.versions[len(self.prompt_ids) - 1 :]

    def on_policy(self, fingerprint: Fingerprint) -> bool:
        """Whether all of its output tokens were drawn under this program by these weights, on rows that they read alone.

        False after an update in mid-request, though the last tokens, and the record's own fingerprint, are of the latest weights.
        """
        drawn_by = self.output_versions
        same = self.fingerprint.program == fingerprint.program and len(drawn_by) >= len(self.output_ids)
        return self.exact and same and set(drawn_by) <= {fingerprint.weights}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. FP32 lists become one little-endian hexadecimal string, so that all bytes survive; versions run lengths."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out |= {"prompt_ids": list(self.prompt_ids), "output_ids": list(self.output_ids)}
        out |= {name: _hex(out[name]) for name in ("log_probs", "filtered_log_probs", "prompt_log_probs")}
        out["versions"] = [[version, len(list(run))] for version, run in groupby(self.versions)]
        return out | {"sampling": self.sampling.to_dict(), "fingerprint": self.fingerprint.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Completion:
        """The inverse of `to_dict`. ValueError for missing or unknown fields, values that no engine writes, or fields that
        contradict each other: counts, or a last row of other weights than the fingerprint's (an aborted request may have one)."""
        if not isinstance(values, dict):
            raise ValueError(f"a completion is a dictionary, not {shown(values)}")
        names = {f.name for f in fields(cls)}
        if set(values) != names:
            raise ValueError(f"a completion has the fields {sorted(names)}, this one {', '.join(sorted(map(shown, values)))}")
        for name in ("log_probs", "filtered_log_probs", "prompt_log_probs"):
            text = values[name]
            if not (text is None and name == "prompt_log_probs") and (not isinstance(text, str) or not HEXADECIMAL.fullmatch(text)):
                raise ValueError(f"{name} must be hexadecimal text of whole FP32 numbers, 8 digits each, not {shown(text)}")
        for name in ("sampling", "fingerprint"):
            if not isinstance(values[name], dict):
                raise ValueError(f"{name} must be a dictionary, not {shown(values[name])}")
        if lost := {f.name for f in fields(SamplingParams)} - set(values["sampling"]):
            raise ValueError(f"sampling has lost {', '.join(sorted(lost))}")
        for name in ("prompt_ids", "output_ids"):
            ids = values[name]
            wrong = [i for i in ids if type(i) is not int or not 0 <= i < IDS] if isinstance(ids, list | tuple) else [ids]
            if wrong:
                raise ValueError(f"{name} must be a list of integers of at least 0 and below 2^31, not {shown(wrong[0])}")
        if not isinstance(values["request_id"], str):
            raise ValueError(f"request_id must be text, not {shown(values['request_id'])}")
        if not isinstance(values["exact"], bool):
            raise ValueError(f"exact must be True or False, not {shown(values['exact'])}")
        for run in values["versions"] if isinstance(values["versions"], list | tuple) else [values["versions"]]:
            pair = isinstance(run, list | tuple) and len(run) == 2 and isinstance(run[0], str)
            if not pair or type(run[1]) is not int or run[1] < 1:
                raise ValueError(f"versions must be runs [weights, rows of at least 1], not {shown(run)}")
        tokens = len(values["prompt_ids"]) + len(values["output_ids"])
        if (rows := sum(count for _, count in values["versions"])) > tokens:
            raise ValueError(f"versions count {rows} rows for {tokens} tokens")
        record = cls(**values)
        record = replace(
            record,
            prompt_ids=tuple(record.prompt_ids),
            output_ids=tuple(record.output_ids),
            log_probs=_floats(values["log_probs"]),
            filtered_log_probs=_floats(values["filtered_log_probs"]),
            prompt_log_probs=None if values["prompt_log_probs"] is None else _floats(values["prompt_log_probs"]),
            sampling=SamplingParams.from_dict(values["sampling"]),
            versions=tuple(version for version, count in values["versions"] for _ in range(count)),
            fingerprint=Fingerprint.from_dict(values["fingerprint"]),
        )
        if record.finish_reason not in REASONS:
            raise ValueError(f"finish_reason {shown(record.finish_reason)} is not one of {', '.join(REASONS)}")
        if record.sampling.seed is None and not record.sampling.is_greedy:
            raise ValueError("sampling names no seed: nobody could draw these tokens again")
        for name in ("log_probs", "filtered_log_probs"):
            if len(getattr(record, name)) != len(record.output_ids):
                raise ValueError(f"{len(getattr(record, name))} {name} for {len(record.output_ids)} output tokens")
        for name in ("log_probs", "filtered_log_probs", "prompt_log_probs"):
            above = [value for value in getattr(record, name) or () if value > 0]
            if above:
                raise ValueError(f"{name} holds {above[0]!r}; a log-probability is at most 0")
        if not record.prompt_ids:
            raise ValueError("the prompt is empty: the first token is drawn after at least one")
        _check_end(record)
        drawn, scores = len(record.output_ids), record.prompt_log_probs
        tokens = len(record.prompt_ids) + drawn
        aborted = record.finish_reason == "abort"
        # every token was drawn from a row; an aborted request without one may lack rows of its prompt
        if len(record.versions) != tokens - 1 and (drawn or not aborted or len(record.versions) >= tokens):
            raise ValueError(f"{len(record.versions)} versions for {tokens} tokens; all but the last have a row")
        if not aborted and record.versions[-1:] != (record.fingerprint.weights,):
            last = ", ".join(record.versions[-1:]) or "nobody"
            raise ValueError(f"the last row is of {last}, the fingerprint of {record.fingerprint.weights}")
        if scores is not None and (len(scores) >= len(record.prompt_ids) or (not aborted and len(scores) != len(record.prompt_ids) - 1)):
            raise ValueError(f"{len(scores)} prompt_log_probs for {len(record.prompt_ids)} prompt tokens; all but the first have one")
        if record.exact and has_nan(record.log_probs, record.filtered_log_probs, scores):
            raise ValueError("exact is True and a log-probability is NaN")
        return record


def _check_end(record: Completion) -> None:
    """ValueError if the drawn tokens contradict the parameters, or the reason why no more were drawn."""
    drawn, most, ends = len(record.output_ids), record.sampling.max_new_tokens, set(record.sampling.stop_token_ids)
    if drawn > most:
        raise ValueError(f"{drawn} output tokens, max_new_tokens was {most}")
    if drawn == 0 and record.finish_reason != "abort":
        raise ValueError(f"finish_reason {record.finish_reason!r} without an output token; only an aborted request has none")
    for n, token in enumerate(record.output_ids[:-1]):
        if token in ends:
            raise ValueError(f"output token {n} of {drawn} is {token}, which ends the request")
    if record.finish_reason == "stop" and record.output_ids[-1] not in ends:
        raise ValueError(f"finish_reason 'stop' after token {record.output_ids[-1]}, which is not in stop_token_ids")


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
    device, starts = next(model.parameters()).device, [0]
    rows_drawn: list[int] = []
    positions: list[int] = []
    params: list[SamplingParams] = []
    for record in drawn_from:
        first, count = len(record.prompt_ids), len(record.output_ids)
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
            if found[0] != given[0] or _hex(found[1:]) != _hex(given[1:]):
                raise ValueError(f"output token {n} of request {record.request_id!r} is {given}, drawn again it is {found}")


def has_nan(*numbers: Iterable[float] | None) -> bool:
    """Whether one of some lists, where there is a list, holds a NaN."""
    return any(math.isnan(value) for values in numbers for value in values or ())


def _hex(values: Sequence[float] | None) -> str | None:
    return None if values is None else struct.pack(f"<{len(values)}f", *values).hex()


def _floats(text: str) -> tuple[float, ...]:
    content = bytes.fromhex(text)
    return struct.unpack(f"<{len(content) // 4}f", content)
