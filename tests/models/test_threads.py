"""Small models run on one CPU thread, whose number is given back; bytes do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weights_tools.make_tiny import make_tiny
from zoo.common import threads
from zoo.common.engine import Engine
from zoo.common.generate import generate_command
from zoo.common.rollouts import Completion, SamplingParams
from zoo.qwen3 import SIZES, Qwen3ForServing

PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True, seed=4)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Qwen3ForServing:
    return Qwen3ForServing.from_config(SIZES["tiny"], device="cpu")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of every push."""
    counts: list[int] = []
    push = Engine._push

    def watched(self: Engine) -> None:
        counts.append(torch.get_num_threads())
        push(self)

    monkeypatch.setattr(Engine, "_push", watched)
    return counts


def drawn(model: Qwen3ForServing) -> Completion:
    return Engine(model, pages=4).generate([[5, 6, 7]], PARAMS)[0]


def test_an_engine_of_a_small_model_takes_one_thread_and_gives_the_others_back(model: Qwen3ForServing, seen: list[int]) -> None:
    drawn(model)
    assert set(seen) == {1} and torch.get_num_threads() == 2


def test_a_step_that_raises_gives_them_back_too(model: Qwen3ForServing, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Engine) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(Engine, "_push", fails)
    with pytest.raises(RuntimeError, match="no step"):
        drawn(model)
    assert torch.get_num_threads() == 2


def test_a_large_model_keeps_its_threads_and_the_bytes(model: Qwen3ForServing, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    small = drawn(model)
    monkeypatch.setattr(threads, "LARGE", 10)
    seen.clear()
    large = drawn(model)
    assert set(seen) == {2} and large.to_dict() == small.to_dict()


def test_generate_takes_one_thread(seen: list[int], tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path / "tiny")
    made: list[Any] = generate_command(folder, "Guess", 2, device="cpu")
    assert set(seen) == {1} and torch.get_num_threads() == 2 and len(made[0].completion.output_ids) <= 2
