"""Seeds that the plugin gives to requests. SGLang's manager of requests is a stand-in that sends as SGLang's own does."""

from __future__ import annotations

import copy
import importlib
import types
import uuid
from typing import Any

import pytest
from plugin_harness import SAMPLING, over_stand_ins

from zoo.common.rollouts import seed_of_sample
from zoo.sglang_plugin.requests import sampling_params
from zoo.sglang_plugin.seeds import before_send, before_send_batch


class Manager:
    """Takes requests for n samples: the prompt alone, then the samples one by one with shared parameters.

    `sent` has (whether anything is drawn, seed) of each that left.
    """

    def __init__(self, hooked: bool = True) -> None:
        self.server_args = types.SimpleNamespace(attention_backend="zoo")
        self.model_config = types.SimpleNamespace(vocab_size=8)
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[tuple[bool, int | None]] = []
        self.hooked = hooked

    def take(self, seed: int | None, samples: int, most: int = 4) -> list[int | None]:
        """The seeds of one request's samples."""
        obj = types.SimpleNamespace(rid="given", sampling_params={"sampling_seed": seed, "n": samples})
        importlib.import_module("zoo.sglang_plugin.register").after_validate(None, self, obj, [1, 2])
        params = types.SimpleNamespace(sampling_seed=seed, n=samples, max_new_tokens=most)
        tokenized = types.SimpleNamespace(rid="given", sampling_params=params)
        before = len(self.sent)
        if samples > 1:
            warming = copy.copy(tokenized)
            warming.sampling_params = copy.copy(params)
            warming.sampling_params.max_new_tokens = 0
            self._send(copy.copy(obj), warming)
        for _ in range(samples):
            self._send(copy.copy(obj), copy.copy(tokenized))
        assert params.sampling_seed == seed  # what the samples share stays
        return [given for draws, given in self.sent[before:] if draws]

    def _send(self, obj: Any, tokenized: Any) -> None:
        tokenized.rid = uuid.uuid4().hex
        self.rid_to_state[tokenized.rid] = types.SimpleNamespace(obj=obj)
        if self.hooked:
            before_send(self, tokenized)
        self.sent.append((tokenized.sampling_params.max_new_tokens != 0, tokenized.sampling_params.sampling_seed))


def test_stand_in_samples_of_one_request_have_seeds_of_their_own() -> None:
    manager = Manager()
    for _ in range(2):  # of the same request again the same
        assert manager.take(11, 4) == [seed_of_sample(11, i) for i in range(4)]
    assert manager.take(11, 1) == [11] and manager.take(0, 3)[0] == 0
    # control: what SGLang sends by itself
    assert Manager(hooked=False).take(11, 4) == [11] * 4


def test_stand_in_samples_of_requests_that_come_at_once_are_counted_apart() -> None:
    """SGLang 0.5.23 may send another request's sample between two of one."""
    manager = Manager()
    objects = []
    for _ in range(2):
        obj = types.SimpleNamespace(rid="given", sampling_params={})
        importlib.import_module("zoo.sglang_plugin.register").after_validate(None, manager, obj, [1])
        objects.append(obj)
    params = types.SimpleNamespace(sampling_seed=11, n=3, max_new_tokens=4)
    for _ in range(3):
        for obj in objects:
            manager._send(copy.copy(obj), types.SimpleNamespace(sampling_params=params))
    seeds = [seed for _, seed in manager.sent]
    assert seeds[0::2] == seeds[1::2] == [seed_of_sample(11, i) for i in range(3)]


def test_stand_in_requests_without_a_seed_get_a_fresh_one_each() -> None:
    """Also those of one id, one prompt and one process, and of another process: nothing is counted."""
    seeds = [seed for manager in (Manager(), Manager()) for samples in (1, 8, 1) for seed in manager.take(None, samples)]
    assert len(seeds) == len(set(seeds)) == 20 and all(seed is not None and 0 <= seed < 1 << 63 for seed in seeds)
    batch = [
        types.SimpleNamespace(sampling_params=types.SimpleNamespace(sampling_seed=seed, n=1, max_new_tokens=4)) for seed in (None, 5, None)
    ]
    before_send_batch(Manager(), batch)
    found = [each.sampling_params.sampling_seed for each in batch]
    assert found[1] == 5 and len({*found, *seeds}) == 23
    # control: without the hook the prompts have none, and the sampler refuses them
    assert Manager(hooked=False).take(None, 2) == [None, None]


def test_stand_in_a_prompt_that_is_scored_alone_counts_no_sample() -> None:
    assert Manager().take(11, 3, most=0) == []


def test_stand_in_the_sampler_refuses_a_request_without_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = over_stand_ins(monkeypatch, "sampler", SAMPLING)
    info = SAMPLING["sampling.sampling_batch_info"]["SamplingBatchInfo"]()
    request = types.SimpleNamespace(sampling_params={"sampling_seed": None}, rid="late")
    with pytest.raises(
        RuntimeError, match="a request that draws has no seed: the hook on TokenizerManager._send_one_request is not active"
    ):
        page.with_rows(info, [request], "cpu")
    request.sampling_params = {"sampling_seed": 7}
    assert page.with_rows(info, [request], "cpu").rows.seed_R.tolist() == [7]
    assert sampling_params({"sampling_seed": 7}).seed == 7
