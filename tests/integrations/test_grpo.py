"""examples/grpo.py: the reward rises and no byte differs, by the embedded engine and by a server; stale weights are noticed."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from server_stand_in import StandIn, serving

import zoo
from benchmarks import grpo as bench
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.rollouts import SamplingParams, check_draws
from zoo.sglang_plugin import Server

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3", layers=1)


def models(path: Path) -> tuple[Any, Any]:
    trainer = zoo.load(path, role="rl", device="cpu", master_dtype=torch.float32)
    return trainer, zoo.load(path, role="serving", device="cpu")


def test_the_reward_rises_and_no_byte_differs(grpo: Any, tmp_path: Path) -> None:
    trainer, server = models(make_tiny("qwen3", tmp_path / "tiny"))
    sampler = Engine(server, seed=0)
    rows = list(grpo.train(trainer, sampler, PROMPTS, grpo.even_tokens, steps=8, rate=3e-3, params=SHORT))
    assert [row["differing_bytes"] for row in rows] == [0] * 8
    assert [row["k3"] for row in rows] == [row["clip_ratio"] for row in rows] == [0.0] * 8
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1


def test_curves_have_the_rows_numbers_under_the_fields_names(grpo: Any, folder: Path) -> None:
    trainer, server = models(folder)

    told: list[dict[str, float]] = []

    class Listener:
        def on_step(self, row: dict[str, float]) -> None:
            told.append(row)

    sampler = Engine(server, seed=0)
    rows = list(grpo.train(trainer, sampler, PROMPTS, grpo.even_tokens, steps=2, group=2, params=SHORT, curves=Listener()))
    zeros = ("differing_bytes", "is_approx_k3_kl", "is_clip_ratio", "is_nan_ratio")
    expected = [
        {
            "step": row["step"],
            "rollout/reward": row["reward"],
            "train/loss": row["loss"],
            **{f"train/{name}": 0.0 for name in zeros},
            "rollout/partial_ratio": 0.0,
            "rollout/partial_span_max": 0.0,
        }
        for row in rows
    ]
    assert told == expected


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_5", "glm5"])
def test_other_families_train_too(grpo: Any, arch: str, tmp_path: Path) -> None:
    trainer, server = models(make_tiny(arch, tmp_path / arch))
    rows = list(grpo.train(trainer, Engine(server, seed=0), PROMPTS[:1], grpo.even_tokens, steps=2, group=4, params=SHORT))
    assert [row["differing_bytes"] for row in rows] == [0, 0]


def test_a_sampler_of_other_bytes_is_seen_in_every_number(grpo: Any, folder: Path) -> None:
    """The control: log-probabilities that a sampler reports with an error, as one of unaligned kernels does."""
    trainer, server = models(folder)
    engine = Engine(server, seed=0)

    class Inexact:
        def generate(self, *given: Any, **named: Any) -> Any:
            return [
                replace(record, filtered_log_probs=tuple(value + 0.3 * (i % 2) for i, value in enumerate(record.filtered_log_probs)))
                for record in engine.generate(*given, **named)
            ]

        update_weights = engine.update_weights

    [row] = grpo.train(trainer, Inexact(), PROMPTS, grpo.even_tokens, steps=1, group=2, params=SHORT)
    assert row["differing_bytes"] > 0 and row["k3"] > 0.01 and row["clip_ratio"] == 0.5


def test_the_script_runs(grpo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    grpo.main(["--steps", "2", "--group", "2", "--device", "cpu"])
    assert capsys.readouterr().out.count("differing bytes 0") == 2


def test_an_engine_that_was_not_updated_is_noticed(grpo: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server = models(folder)
    monkeypatch.setattr(Engine, "update_weights", lambda self, *given, **named: self.version)
    with pytest.raises(AssertionError, match="drawn by other weights than the trainer's"):
        list(grpo.train(trainer, Engine(server, seed=0), PROMPTS, grpo.even_tokens, steps=2, group=2, params=SHORT))


def test_advantages_are_of_the_group(grpo: Any) -> None:
    found = grpo.advantages([0.0, 1.0, 3.0, 3.0], 2)
    assert found[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4) and found[2:].tolist() == [0.0, 0.0]


class TestServer:
    """Against a stand-in of SGLang with the plugin, built on the embedded engine."""

    def test_the_script_runs_against_a_server(self, grpo: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        stand_in = StandIn(zoo.load(folder, role="serving", device="cpu"))
        out = tmp_path / "rows.jsonl"
        with serving(stand_in) as url:
            words = ["--model", str(folder), "--device", "cpu", "--server", url, "--steps", "3", "--group", "2", "--out", str(out)]
            grpo.main(words)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["differing_bytes"] for row in rows] == [0, 0, 0] and len(stand_in.labels) == 3
        assert capsys.readouterr().out.count("differing bytes 0") == 3

    def test_records_are_those_of_an_engine_asked_the_same(self, folder: Path) -> None:
        trainer, model = models(folder)
        asked = [replace(SHORT, seed=5), SamplingParams(temperature=0.0, max_new_tokens=4), replace(SHORT, seed=9, stop_token_ids=(4, 5))]
        prompts = [*PROMPTS, [7, 8]]
        expected = Engine(model, pages=64, page_size=16).generate(prompts, asked)
        with serving(StandIn(model)) as url:
            server = Server(url, seed=3)
            found = server.generate(prompts, asked)
            fresh = server.generate(PROMPTS, SHORT, n=2)
            assert server.fingerprint() == model.fingerprint()
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine.output_ids, mine.log_probs, mine.filtered_log_probs) == (
                theirs.output_ids,
                theirs.log_probs,
                theirs.filtered_log_probs,
            )
        assert len({record.sampling.seed for record in fresh}) == 4
        check_draws(trainer, *found, *fresh)

    def test_a_server_that_does_not_take_weights_is_noticed(self, grpo: Any, folder: Path) -> None:
        trainer, model = models(folder)
        stand_in = StandIn(model)
        with serving(stand_in) as url:
            server = Server(url)
            with pytest.raises(
                ValueError, match="the server did not take the weights: the weights were not updated: .* is no tensor of this"
            ):
                server.update_weights([("absent", torch.zeros(2))])
            stand_in.updates = False
            with pytest.raises(AssertionError, match="drawn by other weights than the trainer's"):
                list(grpo.train(trainer, server, PROMPTS, grpo.even_tokens, steps=2, group=2, params=SHORT))
            with pytest.raises(ValueError, match=r"the server refuses /generate: .*outside the vocabulary of 512"):
                server.generate([[600]], SHORT)
        with pytest.raises(ValueError, match="no SGLang server answers /generate at"):
            server.generate(PROMPTS, SHORT)

    def test_an_engine_of_this_process_takes_tensors(self, grpo: Any, folder: Path) -> None:
        trainer, model = models(folder)
        stand_in = StandIn(model)
        pushed: list[list[str]] = []

        class Object:
            """What Server calls of `sglang.Engine`."""

            def get_server_info(self) -> Any:
                return stand_in.answer("/server_info", {})

            def generate(self, **body: Any) -> Any:
                return stand_in.answer("/generate", body)

            def update_weights_from_tensor(self, tensors: list[Any]) -> tuple[bool, str]:
                pushed.append([name for name, _ in tensors])
                stand_in.engine.update_weights(tensors)
                return True, ""

        server = Server(Object())
        with torch.no_grad():
            other = zoo.load(folder, role="rl", device="cpu")
            next(iter(other.parameters())).mul_(2)
        assert server.update_weights(other.published_tensors(aliases=False)) == other.fingerprint().weights == server.fingerprint().weights
        assert len(pushed) == 1 and server.generate(PROMPTS, SHORT)[0].fingerprint.weights == other.fingerprint().weights
        server.update_weights(trainer.published_tensors(aliases=False))
        rows = list(grpo.train(trainer, server, PROMPTS, grpo.even_tokens, steps=2, group=2, params=SHORT))
        assert [row["differing_bytes"] for row in rows] == [0, 0] and len(pushed) == 4
        with pytest.raises(ValueError, match="version 'step 1' is a label of servers with an address"):
            server.update_weights([], version="step 1")


@pytest.mark.parametrize("rate", ["nan", "0", "inf"])
def test_a_rate_that_is_no_rate_is_refused(grpo: Any, rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grpo.main(["--rate", rate])
    assert f"must be finite and above 0, not {rate}" in capsys.readouterr().err


def test_the_benchmark_writes_one_row_of_all_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    words = [
        "qwen3",
        "--size",
        "tiny",
        "--layers",
        "1",
        "--device",
        "cpu",
        "--steps",
        "2",
        "--group",
        "2",
        "--tokens",
        "4",
        "--out",
        str(out),
    ]
    assert bench.main(words) == 0 and bench.main(words) == 0
    first, again = (json.loads(line) for line in out.read_text().splitlines())
    assert first["steps"] == 2 and first["differing_bytes"] == [0, 0] and first["compared_bytes"] == 2 * 16 * 4 * 4
    assert first["reward"] == again["reward"] and len(first["reward"]) == 2  # the same seeds, the same tokens
    assert "embedded: 2 steps, 512 bytes compared, 0 differ" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main([*words, "--sampler", "unaligned"])
    monkeypatch.setattr(bench, "sampler_of", lambda *given: 1 / 0)
    assert bench.main([*words, "--sampler", "embedded", "embedded"]) == 1  # each is tried
    assert capsys.readouterr().out.count("embedded: ZeroDivisionError") == 2
