"""examples/grpo_trl.py: TRL's GRPOTrainer on our engine's completions, its log-probabilities those of `score`."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weights_tools.make_tiny import make_tiny
from zoo.common.rollouts import SamplingParams
from zoo.testing import LawBroken, assert_same_bytes


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("trl")
    path = Path(__file__).resolve().parents[2] / "examples" / "grpo_trl.py"
    spec = importlib.util.spec_from_file_location("grpo_trl", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3", layers=1)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CI", "1")  # no telemetry
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SHORT: dict[str, Any] = {"disable_tqdm": True, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}


def test_it_trains_and_no_byte_differs(example: Any, folder: Path, tmp_path: Path) -> None:
    trainer, rollouts = example.trainer_of(folder, tmp_path, max_steps=3, temperature=0.9, **SHORT)
    first = trainer.model.rl.weights_version
    trainer.train()
    rows = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert rollouts.differing == [0, 0, 0] and len(rows) == 3
    assert trainer.model.rl.weights_version != first and all(row["clip_ratio/region_mean"] == 0 for row in rows)


def test_the_override_gives_what_score_gives(example: Any, folder: Path, tmp_path: Path) -> None:
    trainer, _ = example.trainer_of(folder, tmp_path, max_steps=1, temperature=0.8, **SHORT)
    documents = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]  # three tokens of each are its completion; the second's last one is padding
    ids = torch.tensor([documents[0], [3, 3, *documents[1]]])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 0]])
    found, entropy, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 3)
    params = SamplingParams(temperature=0.8)
    rl = trainer.model.rl
    for line, document in enumerate((documents[0], documents[1][:3])):
        scores = rl.score(document, [0, len(document)], sampling=params, entropy=True)
        rows = slice(2, 5) if line == 0 else slice(0, 2)
        count = rows.stop - rows.start
        assert_same_bytes(found[line, :count].contiguous(), scores.log_prob_R[rows].contiguous())
        assert_same_bytes(entropy[line, :count].contiguous(), scores.entropy_R[rows].contiguous())
    assert found[1, 2] == 0.0  # padding
    other = rl.score(documents[0], [0, 6]).detach()
    with pytest.raises(LawBroken):  # the control: another temperature
        assert_same_bytes(found[0].detach().contiguous(), other[2:5].contiguous())


def test_the_script_runs(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["grpo_trl.py", "--steps", "1"])
    example.main()
    assert "differing bytes 0" in capsys.readouterr().out
