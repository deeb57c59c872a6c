"""Records packed for a trainer, and numbers given back to each record."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_harness import STEM, twins

from zoo.common.engine import Engine
from zoo.common.rollouts import Completion, SamplingParams, pack
from zoo.common.training import Scores
from zoo.testing import assert_same_bytes

ASKED = SamplingParams(temperature=0.8, top_k=50, seed=4, max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def records() -> list[Completion]:
    engine = Engine(twins("dense")[1], pages=24, page_size=16)
    return engine.generate([STEM[:9], STEM[:1], STEM[:20]], [ASKED, replace(ASKED, temperature=1.4, max_new_tokens=1), ASKED])


def test_score_takes_what_records_become_and_gives_each_its_numbers_back(records: list[Completion]) -> None:
    trainer = twins("dense")[0]
    packed = pack(records)
    scored = trainer.score(packed.ids_R, packed.cu_seqlens, sampling=packed.sampling)
    assert packed.cu_seqlens.tolist() == [0, 15, 17, 43] and packed.cu_seqlens.dtype == torch.int32
    assert packed.drawn_R.sum() == 13 == sum(span.stop - span.start for span in packed.spans)
    for record, mine, sampled in zip(records, packed.split(scored), packed.split(packed.sampled_R), strict=True):
        assert_same_bytes(mine.detach(), torch.tensor(record.filtered_log_probs))
        assert_same_bytes(sampled, torch.tensor(record.filtered_log_probs))
    assert packed.differing_bytes(scored) == 0 and not packed.sampled_R[~packed.drawn_R].any()
    nudged = scored.detach().clone()
    nudged[packed.spans[1]] = torch.nextafter(nudged[packed.spans[1]], torch.zeros(1))
    assert packed.differing_bytes(nudged) > 0  # the control
    loss = -(packed.spread([1.0, -2.0, 0.5]) * torch.exp(torch.where(packed.drawn_R, scored - packed.sampled_R, 0.0))).sum()
    assert loss.item() == -(6 * 1.0 - 2.0 + 6 * 0.5)  # every ratio is 1
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in trainer.parameters())
    trainer.zero_grad()


def test_entropies_are_split_as_well(records: list[Completion]) -> None:
    packed = pack(records)
    scores = twins("dense")[0].score(packed.ids_R, packed.cu_seqlens, sampling=packed.sampling, entropy=True, top_k=2)
    assert isinstance(scores, Scores) and scores.entropy_R is not None and scores.top_ids_RK is not None
    assert [part.shape[0] for part in packed.split(scores.entropy_R)] == [6, 1, 6]
    assert packed.split(scores.top_ids_RK)[2].shape == (6, 2)


def test_what_can_t_be_packed_is_refused(records: list[Completion]) -> None:
    packed = pack(records)
    empty = replace(records[0], output_ids=(), log_probs=(), filtered_log_probs=())
    for call, sentence in (
        (lambda: pack([]), "there is no record to pack"),
        (lambda: pack([records[0].to_dict()]), "pack takes Completions, not a dict"),  # type: ignore[list-item]
        (lambda: pack([empty]), "request '0' drew no token: leave it out"),
        (lambda: packed.split(torch.zeros(3)), r"the packed records have 43 rows, not \[3\]"),
        (lambda: packed.spread([1.0]), r"there are 3 records, not \[1\] numbers"),
        (lambda: packed.differing_bytes(torch.zeros(43).double()), "scores are FP32, not torch.float64"),
        (lambda: packed.differing_bytes(torch.zeros(43, 2)), r"one score a row, not \[43, 2\]"),
        (lambda: packed.differing_bytes(Scores(torch.zeros(43))), "a tensor of rows is wanted, not a Scores"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_a_record_s_repr_is_one_short_line(records: list[Completion]) -> None:
    said = repr(records[0])
    assert said == f"Completion('0': 9 prompt and 6 output tokens, length, weights {records[0].fingerprint.weights[:8]})"
    long = replace(records[0], text="x" * 5000, exact=False)
    assert len(repr(long)) < 300 and "not exact" in repr(long) and "\n" not in repr(long)
