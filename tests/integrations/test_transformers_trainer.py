"""transformers' Trainer on a bare ForRL, which has what it asks for; and what peft is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.training import ForRL
from zoo.testing import LawBroken, assert_same_bytes

ROWS = [{"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}, {"input_ids": [5, 6, 7, 8, 10], "labels": [5, 6, 7, 8, -100]}] * 4
LAYERS = {"qwen3": 1, "qwen3_moe": 1, "qwen3_5": 4, "glm5": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3", layers=1)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def trained(folder: Path, work: Path, **settings: Any) -> tuple[ForRL, Trainer]:
    model = zoo.load(folder, device="cpu")
    assert isinstance(model, ForRL)
    usual = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
    objects = {name: settings.pop(name) for name in ("data_collator", "processing_class", "compute_metrics") if name in settings}
    arguments = TrainingArguments(str(work), use_cpu=True, report_to="none", disable_tqdm=True, seed=1, **{**usual, **settings})
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS, **{"data_collator": collate, **objects})
    trainer.train()
    return model, trainer


def test_it_trains_evaluates_and_aligns_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    def shape(predicted: Any) -> dict[str, Any]:
        return {"shape": list(predicted.predictions.shape)}

    model, trainer = trained(folder, tmp_path, processing_class=AutoTokenizer.from_pretrained(folder), compute_metrics=shape)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < 0.5 * losses[0]
    found = trainer.evaluate()
    assert found["eval_shape"] == [8, 5, 512] and found["eval_loss"] < losses[0]
    before = model.fingerprint()
    model.save_pretrained(tmp_path / "out")
    assert zoo.load(tmp_path / "out", device="cpu").fingerprint().weights == before.weights


def test_padding_free_checkpointed_and_accumulated_steps_are_the_same_steps(folder: Path, tmp_path: Path) -> None:
    plain = dict(trained(folder, tmp_path / "plain")[0].named_parameters())
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    ways: dict[str, dict[str, Any]] = {
        "padding free": {"data_collator": flat},
        "padding free, positions alone": {"data_collator": DataCollatorWithFlattening()},
        "checkpointed": {"gradient_checkpointing": True},
        "mixed precision": {"bf16": True},
    }
    for name, way in ways.items():
        model, _ = trained(folder, tmp_path / name, **way)
        assert_same_bytes({n: p.detach() for n, p in model.named_parameters()}, {n: p.detach() for n, p in plain.items()}, name)
    model, _ = trained(folder, tmp_path / "control", learning_rate=1.1e-2)
    with pytest.raises(LawBroken):
        assert_same_bytes({n: p.detach() for n, p in model.named_parameters()}, {n: p.detach() for n, p in plain.items()})


@pytest.mark.parametrize("arch", LAYERS)
def test_every_family_has_what_a_trainer_asks_for(arch: str, tmp_path: Path) -> None:
    path = make_tiny(arch, tmp_path / arch, layers=LAYERS[arch])
    _, trainer = trained(path, tmp_path / "work", max_steps=1)
    assert [entry["loss"] > 0 for entry in trainer.state.log_history if "loss" in entry] == [True]
    assert trainer.model.config.to_dict()["model_type"] and '"hidden_size"' in trainer.model.config.to_json_string()


@pytest.mark.parametrize("settings", [{}, {"task_type": "CAUSAL_LM"}, {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}])
def test_peft_is_told_that_lora_is_coming(folder: Path, settings: dict[str, Any]) -> None:
    model = zoo.load(folder, device="cpu")
    with pytest.raises(ValueError, match="LoRA is not built yet, it is coming"):
        peft.get_peft_model(model, peft.LoraConfig(**settings))
    assert not model.peft_config and model.score([5, 6, 7], [0, 3]).shape == (3,)  # nothing was put into it
