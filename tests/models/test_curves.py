"""Curves of a step: what trainer and sampler differ by, under the field's names, and the writer of event files."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.common.engine import Engine
from zoo.common.rollouts import Completion, SamplingParams, pack
from zoo.common.rollouts.curves import TensorBoard, mismatch, partial
from zoo.qwen3 import SIZES, Qwen3ForRL, Qwen3ForServing

CONFIG = replace(SIZES["tiny"], layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, vocabulary=300)


@pytest.fixture(scope="module")
def records() -> list[Completion]:
    engine = Engine(Qwen3ForServing.from_config(CONFIG, seed=3, device="cpu"), pages=8)
    return engine.generate([[1, 40, 50], [1, 7]], SamplingParams(seed=1, top_p=0.9, max_new_tokens=6, ignore_eos=True), n=2)


def test_one_program_on_the_same_weights_is_not_apart(records: list[Completion]) -> None:
    batch = pack(records)
    model = Qwen3ForRL.from_config(CONFIG, seed=3, device="cpu")
    zero = dict.fromkeys(("train/differing_bytes", "train/is_approx_k3_kl", "train/is_clip_ratio", "train/is_nan_ratio"), 0.0)
    assert mismatch(batch, model.score(batch.ids_R, batch.cu_seqlens, sampling=batch.sampling)) == zero
    with torch.no_grad():
        model.model.norm.weight *= 1.5
    other = mismatch(batch, model.score(batch.ids_R, batch.cu_seqlens, sampling=batch.sampling))
    assert other["train/differing_bytes"] > 0 and other["train/is_approx_k3_kl"] > 0 and 0 < other["train/is_clip_ratio"] <= 1


def test_each_number_is_its_formula(records: list[Completion]) -> None:
    batch = pack(records)
    apart = torch.zeros(int(batch.drawn_R.sum()))
    apart[:5] = torch.tensor([0.1, -0.1, 0.5, -torch.inf, torch.nan])
    scored = torch.full(batch.ids_R.shape, -9.0)  # rows that draw nothing do not count
    scored[batch.drawn_R] = batch.sampled_R[batch.drawn_R] + apart
    found = mismatch(batch, scored)
    count = len(apart)
    known = [float(scored[batch.drawn_R][i].double() - batch.sampled_R[batch.drawn_R][i].double()) for i in range(count) if i not in (3, 4)]
    assert found["train/is_approx_k3_kl"] == pytest.approx(sum(math.expm1(d) - d for d in known) / len(known), rel=1e-12)
    assert found["train/is_clip_ratio"] == 3 / count and found["train/is_nan_ratio"] == 2 / count
    assert mismatch(batch, scored, (0.95, 1.05))["train/is_clip_ratio"] == 5 / count
    nothing = torch.full_like(scored, torch.nan)
    assert math.isnan(mismatch(batch, nothing)["train/is_approx_k3_kl"]) and mismatch(batch, nothing)["train/is_nan_ratio"] == 1.0


@pytest.mark.parametrize("bounds", [(1.0, 1.2), (0.8, 1.0), (-0.1, 1.2), (1.2, 0.8)])
def test_bounds_hold_one(records: list[Completion], bounds: tuple[float, float]) -> None:
    batch = pack(records)
    with pytest.raises(ValueError, match="bounds of a ratio hold 1 between them, not"):
        mismatch(batch, batch.sampled_R, bounds)


def test_records_of_several_weights_are_counted(records: list[Completion]) -> None:
    assert partial(records) == {"rollout/partial_ratio": 0.0, "rollout/partial_span_max": 0.0}
    first = records[0]
    kept = first.versions[:3]
    aged = replace(first, versions=(*kept, "b", "b", "c", *["b"] * (len(first.versions) - 6)), exact=False)
    assert partial([aged, *records[1:]]) == {"rollout/partial_ratio": 0.25, "rollout/partial_span_max": 3.0}
    with pytest.raises(ValueError, match="no record that drew a token"):
        partial([])


def test_without_tensorboard_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"need its package \(pip install tensorboard\)"):
        TensorBoard(tmp_path)


def test_every_number_of_a_row_is_a_scalar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            told.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def flush(self) -> None:
            told.append("flushed")

        def close(self) -> None:
            told.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    with TensorBoard(tmp_path) as curves:
        curves.on_step({"step": 3, "rollout/reward": 0.5, "train/is_clip_ratio": 0.0})
        with pytest.raises(ValueError, match="has the entry 'step', this one a, b"):
            curves.on_step({"a": 1.0, "b": 2.0})
    assert told == [str(tmp_path), ("rollout/reward", 0.5, 3), ("train/is_clip_ratio", 0.0, 3), "flushed", "closed"]


def test_event_files_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as curves:
        for step in range(1, 4):
            curves.on_step({"step": step, "train/is_approx_k3_kl": step / 4})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/is_approx_k3_kl")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
