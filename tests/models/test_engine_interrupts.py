"""Ctrl-C at any line of a call that changes the engine, and again while that is mended: nothing is lost, doubled or leaked."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engine_harness import STEM, check_pages, numbers, tokens, twins

from zoo.common import engine as package
from zoo.common.engine import Engine
from zoo.common.engine.changes import Changes
from zoo.common.engine.request import Request
from zoo.common.rollouts import SamplingParams

FOLDER = str(Path(package.__file__).parent)
FILES = (FOLDER, contextlib.__file__)
ASKED = [
    (STEM[:20], SamplingParams(seed=1, max_new_tokens=2)),
    (STEM[:20] + [5], SamplingParams(seed=2, max_new_tokens=2)),
    (tokens(9, 4), SamplingParams(temperature=0.7, top_k=20, seed=3, max_new_tokens=2)),
]


class Interrupter:
    """Raises KeyboardInterrupt in place of the `at`-th line of the engine's files, counted from 1, that runs while it traces.

    Where `again` is above 0, another one follows at the `again`-th line of what mends the first.
    """

    def __init__(self, at: int, again: int = 0) -> None:
        self.left = at
        self.again = again
        self.struck = 0
        self.engine: Engine | None = None
        self.marked: list[int] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(FILES) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.engine is not None and self.engine.changes.unfinished is not None:
                self.marked.append((1 << 40) - self.left)
            if self.left == 0:
                self.struck += 1
                raise KeyboardInterrupt
        return self._line

    def call(self, call: Callable[[Engine, list[str]], None], engine: Engine, ids: list[str]) -> None:
        recover = engine.recover

        def interrupted(dropped: Any) -> None:
            if self.again:
                self.left = self.again
                self.again = 0
                sys.settrace(self)  # a trace function that raised was taken away
            recover(dropped)

        engine.recover = interrupted  # type: ignore[method-assign]
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call(engine, ids)
        finally:
            sys.settrace(before)
            engine.recover = recover  # type: ignore[method-assign]


def started(changes: type[Changes] = Changes) -> tuple[Engine, list[str]]:
    """An engine in the middle: two requests run, on a shared page, and one waits."""
    engine = Engine(twins("dense")[1], pages=9, page_size=16, max_batch=2)
    engine.changes = changes()
    ids = [engine.add(*request) for request in ASKED]
    engine.step()
    assert [len(engine.scheduler.running), len(engine.scheduler.waiting)] == [2, 1]
    return engine, ids


def abort(engine: Engine, ids: list[str]) -> None:
    engine.abort(ids[0])


def preempt(engine: Engine, ids: list[str]) -> None:
    engine.preempt(ids[0])


def release(engine: Engine, ids: list[str]) -> None:
    engine.release_memory()


def resume(engine: Engine, ids: list[str]) -> None:
    if not engine._released:
        engine.release_memory()
    engine.resume_memory()


def add(engine: Engine, ids: list[str]) -> None:
    engine.add(*ASKED[0])


def generate(engine: Engine, ids: list[str]) -> None:
    engine.generate(*zip(*ASKED))


def step(engine: Engine, ids: list[str]) -> None:
    engine.step()


CALLS = [abort, preempt, release, resume, add, generate, step]


def alone() -> list[dict[str, Any]]:
    engine = Engine(twins("dense")[1], pages=9, page_size=16)
    return [numbers(record) for record in engine.generate(*zip(*ASKED))]


def check(engine: Engine, ids: list[str], call: Callable[[Engine, list[str]], None], expected: list[dict[str, Any]]) -> None:
    """Every request that was there ends as if nothing had been; what an interrupted call queued is all there or not at all."""
    if engine._released:
        engine.resume_memory()
    done = {record.request_id: numbers(record) for record in engine.run()}
    for request_id, record in zip(ids, expected, strict=True):
        gone = request_id not in done and (call is step or (call is abort and request_id == ids[0]))
        assert gone or done[request_id] == record
    more = [record for request_id, record in done.items() if request_id not in ids]
    assert len(more) <= (call is add) and all(record == expected[0] for record in more)
    assert not engine.busy and not engine.requests.finished
    check_pages(engine)
    assert engine.scheduler.pool.available == 8


def lines_of(call: Callable[[Engine, list[str]], None], changes: type[Changes] = Changes) -> tuple[int, list[int]]:
    """How many lines a call runs, and in which of them its change is marked."""
    engine, ids = started(changes)
    counter = Interrupter(1 << 40)
    counter.engine = engine
    counter.call(call, engine, ids)
    return (1 << 40) - counter.left, counter.marked


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_line_loses_nothing(call: Callable[[Engine, list[str]], None]) -> None:
    expected = alone()
    count, _ = lines_of(call)
    assert count > 20
    for at in range(1, count + 1, 1 + count // 20):
        engine, ids = started()
        interrupter = Interrupter(at)
        with pytest.raises(KeyboardInterrupt):
            interrupter.call(call, engine, ids)
        assert interrupter.struck == 1
        check(engine, ids, call, expected)


@pytest.mark.parametrize("call", CALLS)
def test_a_second_interrupt_while_the_first_is_mended_leaks_nothing(call: Callable[[Engine, list[str]], None]) -> None:
    expected = alone()
    _, marked = lines_of(call)
    twice = 0
    for again in range(1, 60, 6):
        for at in (marked[len(marked) // 3], marked[-len(marked) // 4]):
            engine, ids = started()
            interrupter = Interrupter(at, again)
            with pytest.raises(KeyboardInterrupt):
                interrupter.call(call, engine, ids)
            twice += interrupter.struck - 1
            check(engine, ids, call, expected)
    assert twice > 5


class Unmarked(Changes):
    """A fault: changes leave no mark."""

    @contextmanager
    def change(self, *requests: Request) -> Iterator[None]:
        yield


def test_a_change_without_a_mark_is_caught() -> None:
    expected = alone()
    count, marked = lines_of(abort, Unmarked)
    caught = 0
    assert not marked
    for at in range(1, count, 5):
        engine, ids = started(Unmarked)
        with pytest.raises(KeyboardInterrupt):
            Interrupter(at).call(abort, engine, ids)
        try:
            check(engine, ids, abort, expected)
        except (AssertionError, RuntimeError, ValueError, KeyError):
            caught += 1
    assert caught > 5


def test_an_engine_whose_requests_are_in_no_queue_says_so() -> None:
    engine, ids = started()
    engine.scheduler.running.clear()
    engine.scheduler.waiting.clear()
    with pytest.raises(RuntimeError, match="3 requests are in progress and none has a row to push: 0 run, 0 wait"):
        engine.run()
    check(engine, ids, step, alone())  # and has mended it


def test_a_second_thread_is_refused_while_the_first_is_inside() -> None:
    engine, ids = started()
    said: list[str] = []

    def intrude(*_: Any) -> None:
        def other() -> None:
            for call in CALLS:
                with pytest.raises(ValueError, match="another thread is inside this engine"):
                    call(engine, ids)
                said.append(call.__name__)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        hook.remove()

    expected = alone()
    hook = engine.model.model.layers[0].register_forward_pre_hook(intrude)
    check(engine, ids, preempt, expected)
    assert said == [call.__name__ for call in CALLS]
    threads = [threading.Thread(target=engine.generate, args=([STEM[:5]], SamplingParams(max_new_tokens=1))) for _ in range(2)]
    for thread in threads:  # one after the other is fine
        thread.start()
        thread.join()
    assert not engine.busy
