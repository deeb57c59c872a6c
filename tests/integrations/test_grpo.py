"""examples/grpo.py: the reward rises, no byte differs, and what was drawn by other weights is noticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.rollouts import SamplingParams

PROMPTS = [[1, 40, 50, 60], [1, 7, 8, 9]]
SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True, top_p=0.98)


@pytest.fixture(scope="module")
def grpo() -> Any:
    path = Path(__file__).parents[2] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models(arch: str, folder: Path) -> tuple[Any, Any]:
    path = make_tiny(arch, folder / arch)
    return zoo.load(path, role="rl", device="cpu", master_dtype=torch.float32), zoo.load(path, role="serving", device="cpu")


def test_the_reward_rises_and_no_byte_differs(grpo: Any, tmp_path: Path) -> None:
    trainer, server = models("qwen3", tmp_path)
    rows = list(grpo.train(trainer, server, PROMPTS, grpo.even_tokens, steps=8, rate=3e-3, params=SHORT))
    assert [row["differing_bytes"] for row in rows] == [0] * 8
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_5", "glm5"])
def test_other_families_train_too(grpo: Any, arch: str, tmp_path: Path) -> None:
    trainer, server = models(arch, tmp_path)
    rows = list(grpo.train(trainer, server, PROMPTS[:1], grpo.even_tokens, steps=2, group=4, params=SHORT))
    assert [row["differing_bytes"] for row in rows] == [0, 0]


def test_an_engine_that_was_not_updated_is_noticed(grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server = models("qwen3", tmp_path)
    monkeypatch.setattr(Engine, "update_weights", lambda self, *given, **named: self.version)
    with pytest.raises(AssertionError, match="drawn by other weights than the trainer's"):
        list(grpo.train(trainer, server, PROMPTS, grpo.even_tokens, steps=2, group=2, params=SHORT))


def test_a_bit_is_counted(grpo: Any) -> None:
    scored = torch.tensor([-1.0, -2.0])
    other = torch.nextafter(scored, torch.zeros(2))
    assert grpo.differing_bytes(scored, scored.tolist()) == 0 < grpo.differing_bytes(scored, other.tolist())


def test_masters_move_where_a_bf16_parameter_would_not(grpo: Any, tmp_path: Path) -> None:
    trainer, server = models("qwen3", tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.named_parameters()}
    list(grpo.train(trainer, server, PROMPTS, grpo.even_tokens, steps=1, rate=1e-6, params=SHORT))
    moved = [(p.detach() != before[name]).float().mean() for name, p in trainer.named_parameters() if name != "model.embed.weight"]
    rounded = [(p.detach().bfloat16() != before[name].bfloat16()).float().mean() for name, p in trainer.named_parameters()]
    assert min(moved) > 0.5 > 0.1 > max(rounded)


def test_advantages_are_of_the_group(grpo: Any) -> None:
    found = grpo.advantages([0.0, 1.0, 3.0, 3.0], 2)
    assert found[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4) and found[2:].tolist() == [0.0, 0.0]
