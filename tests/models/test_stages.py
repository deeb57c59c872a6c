"""A command's last line says how long each stage took."""

from __future__ import annotations

import re

import pytest

from zoo.verify import stages
from zoo.verify.stages import Stages


def test_stages_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stages.time, "monotonic", lambda: now[0])
    found = Stages()
    with found.stage("building"):
        now[0] += 2
    found.add("rung 1", 0.5)
    with pytest.raises(ValueError, match="broken"), found.stage("rung 3"):
        now[0] += 3
        raise ValueError("broken")
    found.add("rung 1", 1.0)
    now[0] += 0.25
    assert str(found) == "took 5.2 s: building 2.0, rung 1 1.5, rung 3 3.0"


def test_verify_names_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["verify", "qwen3", "--size", "tiny", "--layers", "1", "--device", "cpu", "--rungs", "1,3", "--lengths", "9"])
    assert ended.value.code == 0
    assert re.search(r"took [\d.]+ s: building [\d.]+, rung 1 [\d.]+, rung 3 [\d.]+\n", capsys.readouterr().out)
