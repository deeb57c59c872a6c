"""What the plugin launches before a server takes requests, over stand-ins of SGLang: it keeps no slot, and a fault costs time alone."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from plugin_harness import over_stand_ins
from torch import Tensor

from zoo.common.compilations import watch
from zoo.sglang_plugin import memory


class Allocator:
    """SGLang's, as far as it is asked: a list of free pages, taken from in front."""

    def __init__(self) -> None:
        self.free_pages = torch.arange(1, 41)
        self.extended: list[int] = []
        self.decoded: list[int] = []

    def alloc_extend(self, prefix: Tensor, prefix_cpu: Tensor, lengths: Tensor, lengths_cpu: Tensor, last: Tensor, total: int) -> Tensor:
        assert prefix.dtype == lengths.dtype == last.dtype == torch.int64 and int((lengths_cpu - prefix_cpu).sum()) == total
        self.extended.append(len(lengths))
        return self._taken(len(lengths))

    def alloc_decode(self, lengths: Tensor, lengths_cpu: Tensor, last: Tensor) -> Tensor:
        assert last.dtype == torch.int32 and len(lengths_cpu) == len(last)
        self.decoded.append(len(lengths))
        return self._taken(len(lengths))

    def _taken(self, count: int) -> Tensor:
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return pages


def scheduler(monkeypatch: pytest.MonkeyPatch, told: list[Any], skip: bool = False) -> tuple[Any, Any]:
    def positions(backend: str, prefix: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(total, dtype=torch.int64), counts

    page = over_stand_ins(
        monkeypatch,
        "rehearsal",
        {
            "mem_cache.allocation": {"write_cache_indices": lambda **given: told.append(given)},
            "model_executor.forward_batch_info": {"compute_position": positions},
        },
    )
    builder = memory.StepBuilder(torch.zeros(4, 64, dtype=torch.int32), 16, None, 64)
    model = types.SimpleNamespace(takes_requests=False)
    runner = types.SimpleNamespace(model=model, attn_backend=types.SimpleNamespace(device="cpu", builder=builder))
    stand_in = types.SimpleNamespace(
        server_args=types.SimpleNamespace(attention_backend="zoo", skip_server_warmup=skip),
        tp_worker=types.SimpleNamespace(model_runner=runner),
        token_to_kv_pool_allocator=Allocator(),
        req_to_token_pool="table",
        max_running_requests=24,
    )
    return page, stand_in


def test_stand_in_every_number_of_requests_is_launched_and_no_slot_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    page, stand_in = scheduler(monkeypatch, told)
    page.begin(stand_in)
    allocator = stand_in.token_to_kv_pool_allocator
    assert allocator.extended == allocator.decoded == [1, 2, 4, 8, 16, 24]
    assert allocator.free_pages.tolist() == list(range(1, 41))
    [given] = told
    assert given["req_to_token_pool"] == "table" and len(given["prefix_tensors"]) == 24 and not given["extend_lens_cpu"].any()
    page.begin(stand_in)  # once
    assert len(told) == 1


def test_stand_in_few_pages_bound_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    page, stand_in = scheduler(monkeypatch, [])
    stand_in.max_running_requests = 1000
    page.begin(stand_in)
    assert stand_in.token_to_kv_pool_allocator.extended == [1, 2, 4, 8, 16, 32, 40]


def test_stand_in_a_fault_is_told_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    page, stand_in = scheduler(monkeypatch, [])
    stand_in.max_running_requests = None
    watch().unready()
    page.begin(stand_in)
    assert "kernels were not all compiled at start" in caplog.text
    assert stand_in.tp_worker.model_runner.model.takes_requests and watch()._ready


def test_stand_in_a_server_that_skips_its_warm_up_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    page, stand_in = scheduler(monkeypatch, [], skip=True)
    page.begin(stand_in)
    assert stand_in.token_to_kv_pool_allocator.extended == [] and stand_in.tp_worker.model_runner.model.takes_requests


def test_stand_in_a_model_that_can_not_be_rehearsed_is_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    page, _ = scheduler(monkeypatch, [])
    args = types.SimpleNamespace(skip_server_warmup=False, chunked_prefill_size=64, max_running_requests=2, page_size=16)
    zoo = types.SimpleNamespace(device=torch.device("cpu"))  # no model at all
    page.rehearse_model(types.SimpleNamespace(server_args=args, model=types.SimpleNamespace(complete=True, zoo=zoo)))
    assert "kernels were not all compiled at start" in caplog.text
