"""The proof's own arithmetic: what it compares, and that a touched record, a short answer or a failed phase is no proof."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sglang
from benchmarks import sglang_phases as phases
from benchmarks import sglang_proof as proof
from benchmarks.common import Recorder
from zoo.common import ops
from zoo.common.rollouts import Completion, SamplingParams
from zoo.verify import live
from zoo.verify.samplers import Embedded
from zoo.verify.subject import Settings, build


def served(arch: str) -> tuple[Any, list[dict[str, Any]]]:
    subject = build(arch, checkpoint=None, device="cpu")
    subject.draw((20, 33))
    completions = live.sample(subject, Settings((20, 33), requests=6, drawn=8), Embedded(subject))
    return subject.trainer, [
        {"phase": "p", "updated": False, "record": c.to_dict(), "cached": 3, "retracted": 1, "experts": None, "weights": None}
        for c in completions
    ]


@pytest.fixture(scope="module")
def lines() -> tuple[Any, list[dict[str, Any]]]:
    return served("qwen3")


def counted(trainer: Any, lines: list[dict[str, Any]]) -> proof.Count:
    count = proof.Count()
    for what, trained, given, where in proof._compared(trainer, lines, 0):
        count.add(what, trained, given, where)
    return count


def reported(*found: proof.Phase) -> tuple[int, list[dict[str, Any]]]:
    record = Recorder(None, {})
    return proof.report(found, proof.Model("qwen3", "tiny", None), record), record.rows


def test_equal_records_are_proof(lines: Any) -> None:
    count = counted(*lines)
    assert count.compared == {"temperature": 48, "filtered": 48} and not any(count.differing.values())
    status, rows = reported(proof.Phase("p", lines[1], {"seconds": 2.0}, count))
    assert status == 0 and rows[0]["requests"] == 6 and rows[0]["cached_tokens"] == 18 and rows[0]["retractions"] == 6
    assert rows[0]["phase"] == "p" and rows[0]["seconds"] == 2.0


def test_rows_say_which_provider_served_each_product(lines: Any) -> None:
    trainer, good = lines
    ran = trainer.fingerprint().realisation
    products = {name: ran[name] for name in ran if name.split()[0] in ("linear", "experts") and " " in name}
    first = next(iter(products))
    printed = good[1]["record"]["fingerprint"]
    other = {**printed, "realisation": {**printed["realisation"], first: "another"}}
    mixed = [good[0], {**good[1], "record": {**good[1]["record"], "fingerprint": other}}]
    _, rows = reported(proof.Phase("alike", good), proof.Phase("mixed", mixed), proof.Phase("nothing"))
    assert len(products) > 1 and rows[0]["providers"] == products
    assert rows[1]["providers"] == {**products, first: " and ".join(sorted(("another", products[first])))}
    assert rows[2]["providers"] == {}


@pytest.mark.parametrize("name", ["log_probs", "filtered_log_probs"])
def test_one_bit_is_caught(lines: Any, name: str) -> None:
    trainer, good = lines
    completion = Completion.from_dict(good[4]["record"])
    values = torch.tensor(vars(completion)[name])
    values[5] = torch.nextafter(values[5], torch.tensor(-100.0))
    touched = replace(completion, **{name: tuple(values.tolist())})
    bad = [*good[:4], {**good[4], "record": touched.to_dict()}, *good[5:]]
    count = counted(trainer, bad)
    assert sum(count.differing.values()) >= 1 and "request 4" in count.first
    assert reported(proof.Phase("p", bad, {}, count))[0] == 1


def routed(trainer: Any, ids: list[int]) -> list[torch.Tensor]:
    """Weights and experts [rows, layers, K] of one document."""
    found: list[Any] = []
    with ops.watch(lambda contract, seen, result: contract.name == "route" and found.append(result)), torch.no_grad():
        trainer.score(torch.tensor(ids), torch.tensor([0, len(ids)]))
    return [torch.stack([layer[i] for layer in found], 1) for i in range(2)]


def test_one_bit_of_routing_is_caught() -> None:
    """Experts and weights as SGLang's API returns them: base64 of all rows but the last."""
    trainer, good = served("qwen3_moe")
    for line in good:
        r = Completion.from_dict(line["record"])
        weights, experts = (whole[:-1] for whole in routed(trainer, [*r.prompt_ids, *r.output_ids]))
        for name, tensor in (("experts", experts.int()), ("weights", weights)):
            line[name] = base64.b64encode(tensor.numpy().tobytes()).decode()
    count = counted(trainer, good)
    assert count.compared["experts"] == count.compared["weights"] > 1000 and not any(count.differing.values())
    for name in ("experts", "weights"):
        content = bytearray(base64.b64decode(good[2][name]))
        content[40] ^= 1
        count = counted(trainer, [*good[:2], {**good[2], name: base64.b64encode(content).decode()}, *good[3:]])
        assert count.differing[name] == 1 and sum(count.differing.values()) == 1 and count.first.startswith(f"{name}, request 2")
        with pytest.raises(ValueError, match=f"{name}, request 2"):
            counted(trainer, [*good[:2], {**good[2], name: None}, *good[3:]])


def test_what_was_not_compared_is_no_proof(lines: Any) -> None:
    count = counted(*lines)
    assert reported(proof.Phase("p", lines[1], {}, count), proof.Phase("over HTTP"))[0] == 1
    assert reported(proof.Phase("p", lines[1]))[0] == 1
    status, rows = reported(proof.Phase("p", lines[1], {"error": "TimeoutError: no end"}, count))
    assert status == 1 and rows[0]["error"] == "TimeoutError: no end"
    with pytest.raises(ValueError, match=r"filtered, here: .* \[3\] against .* \[2\]"):
        count.add("filtered", torch.zeros(3), torch.zeros(2), "here")


def test_a_phase_that_fails_leaves_the_others(lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, good = lines
    diary = phases.Diary(tmp_path)
    with diary.phase("first", 60) as notes:
        notes["paused_requests"] = 3
    with diary.phase("second", 60):
        raise ValueError("the server ended")
    with diary.phase("third", 1):
        time.sleep(30)
    stale = {**good[1], "record": {**good[1]["record"], "fingerprint": {**good[1]["record"]["fingerprint"], "weights": "0000"}}}
    stale["record"]["versions"] = [["0000", count] for _, count in stale["record"]["versions"]]
    kept = [{**good[0], "phase": "first"}, {**stale, "phase": "second"}]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    wanted = {"second": False, "first": False, "third": False, "fourth": False}
    found = {phase.name: phase for phase in proof.recorded(tmp_path, list(wanted))}
    assert found["first"].notes["paused_requests"] == 3 and len(found["first"].lines) == 1
    assert found["second"].notes["error"] == "ValueError: the server ended" and found["third"].notes["error"] == "Late: no end after 1 s"
    assert found["third"].notes["seconds"] < 20 and not found["fourth"].lines
    # weights that the trainer does not have are an error of their phase alone
    model = proof.Model("qwen3", "tiny", None)
    monkeypatch.setattr(model, "trainer", types.SimpleNamespace(from_pretrained=lambda folder, device: trainer))
    monkeypatch.setattr(phases, "DEVICE", "cpu")
    (tmp_path / "phases.jsonl").unlink()
    scored = {phase.name: phase for phase in proof.score(model, tmp_path, wanted)}
    assert "weights: " in scored["second"].notes["error"] and not scored["second"].count.compared
    assert scored["first"].count.compared == {"temperature": 8, "filtered": 8} and "error" not in scored["first"].notes
    assert scored["first"].count.redrawn == 8


def test_a_phase_without_filters_must_be_drawn_in_graphs() -> None:
    answers = [{"meta_info": {"completion_tokens": 96}}, {"meta_info": {"completion_tokens": 192}}]
    phases._drawn("without filters", answers, {"drawn_in_graphs": 286})
    phases._drawn("from the cache", answers, {"drawn_in_graphs": 0})
    for few in (143, 0, -5):
        with pytest.raises(ValueError, match=f"drew {few} of 288 tokens"):
            phases._drawn("without filters", answers, {"drawn_in_graphs": few})


def test_a_token_of_another_seed_is_no_proof(lines: Any) -> None:
    """Its log-probabilities are right; only drawing it again tells."""
    trainer, good = lines
    drawn = next(line for line in good if line["record"]["sampling"]["temperature"] == 1.0)
    phase = proof.Phase("p", [drawn])
    proof._redraw(trainer, phase)
    assert phase.count.redrawn == 8
    other = {**drawn["record"], "sampling": {**drawn["record"]["sampling"], "seed": drawn["record"]["sampling"]["seed"] + 1}}
    spoiled = {**drawn, "record": other}
    assert not any(counted(trainer, [spoiled]).differing.values())
    with pytest.raises(ValueError, match="drawn again it is"):
        proof._redraw(trainer, proof.Phase("p", [spoiled]))


@pytest.mark.parametrize("obeys", [True, False])
def test_stand_in_a_pause_must_stop_tokens(monkeypatch: pytest.MonkeyPatch, obeys: bool) -> None:
    struct = types.ModuleType("sglang.srt.managers.io_struct")
    struct.PauseGenerationReqInput = struct.ContinueGenerationReqInput = types.SimpleNamespace  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, struct.__name__, struct)

    class Engine:
        def __init__(self) -> None:
            self.tokenizer_manager = self
            self.running = asyncio.Event()
            self.running.set()

        async def async_generate(self, **_: Any) -> Any:
            async def stream() -> Any:
                for n in range(1, 201):
                    await asyncio.sleep(0.01)
                    await self.running.wait()
                    yield {"meta_info": {"completion_tokens": n}}

            return stream()

        async def pause_generation(self, given: Any) -> None:
            assert given.mode == "in_place"
            if obeys:
                self.running.clear()

        async def continue_generation(self, given: Any) -> None:
            self.running.set()

    asked = [([1], {"max_new_tokens": 200})] * 3
    call = phases._paused(Engine(), asked, {}, "in_place", 30)
    if not obeys:
        with pytest.raises(ValueError, match="not paused in the middle: 3 requests running"):
            asyncio.run(call)
        return
    answers, notes = asyncio.run(call)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [200] * 3
    assert notes["paused_requests"] == 3 and 30 <= notes["paused_after_tokens"] < 150


def test_requests_mix_lengths_and_every_filter() -> None:
    asked = phases.requests(64, 96, 1000, hybrid=False)
    lengths = {len(ids) for ids, _ in asked}
    params = [p for _, p in asked]
    assert min(lengths) == 1 and max(lengths) > 2000 and len(lengths) >= 10
    kinds = {frozenset(p) & {"top_p", "top_k", "min_p"} for p in params}
    assert {frozenset(), frozenset({"top_p"}), frozenset({"top_k"}), frozenset({"min_p"})} <= kinds
    assert any(p["temperature"] == 0 for p in params) and SamplingParams(temperature=0.0).is_greedy
    assert proof.main(["qwen3", "--size", "absent"]) == 2


def test_requests_without_filters_have_none() -> None:
    """Decode graphs draw for batches without filters only, so these have a phase of their own."""
    asked = phases.requests(64, 96, 1000, hybrid=False, kinds=phases.PLAIN)
    params = [p for _, p in asked]
    assert all(set(p) == {"temperature", "max_new_tokens", "ignore_eos"} for p in params)
    assert {p["temperature"] for p in params} == {0, 1.0, 0.7, 1.3} and {p["max_new_tokens"] for p in params} == {96, 192}
    assert {"without filters"} <= set(phases.ENGINE_PHASES) and {"without filters, over HTTP"} <= set(phases.SERVER_PHASES)


def test_what_the_engine_left_is_scored_before_the_server_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run: list[str] = []

    def step(command: list[str], check: bool) -> Any:
        run.append(command[-1])
        return types.SimpleNamespace(returncode=int(command[-1] == "engine"))

    monkeypatch.setattr(proof.subprocess, "run", step)
    monkeypatch.setattr(proof, "check_server", lambda device: None)
    assert proof.main(["qwen3", "--size", "tiny", "--folder", str(tmp_path)]) == 1
    assert run == ["make", "engine", "score", "http", "score-http"]
    run.clear()
    proof.main(["qwen3", "--size", "tiny", "--folder", str(tmp_path), "--no-http"])
    assert run == ["make", "engine", "score"]


@pytest.mark.parametrize("main", [proof.main, sglang.main], ids=["proof", "speed"])
def test_what_can_t_be_served_is_one_sentence(
    main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def began(*_: object, **__: object) -> None:
        raise RuntimeError("began")

    def refused(arch: str) -> str:
        assert main([arch, "--size", "tiny"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
        return said

    monkeypatch.setattr(proof.subprocess, "run", began)
    monkeypatch.setattr(sglang, "_run", began)
    gpus = [False]
    found = [None, object()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus[0])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[0])
    assert "the SGLang plugin does not serve glm5 yet" in refused("glm5")
    assert "sglang is not installed" in refused("qwen3")
    found.pop(0)
    assert f"SGLang serves on a CUDA GPU here: torch {torch.__version__} sees none" in refused("qwen3")
    gpus[0] = True
    with pytest.raises(RuntimeError, match="began"):  # the control
        main(["qwen3", "--size", "tiny"])
