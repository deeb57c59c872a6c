"""The record of one finished request: everything that a trainer needs to score the same tokens under the same program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from zoo.common.fingerprint import Fingerprint
from zoo.common.reading import shown
from zoo.common.rollouts.params import SamplingParams
from zoo.common.rollouts.readers import (
    read_choice,
    read_dictionary,
    read_fields,
    read_floats,
    read_ids,
    read_runs,
    read_text,
    read_truth,
    write_floats,
    write_runs,
)

REASONS = ("stop", "length", "text", "abort")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, repr=False)
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
    finish_reason        "stop" (an end token), "length" (max_new_tokens), "text" (a stop string) or "abort"
    fingerprint          of the engine's model when the request ended
    text                 what was drawn, special tokens left out, up to the stop string that ended it; None where the prompt was token
                         ids and no stop string was looked for
    top_ids              of each drawn token's row the most likely tokens, the likeliest first; None unless asked for
    top_log_probs        theirs, after the temperature only

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
    text: str | None = None
    top_ids: tuple[tuple[int, ...], ...] | None = None
    top_log_probs: tuple[tuple[float, ...], ...] | None = None

    def __repr__(self) -> str:
        """One short line: a record of thousands of tokens is no message."""
        tokens = f"{len(self.prompt_ids)} prompt and {len(self.output_ids)} output tokens"
        said = "" if self.text is None else f", text {shown(self.text)}"
        rest = "" if self.exact else ", not exact"
        return f"Completion({shown(self.request_id)}: {tokens}, {self.finish_reason}{said}, weights {self.fingerprint.weights[:8]}{rest})"

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
        scores = self.prompt_log_probs
        return {
            "request_id": self.request_id,
            "prompt_ids": list(self.prompt_ids),
            "output_ids": list(self.output_ids),
            "log_probs": write_floats(self.log_probs),
            "filtered_log_probs": write_floats(self.filtered_log_probs),
            "prompt_log_probs": None if scores is None else write_floats(scores),
            "sampling": self.sampling.to_dict(),
            "versions": write_runs(self.versions),
            "exact": self.exact,
            "finish_reason": self.finish_reason,
            "fingerprint": self.fingerprint.to_dict(),
            "text": self.text,
            "top_ids": None if self.top_ids is None else [list(ids) for ids in self.top_ids],
            "top_log_probs": None if self.top_log_probs is None else [write_floats(values) for values in self.top_log_probs],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Completion:
        """The inverse of `to_dict`. ValueError for missing or unknown fields, values that no engine writes, or fields that
        contradict each other: counts, what the request asked and how it ended, or a last row of other weights than the
        fingerprint's (an aborted request may have one)."""
        read_fields("a completion", values, [field.name for field in fields(cls)])
        asked = read_dictionary("sampling", values["sampling"])
        if lost := {field.name for field in fields(SamplingParams)} - set(asked):
            raise ValueError(f"sampling has lost {', '.join(sorted(lost))}")
        prompt_ids = read_ids("prompt_ids", values["prompt_ids"])
        output_ids = read_ids("output_ids", values["output_ids"])
        scores = values["prompt_log_probs"]
        record = cls(
            request_id=read_text("request_id", values["request_id"]),
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            log_probs=read_floats("log_probs", values["log_probs"]),
            filtered_log_probs=read_floats("filtered_log_probs", values["filtered_log_probs"]),
            prompt_log_probs=None if scores is None else read_floats("prompt_log_probs", scores),
            sampling=SamplingParams.from_dict(asked),
            versions=read_runs("versions", values["versions"], len(prompt_ids) + len(output_ids)),
            exact=read_truth("exact", values["exact"]),
            finish_reason=read_choice("finish_reason", values["finish_reason"], REASONS),
            fingerprint=Fingerprint.from_dict(read_dictionary("fingerprint", values["fingerprint"])),
            text=None if values["text"] is None else read_text("text", values["text"]),
            top_ids=_read_each("top_ids", values["top_ids"], read_ids),
            top_log_probs=_read_each("top_log_probs", values["top_log_probs"], read_floats),
        )
        _check_counts(record)
        _check_end(record)
        _check_versions(record)
        if record.exact and has_nan(record.log_probs, record.filtered_log_probs, record.prompt_log_probs):
            raise ValueError("exact is True and a log-probability is NaN")
        return record


def _check_counts(record: Completion) -> None:
    """ValueError if there are more or fewer numbers than tokens, or no seed that could have drawn them."""
    if not record.prompt_ids:
        raise ValueError("the prompt is empty: the first token is drawn after at least one")
    drawn = len(record.output_ids)
    for name, values in (("log_probs", record.log_probs), ("filtered_log_probs", record.filtered_log_probs)):
        if len(values) != drawn:
            raise ValueError(f"{len(values)} {name} for {drawn} output tokens")
    scores = record.prompt_log_probs
    read = len(record.prompt_ids)
    if scores is not None and (len(scores) >= read or (record.finish_reason != "abort" and len(scores) != read - 1)):
        raise ValueError(f"{len(scores)} prompt_log_probs for {read} prompt tokens; all but the first have one")
    mine = [len(row) for row in record.top_ids or ()]
    theirs = [len(row) for row in record.top_log_probs or ()]
    if mine != theirs or (record.top_ids is None) != (record.top_log_probs is None) or (record.top_ids is not None and len(mine) != drawn):
        raise ValueError(f"top_ids are of {len(mine)} tokens and {sum(mine)} in all, top_log_probs of {len(theirs)} and {sum(theirs)}")
    if record.sampling.seed is None and not record.sampling.is_greedy:
        raise ValueError("sampling names no seed: nobody could draw these tokens again")


def _check_end(record: Completion) -> None:
    """ValueError if the drawn tokens contradict the parameters, or the reason why no more were drawn."""
    drawn = len(record.output_ids)
    most = record.sampling.max_new_tokens
    ends = set(record.sampling.stop_token_ids)
    if drawn > most:
        raise ValueError(f"{drawn} output tokens, max_new_tokens was {most}")
    if drawn == 0 and record.finish_reason != "abort":
        raise ValueError(f"finish_reason {record.finish_reason!r} without an output token; only an aborted request has none")
    for n, token in enumerate(record.output_ids[:-1]):
        if token in ends:
            raise ValueError(f"output token {n} of {drawn} is {token}, which ends the request")
    if record.finish_reason == "stop" and record.output_ids[-1] not in ends:
        raise ValueError(f"finish_reason 'stop' after token {record.output_ids[-1]}, which is not in stop_token_ids")


def _check_versions(record: Completion) -> None:
    """ValueError if a drawn token stands on a row of nobody, or the last row is of other weights than the fingerprint names."""
    rows = len(record.versions)
    drawn = len(record.output_ids)
    tokens = len(record.prompt_ids) + drawn
    aborted = record.finish_reason == "abort"
    # every token was drawn from a row; an aborted request without one may lack rows of its prompt
    if rows != tokens - 1 and (drawn or not aborted or rows >= tokens):
        raise ValueError(f"{rows} versions for {tokens} tokens; all but the last have a row")
    if not aborted and record.versions[-1:] != (record.fingerprint.weights,):
        last = ", ".join(record.versions[-1:]) or "nobody"
        raise ValueError(f"the last row is of {last}, the fingerprint of {record.fingerprint.weights}")


def _read_each(name: str, value: object, read: Callable[[str, object], tuple[Number, ...]]) -> tuple[tuple[Number, ...], ...] | None:
    """One tuple for each drawn token, or None."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list with an entry for each drawn token, not {shown(value)}")
    return tuple(read(name, entry) for entry in value)


def has_nan(*numbers: Iterable[float] | None) -> bool:
    """Whether one of some lists, where there is a list, holds a NaN."""
    return any(math.isnan(value) for values in numbers for value in values or ())
