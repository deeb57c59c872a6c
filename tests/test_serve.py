"""The benchmark of servers: what is asked of SGLang's own tools, and what is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import serve


def test_loads_are_read_and_named_alike() -> None:
    loads = serve.parse_loads("64x1024x512,1x32x8@0.95")
    assert [load.label for load in loads] == ["64x1024x512", "1x32x8@0.95"]
    assert loads[1].top_p == 0.95
    assert [load.label for load in serve.parse_loads(serve.LOADS)] == serve.LOADS.split(",")


@pytest.mark.parametrize("text", ["", "64x128", "0x1x1", "1x1x1@2", "1x2x3,"])
def test_what_is_no_load_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not CONCURRENCYxINxOUT"):
        serve.parse_loads(text)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert serve.main(["--checkpoint", str(tmp_path)]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_contenders_differ_in_the_backend_alone(tmp_path: Path) -> None:
    stock, zoo = (serve.server_command(tmp_path, 1, serve.CONTENDERS[name]) for name in ("stock", "zoo"))
    assert zoo == [*stock, "--attention-backend", "zoo"]


def test_a_load_keeps_its_numbers_on_the_way_to_the_client(tmp_path: Path) -> None:
    [load] = serve.parse_loads("16x8192x1024@0.9")
    command = serve.client_command(tmp_path, 7, load, tmp_path / "out.jsonl")
    said = dict(zip(command, command[1:], strict=False))
    assert (said["--random-input-len"], said["--random-output-len"], said["--max-concurrency"]) == ("8192", "1024", "16")
    assert (said["--top-p"], said["--num-prompts"], said["--base-url"]) == ("0.9", "48", "http://127.0.0.1:7")


def test_an_answer_without_a_number_is_refused() -> None:
    whole = {name: 1.0 for name in serve.KEPT}
    assert set(serve.answer_of(json.dumps(whole))) == set(serve.KEPT.values())
    whole.pop("p99_itl_ms")
    with pytest.raises(ValueError, match="p99_itl_ms"):
        serve.answer_of(json.dumps(whole))


def test_ratios_are_of_the_same_load_and_turn() -> None:
    rows = [
        {"contender": "stock", "load": "a", "turn": "first", "tokens_per_s": 50.0},
        {"contender": "stock", "load": "a", "turn": "again", "tokens_per_s": 100.0},
        {"contender": "zoo", "load": "a", "turn": "again", "tokens_per_s": 90.0},
        {"contender": "zoo", "load": "b", "turn": "again", "tokens_per_s": 90.0},
    ]
    found = serve.with_ratios(rows)
    assert [row.get("over_stock") for row in found] == [None, None, 0.9, None]


def test_a_server_that_ends_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = "print('compiled _linear after ready: a prefill'); print('no such model')"
    monkeypatch.setattr(serve, "server_command", lambda *given: [serve.sys.executable, "-c", said])
    record = serve.Recorder(None, {})
    serve.measure(tmp_path, "stock", serve.parse_loads("1x1x1"), tmp_path, record, {}, 5)
    [row] = record.rows
    assert "no such model" in row["error"]
    assert "stock: compiled _linear after ready: a prefill\n" in capsys.readouterr().out
