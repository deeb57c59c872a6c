"""What the engine's tests share: requests of every kind, what the trainer says about a record, poisoned driving."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from model_harness import Models
from torch import Tensor

from zoo.common.engine import Engine
from zoo.common.engine.request import Request
from zoo.common.engine.scheduler import Scheduler
from zoo.common.ops.sample import sample
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows
from zoo.qwen3 import MOE_SIZES, SIZES, Qwen3ForRL, Qwen3ForServing

Asked = tuple[list[int], SamplingParams]


class Family(Models):
    """Models behind engines, and what they are asked."""

    def __init__(self, configs: Mapping[str, Any], rl: type[Any], serving: type[Any], requests: list[Asked]) -> None:
        super().__init__(configs, rl, serving)
        self.requests = requests
        self._alone: dict[str, list[dict[str, Any]]] = {}

    def baseline(self, kind: str) -> list[dict[str, Any]]:
        """Every request alone, in one chunk, on pages of 64, nothing cached."""
        if kind not in self._alone:
            engines = (Engine(self.twins(kind)[1], pages=4, page_size=64, prefix_cache=False) for _ in self.requests)
            self._alone[kind] = [numbers(e.generate([prompt], [params])[0]) for e, (prompt, params) in zip(engines, self.requests)]
        return self._alone[kind]

    def generate(self, engine: Engine, chosen: list[int] | None = None) -> list[dict[str, Any]]:
        """The chosen requests, added together and driven to their end; their numbers in order."""
        ids = [engine.add(*self.requests[n]) for n in (range(len(self.requests)) if chosen is None else chosen)]
        done = {record.request_id: numbers(record) for record in drive(engine)}
        return [done[request_id] for request_id in ids]


def tokens(count: int, seed: int, vocabulary: int = 512) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


CONFIGS = {"dense": SIZES["tiny"], "moe": MOE_SIZES["tiny"]}
STEM = tokens(48, 99)
REQUESTS: list[Asked] = [
    ([7], SamplingParams(seed=1, max_new_tokens=6)),
    (STEM[:16], SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_new_tokens=5)),
    (STEM + tokens(22, 3), SamplingParams(temperature=0.0, max_new_tokens=4)),
    (STEM[:35] + [5, 9], SamplingParams(temperature=1.4, top_k=40, min_p=0.01, seed=3, max_new_tokens=6)),
    (STEM + [4], SamplingParams(temperature=0.6, top_p=0.8, top_k=20, seed=2**64 - 1, max_new_tokens=5)),
    (tokens(31, 4), SamplingParams(temperature=2.0, seed=5, max_new_tokens=4)),
]
SHORT = [0, 1, 3, 5]  # of REQUESTS, for schedules
QWEN3 = Family(CONFIGS, Qwen3ForRL, Qwen3ForServing, REQUESTS)
twins = QWEN3.twins
serving = QWEN3.server
baseline = QWEN3.baseline
generate = QWEN3.generate


def numbers(record: Completion) -> dict[str, Any]:
    """A record as the bytes that no schedule may move: all but its name."""
    return {name: value for name, value in record.to_dict().items() if name != "request_id"}


def trained(model: Any, record: Completion) -> dict[str, Any]:
    """Drawn again from the trainer's rows: tokens and log-probabilities, in a record's form."""
    ids = torch.tensor(record.prompt_ids + record.output_ids)
    rows = Rows.packed(torch.tensor([0, len(ids)]))
    with torch.no_grad():
        hidden = model.hidden_rows(ids, rows)[len(record.prompt_ids) - 1 : -1]
        count = len(record.output_ids)
        positions = range(len(record.prompt_ids), len(record.prompt_ids) + count)
        drawn = sample(model.logits(hidden), RowSampling.of([record.sampling] * count, list(positions), "cpu"), model.program)
    names = ("output_ids", "log_probs", "filtered_log_probs")
    return dict(zip(names, (tuple(column.tolist()) for column in drawn), strict=True))


def scored(model: Any, record: Completion, params: SamplingParams) -> tuple[float, ...]:
    """ForRL.score of the record's output tokens under `params`."""
    ids = torch.tensor(record.prompt_ids + record.output_ids)
    with torch.no_grad():
        values = model.score(ids, torch.tensor([0, len(ids)]), sampling=params)
    return tuple(values[len(record.prompt_ids) - 1 : -1].tolist())


def page_pools(memory: Any) -> list[Tensor]:
    """What a memory keeps in pages, [layers, pages, page size, ...] each."""
    return [tensor for part in memory.page_parts for tensor in part.tensors.values()]


def slot_pools(memory: Any) -> dict[str, Tensor]:
    """What a memory keeps in slots, [layers, slots, ...] each."""
    return {name: pool for part in memory.slot_parts for name, pool in part.pools.items()}


def poison(engine: Engine) -> None:
    """NaN in every free page and slot, and in the rows that a live chunk does not have yet."""
    memory = engine.scheduler.memory
    pool = engine.scheduler.pool
    free = torch.tensor(list(pool.free), dtype=torch.int64)
    for pages in page_pools(memory):
        pages[:, free] = torch.nan
    if memory.slots:
        slots = torch.tensor(list(pool.free_slots), dtype=torch.int64)
        for state in slot_pools(memory).values():
            state[:, slots] = torch.nan if state.is_floating_point() else -7
        for request in engine.scheduler.running:
            for name, rows in slot_pools(memory).items():
                if "J" in name:
                    rows[:, request.slot, :, request.computed % memory.grain :] = torch.nan


def check_pages(engine: Engine) -> None:
    """Every page and slot has one owner, shared pages only through the cache; held lanes without a row are zero."""
    pool = engine.scheduler.pool
    memory = engine.scheduler.memory
    owners = list(pool.free) + [node.page for node in pool.nodes.values()]
    for request in engine.scheduler.running:
        shared = len(request.nodes)
        assert request.pages[:shared] == [node.page for node in request.nodes]
        assert all(parent is child.parent for parent, child in pairwise(request.nodes))
        owners += request.pages[shared:]
        for block, page in enumerate(request.pages):
            written = max(0, min(memory.page_size, request.computed - block * memory.page_size))
            for values in page_pools(memory):
                assert not values[:, page, written:].any(), f"page {page} holds something behind its {written} rows"
    assert sorted(owners) == list(range(1, pool.pages))
    holders = [node for request in engine.scheduler.running for node in request.nodes]
    assert all(node.refs == holders.count(node) for node in pool.nodes.values())
    assert pool.available == len(pool.free) + sum(node.refs == 0 for node in pool.nodes.values())
    slots = [request.slot for request in engine.scheduler.running] if memory.slots else []
    assert sorted([*slots, *pool.free_slots]) == list(range(1, memory.slots + 1))


def drive(engine: Engine) -> list[Completion]:
    """`run`, with every free page poisoned before and every page checked after each step."""
    done = []
    while engine.busy:
        poison(engine)
        done += engine.step()
        check_pages(engine)
    return done


class SkippingScheduler(Scheduler):
    """A fault: a request that starts again after a preemption misses its first row."""

    def _start(self, request: Request, nodes: list[Any]) -> None:
        super()._start(request, nodes)
        if request.versions and request.computed == 0 and request.pending > 1:
            self._hold(request, 1)
            request.computed = 1


def plant(engine: Engine, scheduler: type[Scheduler]) -> Engine:
    """The same engine under another scheduler."""
    s = engine.scheduler
    engine.scheduler = scheduler(s.memory, s.pool, s.version, s.max_batch, s.chunk_rows, s.prefix_cache)
    return engine
