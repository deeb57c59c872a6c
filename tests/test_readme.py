"""The README's example, and that of GLM-5's page, run as they stand there, on a tiny checkpoint and a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from weights_tools.make_tiny import make_tiny

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> str:
    [block] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block.count('"Qwen/Qwen3-8B"') == 2 and '"cuda"' in block
    folder = make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "checkpoint", layers=2)
    return block.replace("Qwen/Qwen3-8B", str(folder)).replace('"cuda"', '"cpu"')


def test_the_example_runs(example: str) -> None:
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    trainer = names["trainer"]
    engine = names["engine"]
    assert trainer.weights_version == engine.fingerprint().weights != names["done"].fingerprint.weights  # the step arrived
    assert len(names["done"].output_ids) > 1
    assert engine.fingerprint().realisation["weights_label"] == "step 1"


def test_its_comparison_can_fail(example: str) -> None:
    """The control: other sampling parameters at `score` are other numbers."""
    assert "sampling=batch.sampling" in example
    with pytest.raises(AssertionError):
        exec(compile(example.replace("sampling=batch.sampling", "sampling=None"), "README.md", "exec"), {"torch": torch})


def test_the_example_of_glm_runs(tmp_path: Path) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (README.parent / "zoo" / "glm5" / "README.md").read_text(), re.DOTALL)
    folder = make_tiny("glm5", tmp_path / "checkpoint")
    assert block.count('"out/tiny-glm5"') == 2 == block.count('"cuda"')
    names: dict[str, object] = {}
    exec(compile(block.replace("out/tiny-glm5", str(folder)).replace('"cuda"', '"cpu"'), "README.md", "exec"), names)
    names["trainer"].fingerprint().check(names["server"].fingerprint())
