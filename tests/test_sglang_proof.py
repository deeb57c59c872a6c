"""The proof's own arithmetic: what it compares, and that a touched record, a short answer or a missing phase is no proof."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import sglang_proof as proof
from benchmarks.common import Recorder
from zoo.common.engine import Completion
from zoo.common.sampling import SamplingParams
from zoo.verify import live
from zoo.verify.subject import Settings, build


@pytest.fixture(scope="module")
def lines() -> tuple[Any, list[dict[str, Any]]]:
    subject = build("qwen3", checkpoint=None, device="cpu")
    subject.draw((20, 33))
    completions = live.sample(subject, Settings((20, 33), requests=6, drawn=8))
    return subject.trainer, [
        {"phase": "p", "updated": False, "record": c.to_dict(), "cached": 3, "retracted": 1, "experts": None} for c in completions
    ]


def counted(trainer: Any, lines: list[dict[str, Any]]) -> proof.Count:
    count = proof.Count()
    for what, trained, served, where in proof._compared(trainer, lines, 0):
        count.add(what, trained, served, where)
    return count


def reported(count: proof.Count, lines: list[dict[str, Any]], expected: tuple[str, ...] = ("p",)) -> tuple[int, list[dict[str, Any]]]:
    record = Recorder(None, {})
    return proof.report({"p": (count, lines)}, proof.Model("qwen3", "tiny", None), expected, record), record.rows


def test_equal_records_are_proof(lines: Any) -> None:
    count = counted(*lines)
    assert count.compared == {"temperature": 48, "filtered": 48} and not any(count.differing.values())
    status, rows = reported(count, lines[1])
    assert status == 0 and rows[0]["requests"] == 6 and rows[0]["cached_tokens"] == 18 and rows[0]["retractions"] == 6


@pytest.mark.parametrize("name", ["log_probs", "filtered_log_probs"])
def test_one_bit_is_caught(lines: Any, name: str) -> None:
    trainer, good = lines
    completion = Completion.from_dict(good[4]["record"])
    values = torch.tensor(vars(completion)[name])
    values[5] = torch.nextafter(values[5], torch.tensor(-100.0))
    touched = replace(completion, **{name: tuple(values.tolist())})
    bad = [*good[:4], {**good[4], "record": touched.to_dict()}, *good[5:]]
    count = counted(trainer, bad)
    assert sum(count.differing.values()) >= 1 and "request 4" in count.first
    assert reported(count, bad)[0] == 1


def test_what_was_not_compared_is_no_proof(lines: Any) -> None:
    count = counted(*lines)
    assert reported(count, lines[1], ("p", "over HTTP"))[0] == 1
    assert reported(proof.Count(), lines[1])[0] == 1
    with pytest.raises(ValueError, match=r"filtered, here: .* \[3\] against .* \[2\]"):
        count.add("filtered", torch.zeros(3), torch.zeros(2), "here")


def test_requests_mix_lengths_and_every_filter() -> None:
    asked = proof.requests(64, 96, 1000, hybrid=False)
    lengths, params = {len(ids) for ids, _ in asked}, [p for _, p in asked]
    assert min(lengths) == 1 and max(lengths) > 2000 and len(lengths) >= 10
    kinds = {frozenset(p) & {"top_p", "top_k", "min_p"} for p in params}
    assert {frozenset(), frozenset({"top_p"}), frozenset({"top_k"}), frozenset({"min_p"})} <= kinds
    assert any(p["temperature"] == 0 for p in params) and SamplingParams(temperature=0.0).is_greedy
    assert proof.main(["qwen3", "--size", "absent"]) == 2
