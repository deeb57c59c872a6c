"""Golden bytes: what small models of every architecture do has the stored hashes, on the machine and versions they were made on.

A change that moves a byte on purpose raises a version (CONTRIBUTING.md), then rewrites them: `python -m tests.golden.rewrite`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden import rewrite
from tests.golden.collect import Case, Subject, cases, differing, made_on
from tests.models import planted, planted_delta

STORED = sorted(Path(__file__).parent.glob("*.json"))
TINY = {name: Case(name, "tiny", "aligned") for name in ("qwen3", "qwen3_5", "glm5", "deepseek_v4")}
EVERY = [pytest.param(case, "cpu", id=case.name) for case in cases("cpu")]
EVERY += [pytest.param(case, "cuda", id=f"{case.name}, cuda", marks=pytest.mark.gpu) for case in cases("cuda")]


@cache
def entries(case: Case, device: str) -> dict[str, str]:
    return case.subject(device).entries()


def stored_here(files: list[dict[str, Any]], here: dict[str, str], name: str) -> dict[str, Any]:
    """The file of this case that was made on such a machine. Skips, naming both, where there is none."""
    files = [file for file in files if name in file["cases"]]
    alike = [file for file in files if file["made_on"].keys() == here.keys()]
    for file in alike:
        if file["made_on"] == here:
            return file
    pytest.skip(f"golden bytes were made on {' and '.join(str(file['made_on']) for file in alike) or 'no such device'}, here is {here}")


@pytest.mark.parametrize(("case", "device"), EVERY)
def test_bytes_are_the_stored_ones(case: Case, device: str) -> None:
    stored = stored_here([rewrite.read(path) for path in STORED], made_on(device), case.name)
    moved = differing(stored["cases"][case.name], entries(case, device))
    assert not moved, f"{len(moved)} of {len(entries(case, device))} entries have other bytes: {', '.join(moved)}"


def test_files_hold_every_case_and_no_other() -> None:
    """A file of one machine may lack some, another file has them."""
    found: dict[str, set[str]] = {}
    for path in STORED:
        file = rewrite.read(path)
        device = "cpu" if "cpu" in file["made_on"] else "cuda"
        found.setdefault(device, set()).update(file["cases"])
    assert "cpu" in found
    for device, names in found.items():
        assert names == {case.name for case in cases(device)}, device


def test_another_machine_is_skipped_with_both_names() -> None:
    file = {"made_on": {"torch": "2.0", "cpu": "AVX2", "maker": "one"}, "cases": {"a": {}}}
    here = {"torch": "2.1", "cpu": "NEON", "maker": "another"}
    with pytest.raises(pytest.skip.Exception, match=r"(?s)2\.0.*AVX2.*one.*2\.1.*NEON.*another"):
        stored_here([file], here, "a")
    with pytest.raises(pytest.skip.Exception, match="no such device, here is .*H100"):
        stored_here([file], {"torch": "2.1", "triton": "3", "device": "H100"}, "a")
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        stored_here([file], file["made_on"], "b")
    assert stored_here([file], file["made_on"], "a") is file


# controls: each fault moves the entries that it should, and leaves the others


def flipped_bit(subject: Subject) -> None:
    """One bit of one weight of the first layer, in the trainer and the server."""
    name = next(name for name, _ in sorted(subject.trainer.published_tensors()) if "layers.0" in name and "norm" not in name)
    for model in (subject.trainer, subject.server):
        weight = dict(model.published_tensors())[name].clone()
        weight.view(-1).view(torch.int16)[3] ^= 1 << 6
        model.load_weights([(name, weight)])


def narrow_group(subject: Subject) -> None:
    planted.narrow_vocabulary_group(subject.trainer)


def stale_slot(subject: Subject) -> None:
    planted.stale_page(subject.server)


def other_tokens(subject: Subject) -> None:
    subject.documents[2] = subject.documents[2].roll(1)


def moved_by(fault: Callable[[Subject], None], case: Case) -> list[str]:
    subject = case.subject("cpu")
    fault(subject)
    return differing(entries(case, "cpu"), subject.entries())


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_a_flipped_bit_is_seen(case: Case) -> None:
    moved = moved_by(flipped_bit, case)
    still = set(entries(case, "cpu")) - set(moved)
    assert {"published tensors", "content hash", "log_prob, packed", "prefill in chunks, log_prob", "decode, logits"} <= set(moved)
    assert "drawn tokens' log_prob" in moved and {"gradient, model.norm.weight", "gradient, norm.weight"} & set(moved)
    # tokens are few, and what lies below the weight does not see it
    assert len(still) < len(moved) / 4, still


def test_another_group_of_the_vocabulary_is_seen() -> None:
    moved = moved_by(narrow_group, TINY["qwen3"])
    assert {"log_prob, packed", "log_prob, alone", "entropy"} <= set(moved)
    assert not [name for name in moved if name.startswith(("prefill", "decode", "drawn", "published"))]


def test_a_stale_slot_of_a_page_is_seen() -> None:
    moved = moved_by(stale_slot, TINY["qwen3"])
    assert {"prefill at once, keys", "prefill in chunks, values", "decode, logits"} <= set(moved)
    assert not [name for name in moved if name.startswith(("log_prob", "gradient", "published"))]


def test_a_state_rounded_between_pushes_is_seen() -> None:
    case = TINY["qwen3_5"]
    subject = case.subject("cpu")
    with planted.recurrent(subject.server, "gated_delta", planted_delta.__name__):
        moved = differing(entries(case, "cpu"), {**entries(case, "cpu"), **subject.served()})
    assert {"decode, state, in FP32", "prefill in chunks, state, in FP32", "prefill in chunks, log_prob"} <= set(moved)


def test_other_tokens_are_seen_by_all_that_reads_it() -> None:
    moved = moved_by(other_tokens, TINY["qwen3"])
    assert {"log_prob, packed", "log_prob, in reverse", "log_prob, alone", "entropy", "log_prob, filtered"} <= set(moved)
    assert {"gradient, model.layers.0", "prefill at once, keys", "prefill in chunks, log_prob", "decode, values"} <= set(moved)
    assert not {"published tensors", "content hash", "drawn tokens", "prompts' log_prob"} & set(moved)


# the script


def test_moved_bytes_are_rewritten_with_a_reason_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"a": {"x": "1", "y": "2"}}
    monkeypatch.setattr(rewrite, "collected", lambda device, architecture: [(n, e) for n, e in found.items() if architecture in (None, n)])
    path = tmp_path / "bytes.json"

    def run(*arguments: str) -> int:
        return rewrite.main(list(arguments))

    assert run("--out", str(path)) == 0
    assert rewrite.read(path) == {"made_on": made_on("cpu"), "reasons": [], "cases": found}
    assert run("--against", str(path)) == 0
    found["b"] = {"x": "1"}
    assert run("--against", str(path)) == 1
    assert "b: x\n1 of 3 entries differ" in capsys.readouterr().out
    assert run("--out", str(path)) == 0  # another case moves no byte
    found["a"]["y"] = "3"
    before = path.read_text()
    monkeypatch.setattr(rewrite, "GEOMETRIES", found)
    assert run("--out", str(path), "--architecture", "b") == 0 and path.read_text() == before
    assert run("--out", str(path)) == 1
    assert path.read_text() == before and "--reason" in capsys.readouterr().err
    assert run("--out", str(path), "--reason", "y is rounded once") == 0
    assert rewrite.read(path)["reasons"] == ["y is rounded once"] and rewrite.read(path)["cases"] == found
    path.write_text(path.read_text().replace(torch.__version__, "0.1"))
    with pytest.raises(SystemExit):
        run("--against", str(path))
    assert "0.1" in capsys.readouterr().err
