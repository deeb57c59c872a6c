"""FSDP2 over two processes: what is published, hashed, checked and saved has the whole model's bytes, for every family."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weights_tools.make_tiny import make_tiny
from zoo.common.processes import RECENT, Alone, InStep, Recent, processes_of, whole
from zoo.common.registry import architectures
from zoo.testing import assert_same_bytes

LAYERS = {"qwen3_5": 4, "qwen3_5_moe": 4, "glm5": 3}  # which have every kind; else 1
WORKER = Path(__file__).with_name("sharded_worker.py")


def test_two_processes_have_the_whole_models_bytes(tmp_path: Path) -> None:
    for arch in architectures():
        make_tiny(arch, tmp_path / arch, layers=LAYERS.get(arch, 1))
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=root,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()  # one that waits for the other's exception
    ended = [process.returncode for process in started]
    assert ended == [0, 0] and all(text.rstrip().endswith("all equal") for text in said), "\n".join(text[-3000:] for text in said)


def test_a_whole_model_is_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    processes = processes_of([parameter])
    assert type(processes) is Alone and processes.writes and not processes.sharded and processes.told([5]) == [5]
    with pytest.raises(ValueError, match="own"), processes.agreed():
        raise ValueError("own")
    assert whole(parameter).data_ptr() == parameter.data_ptr() and not whole(parameter).requires_grad


def test_recent_tensors_are_read_once() -> None:
    read: list[str] = []

    def tensor(name: str) -> torch.Tensor:
        read.append(name)
        return torch.tensor([ord(name)])

    recent = Recent(tensor)
    for name in "ababcacb":
        assert_same_bytes(recent(name), torch.tensor([ord(name)]))
    assert read == ["a", "b", "c"] and RECENT == 3
    assert [int(recent(name)) for name in "dbcda"] == [ord(name) for name in "dbcda"]
    assert read == ["a", "b", "c", "d", "a"]


def test_who_goes_along_reads_what_is_left() -> None:
    read: list[str] = []
    step = InStep(["a", "a", "b", "c"], lambda name: read.append(name) or torch.zeros(1))
    step("a")
    step("a")
    with pytest.raises(AssertionError, match="c is read where b was said to be"):
        step("c")
    step.rest()
    assert read == ["a", "a", "b", "c"]
