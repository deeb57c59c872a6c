"""Rung 4 and 5 through SGLang: a stand-in for its engine answers as the plugin does; the real one needs a GPU."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo.common.engine import Engine
from zoo.sglang_plugin.names import FILTERED, REQUEST, STATE, WEIGHTS, WEIGHTS_DIGITS
from zoo.sglang_plugin.requests import prompt_digest, sampling_params, sent
from zoo.verify.ladder import Ladder, Result
from zoo.verify.samplers import SGLang, check_engine
from zoo.verify.subject import Settings, build

SMALL = Settings((1, 65, 130), tail=2, page_sizes=(16,), steps=1, requests=6, drawn=4)


class StandIn:
    """`sglang.Engine` with the plugin in it, as far as the ladder calls it: the embedded engine behind SGLang's answers."""

    started: dict[str, Any]
    takes_updates = True

    def __init__(self, **options: Any) -> None:
        type(self).started = options
        assert Path(options["model_path"]).is_dir()
        model = zoo.load(options["model_path"], role="serving", device="cpu")
        self.engine = Engine(model, pages=40)
        self.ended = False

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], return_logprob: bool) -> list[dict[str, Any]]:
        assert return_logprob
        return [self._answer(i, ids, params) for i, (ids, params) in enumerate(zip(input_ids, sampling_params, strict=True))]

    def _answer(self, i: int, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        rid = f"request-{i}"
        asked = sampling_params(params, seed=i)
        asked = type(asked)(**{**vars(asked), "max_new_tokens": params["max_new_tokens"], "ignore_eos": params["ignore_eos"]})
        [done] = self.engine.generate([ids], [asked])
        scored = [(value, token, None) for value, token in zip(done.log_probs, done.output_ids, strict=True)]
        drawn_by = [version[:WEIGHTS_DIGITS] for version in done.output_versions]
        meta = {"id": rid, "output_token_logprobs": scored, FILTERED: list(done.filtered_log_probs), WEIGHTS: drawn_by}
        meta |= {"prompt_tokens": len(ids), "completion_tokens": len(scored)}
        meta[REQUEST] = [None] * (len(scored) - 1) + [{"prompt": prompt_digest(ids), "seed": done.sampling.seed}]
        return {"output_ids": list(done.output_ids), "meta_info": {**meta, "finish_reason": {"type": "length"}}}

    def get_server_info(self) -> dict[str, Any]:
        return {"internal_states": [{STATE: {"fingerprint": self.engine.model.fingerprint().to_dict()}}]}

    def update_weights_from_tensor(self, tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        if self.takes_updates:
            self.engine.update_weights(tensors)
        return True, ""

    def shutdown(self) -> None:
        self.ended = True


class Deaf(StandIn):
    takes_updates = False


class InSessions(StandIn):
    """SGLang 0.5.23: weights are taken in a session only."""

    opened = closed = 0

    def begin_weight_update(self) -> tuple[bool, str]:
        self.opened += 1
        return self.opened == self.closed + 1, "one is open"

    def end_weight_update(self) -> tuple[bool, str]:
        self.closed += 1
        return self.opened == self.closed, "none is open"

    def update_weights_from_tensor(self, tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        return super().update_weights_from_tensor(tensors) if self.opened > self.closed else (False, "no session is open")


class Refusing(StandIn):
    def update_weights_from_tensor(self, tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        return False, "no room"


def climbed(monkeypatch: pytest.MonkeyPatch, engine: type[StandIn], arch: str = "qwen3") -> Result:
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=engine))
    return Ladder(build(arch, checkpoint=None, device="cpu"), SMALL, engine="sglang").climb((4, 5))


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5_moe"])
def test_both_rungs_through_sglang(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    result = climbed(monkeypatch, StandIn, arch)
    assert result.ok
    live = [row.what for row in result.rows if "live" in row.what]
    assert len(live) == 6 and all("SGLang: live sampling" in what for what in live)
    options = StandIn.started
    assert options["attention_backend"] == "zoo" and options["context_length"] == 130 + 4 + 8
    assert options["max_running_requests"] == 7 and options["max_total_tokens"] >= 6 * (130 + 4)
    assert not Path(options["model_path"]).exists()  # what was written for it is gone


def test_weights_are_pushed_in_a_session_where_sglang_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert climbed(monkeypatch, InSessions).ok
    # control: without it this stand-in refuses
    assert InSessions.update_weights_from_tensor(types.SimpleNamespace(opened=1, closed=1), []) == (False, "no session is open")  # type: ignore[arg-type]


def test_a_checkpoint_is_served_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build("qwen3", checkpoint=None, device="cpu").trainer.save_pretrained(tmp_path / "c")
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=StandIn))
    subject = build("qwen3", checkpoint=str(tmp_path / "c"), device="cpu")
    assert Ladder(subject, SMALL, engine="sglang").climb((4,)).ok
    assert StandIn.started["model_path"] == str(tmp_path / "c") and (tmp_path / "c").exists()


def test_an_update_that_does_not_arrive_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the trainer refuses the records: .*weights"):
        climbed(monkeypatch, Deaf)
    with pytest.raises(ValueError, match="SGLang did not take the weights: no room"):
        climbed(monkeypatch, Refusing)


def test_parameters_arrive_as_they_were_meant() -> None:
    from zoo.verify.live import PARAMS

    for params in PARAMS:
        found = sampling_params(sent(params), seed=0)
        same = ("temperature", "top_k", "top_p", "min_p") if params.seed >> 63 else ("temperature", "top_k", "top_p", "min_p", "seed")
        assert all(vars(found)[name] == vars(params)[name] for name in same), params


def test_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no installed SGLang is in test_cli."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--engine sglang needs SGLang: pip install"):
        check_engine("sglang", "cuda:0")
    check_engine("embedded", "cpu")


def test_nothing_starts_before_the_first_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SGLang(build("qwen3", checkpoint=None, device="cpu"))
    source.update()
    source.close()
    assert not Path(source._folder.name).exists()
