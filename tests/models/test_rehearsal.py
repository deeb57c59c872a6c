"""A rehearsal goes through every kind of push, and moves nothing that is served."""

from __future__ import annotations

from functools import partial

import pytest

from zoo.common.engine import Engine
from zoo.common.registry import architectures
from zoo.common.rehearsal import pushes
from zoo.common.rollouts import Completion, SamplingParams

PROMPTS = [[5, 6, 7, 8], list(range(3, 40))]


def test_pushes_cover_counts_batches_and_both_sides_of_a_segment() -> None:
    planned = list(pushes(chunk_rows=256, max_batch=12, segment=512, positions=2048))
    prefills = {push.counts[0] for push in planned if len(push.counts) == 1 and push.contexts == (0,)}
    assert {1, 17, 64, 128, 192, 256} <= prefills
    decodes = {(len(push.counts), push.contexts[0]) for push in planned if set(push.counts) == {1} and push.contexts[0]}
    assert {(1, 16), (12, 16), (1, 512), (12, 512)} <= decodes
    assert any(push.contexts == (512,) and push.counts[0] > 1 for push in planned)
    assert all(sum(push.counts) <= 256 for push in planned)


def test_pushes_stay_inside_the_position_table() -> None:
    for push in pushes(chunk_rows=4096, max_batch=3, segment=None, positions=100):
        assert max(a + b for a, b in zip(push.counts, push.contexts, strict=True)) <= 100


@pytest.mark.parametrize("arch", architectures())
def test_a_rehearsal_moves_nothing(arch: str) -> None:
    family, architecture = architectures()[arch]
    model = family.serving.from_config(architecture.sizes["tiny"], seed=1, device="cpu")
    made = partial(Engine, model, pages=16, max_batch=2, chunk_rows=64, seed=3)
    params = SamplingParams(max_new_tokens=3, top_p=0.9)
    plain = made().generate(PROMPTS, params)
    rehearsed = made()
    before = {name: tensor.clone() for name, tensor in rehearsed.scheduler.memory.tensors().items()}
    assert before
    rehearsed.rehearse()
    assert all(tensor.equal(before[name]) for name, tensor in rehearsed.scheduler.memory.tensors().items())
    assert rehearsed.stats.compilations == 0
    assert plain[0].log_probs
    assert [numbers(record) for record in rehearsed.generate(PROMPTS, params)] == [numbers(record) for record in plain]
    # the control: what is served is written, and other tokens are other numbers
    after = rehearsed.scheduler.memory.tensors()
    assert not all(tensor.equal(before[name]) for name, tensor in after.items())
    assert [numbers(record) for record in made().generate([prompt[::-1] for prompt in PROMPTS], params)] != [numbers(r) for r in plain]


def numbers(record: Completion) -> tuple[object, ...]:
    return tuple(record.output_ids), record.log_probs, record.filtered_log_probs
