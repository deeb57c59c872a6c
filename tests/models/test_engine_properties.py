"""Random schedules of add, step, preempt and abort on random engines: every record equals the request alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import REQUESTS, SHORT, SkippingScheduler, baseline, check_pages, numbers, plant, poison, twins
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.common.engine import Engine
from zoo.common.rollouts import Completion

ENGINES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from((16, 64)),
        "pages": st.integers(4, 12),
        "max_batch": st.integers(1, 5),
        "chunk_rows": st.sampled_from((1, 5, 16, 30, 2048)),
        "prefix_cache": st.booleans(),
    }
)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(SHORT)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.sampled_from(("preempt", "abort")), st.integers(0, 9)),
    ),
    max_size=14,
)


def play(engine: Engine, moves: list[tuple[str, int]]) -> None:
    """Plays the moves to the end of every request. AssertionError where a record is not the request alone."""
    which: dict[str, int] = {}
    done: list[Completion] = []

    def step() -> None:
        poison(engine)
        done.extend(engine.step())
        check_pages(engine)

    for move, value in moves:
        ids = list(engine.requests.active)
        if move == "add":
            which[engine.add(*REQUESTS[value])] = value
        elif move == "step":
            for _ in range(value):
                step()
        elif ids and move == "preempt":
            engine.preempt(ids[value % len(ids)])
        elif ids:
            done.append(engine.abort(ids[value % len(ids)]))
        check_pages(engine)
    for _ in range(2000):
        if not engine.busy:
            break
        step()
    assert not engine.busy and engine.scheduler.pool.available == engine.scheduler.pool.pages - 1
    assert len(done) == len(which)
    for record in done:
        alone: dict[str, Any] = baseline("dense")[which[record.request_id]]
        if record.finish_reason == "abort":
            whole = Completion.from_dict({**alone, "request_id": ""})
            assert record.output_ids == whole.output_ids[: len(record.output_ids)]
            assert record.filtered_log_probs == whole.filtered_log_probs[: len(record.output_ids)]
        else:
            assert numbers(record) == alone


@settings(max_examples=40)
@given(options=ENGINES, moves=MOVES)
def test_no_schedule_moves_a_byte(options: dict[str, Any], moves: list[tuple[str, int]]) -> None:
    play(Engine(twins("dense")[1], **options), moves)


def test_the_property_catches_a_faulty_resume() -> None:
    moves = [("add", 3), ("step", 2), ("preempt", 0)]
    options = {"pages": 12, "page_size": 16, "prefix_cache": False}
    play(Engine(twins("dense")[1], **options), moves)
    with pytest.raises(AssertionError):
        play(plant(Engine(twins("dense")[1], **options), SkippingScheduler), moves)
