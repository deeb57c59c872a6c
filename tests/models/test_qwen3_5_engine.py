"""The engine over pages and slots: batches, chunks, reuse by snapshots, preemption and updates leave every byte as it was."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine_harness import numbers, scored, trained

from zoo.common.delta_memory import DeltaSnapshot
from zoo.common.engine import Completion, Engine
from zoo.common.hybrid_memory import HybridMemory
from zoo.common.sampling import SamplingParams
from zoo.qwen3_5 import MOE_SIZES, SIZES, Qwen35ForRL, Qwen35ForServing

SHAPE: dict[str, Any] = {"layers": 2, "full": (False, True), "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 16,
                         "rotated": 8, "key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16,
                         "vocabulary": 300}  # fmt: skip
CONFIGS = {
    "dense": replace(SIZES["tiny"], **SHAPE, inner=64),
    "moe": replace(MOE_SIZES["tiny"], **SHAPE, expert_inner=16, shared_inner=32),
}
KINDS = tuple(CONFIGS)


@cache
def twins(kind: str) -> tuple[Qwen35ForRL, Qwen35ForServing]:
    names = {"seed": 1, "device": "cpu"}
    return Qwen35ForRL.from_config(CONFIGS[kind], **names), Qwen35ForServing.from_config(CONFIGS[kind], **names)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


STEM = tokens(128, 99)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([7], SamplingParams(seed=1, max_new_tokens=5)),
    (STEM[:60], SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_new_tokens=7)),  # closes its chunk while it decodes
    (STEM + tokens(22, 3), SamplingParams(temperature=0.0, max_new_tokens=4)),
    (STEM[:64] + [5, 9], SamplingParams(temperature=1.4, top_k=40, min_p=0.01, seed=3, max_new_tokens=6)),
    (STEM + [4], SamplingParams(temperature=0.6, top_p=0.8, top_k=20, seed=2**64 - 1, max_new_tokens=5)),
    (tokens(64, 4), SamplingParams(temperature=2.0, seed=5, max_new_tokens=4)),
]


def engine(kind: str = "dense", **options: Any) -> Engine:
    return Engine(twins(kind)[1], **{"pages": 60, "page_size": 16, **options})


@cache
def baseline(kind: str) -> list[dict[str, Any]]:
    """Every request alone, in one chunk, on pages of 64, nothing cached."""
    return [
        numbers(Engine(twins(kind)[1], pages=4, page_size=64, prefix_cache=False).generate([prompt], [params])[0])
        for prompt, params in REQUESTS
    ]


def poison(engine: Engine) -> None:
    """NaN in every free page and slot, and in the rows that a live chunk does not have yet."""
    memory, pool = engine.scheduler.memory, engine.scheduler.pool
    assert isinstance(memory, HybridMemory)
    pages, slots = (torch.tensor(list(free), dtype=torch.int64) for free in (pool.free, pool.free_slots))
    memory.paged.k_LPSGE[:, pages] = memory.paged.v_LPSGE[:, pages] = torch.nan
    for state in (*memory.delta.pools.values(), memory.delta.carry_LSWC):
        state[:, slots] = torch.nan
    for request in engine.scheduler.running:
        for name, rows in memory.delta.pools.items():
            if "J" in name:
                rows[:, request.slot, :, request.computed % 64 :] = torch.nan


def drive(engine: Engine) -> list[Completion]:
    """`run`, poisoned before each step; afterwards every slot is free."""
    done = []
    while engine.busy:
        poison(engine)
        done += engine.step()
        held = [request.slot for request in engine.scheduler.running]
        assert sorted([*held, *engine.scheduler.pool.free_slots]) == list(range(1, engine.scheduler.memory.slots + 1))
    return done


def generate(engine: Engine) -> list[dict[str, Any]]:
    ids = [engine.add(*request) for request in REQUESTS]
    done = {record.request_id: numbers(record) for record in drive(engine)}
    return [done[request_id] for request_id in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_draws_and_scores_the_same_bytes(kind: str) -> None:
    trainer = twins(kind)[0]
    for values in baseline(kind):
        record = Completion.from_dict({**values, "request_id": "0"})
        again = trained(trainer, record)
        assert again == {name: getattr(record, name) for name in again}
        assert record.filtered_log_probs == scored(trainer, record, record.sampling)
    with torch.no_grad():  # the control: another trainer
        assert trained(Qwen35ForRL.from_config(CONFIGS[kind], seed=2, device="cpu"), record) != again


VARIANTS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one at a time": {"max_batch": 1},
    "two at a time, 7 rows": {"max_batch": 2, "chunk_rows": 7},
    "chunks of 65, nothing cached": {"chunk_rows": 65, "prefix_cache": False},
    "pages of 64": {"page_size": 64, "pages": 20, "chunk_rows": 33},
    "pages of 80": {"page_size": 80, "pages": 20, "chunk_rows": 100},
    "few pages": {"pages": 14, "chunk_rows": 20},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_schedule_moves_a_byte(kind: str, options: dict[str, Any]) -> None:
    assert generate(engine(kind, **options)) == baseline(kind)


def test_slot_order_moves_no_byte() -> None:
    shuffled = engine(chunk_rows=13)
    random.shuffle(shuffled.scheduler.pool.free_slots)
    random.shuffle(shuffled.scheduler.pool.free)
    assert generate(shuffled) == baseline("dense")


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_prefix_is_a_cold_one(kind: str) -> None:
    """Pages of 16 and chunks of 64: a prefix is reused up to a multiple of 64 with a snapshot."""
    warm = engine(kind)
    assert generate(warm) == baseline(kind)
    before = warm.stats.reused_rows
    assert generate(warm) == baseline(kind)
    assert warm.stats.reused_rows - before == 128 + 64 + 128  # of prompts of 150, 66 and 129; 64 tokens keep their last row


def test_a_wrong_snapshot_is_caught() -> None:
    warm = engine()
    generate(warm)
    nodes = [node for node in warm.scheduler.pool.nodes.values() if node.snapshot is not None]
    assert nodes and all(isinstance(node.snapshot, DeltaSnapshot) for node in nodes)
    for node in nodes:
        node.snapshot.start_LVKE.add_(1e-2)
    assert generate(warm) != baseline("dense")


def test_pages_of_80_meet_chunks_at_320() -> None:
    prompt = tokens(330, 8)
    params = SamplingParams(seed=6, max_new_tokens=3)
    alone = numbers(engine(prefix_cache=False).generate([prompt], params)[0])
    paged = engine(page_size=80, pages=12)
    for reused in (0, 320, 640):
        assert numbers(paged.generate([prompt], params)[0]) == alone
        assert paged.stats.reused_rows == reused
    assert numbers(paged.generate([prompt[:319]], params)[0]) == numbers(engine(prefix_cache=False).generate([prompt[:319]], params)[0])
    assert paged.stats.reused_rows == 640


def test_samples_of_one_prompt_share_its_rows() -> None:
    group = engine()
    params = [SamplingParams(seed=n, max_new_tokens=3) for n in range(4)]
    records = group.generate([STEM + [4]] * 4, params)
    assert group.stats.reused_rows == 3 * 128
    alone = engine(prefix_cache=False)
    assert [numbers(r) for r in records] == [numbers(alone.generate([STEM + [4]], p)[0]) for p in params]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", (False, True))
def test_preempted_is_uninterrupted(kind: str, cached: bool) -> None:
    interrupted = engine(kind, prefix_cache=cached, chunk_rows=90)
    ids = [interrupted.add(*request) for request in REQUESTS]
    done: list[Completion] = []
    for turn in range(1000):
        if not interrupted.busy:
            break
        if turn % 3 == 2 and interrupted.scheduler.running:
            interrupted.preempt(random.choice(interrupted.scheduler.running).request_id)
        poison(interrupted)
        done += interrupted.step()
    assert interrupted.stats.preemptions >= 2
    records = {record.request_id: numbers(record) for record in done}
    assert [records[request_id] for request_id in ids] == baseline(kind)


class TwoSlots(Qwen35ForServing):
    def make_memory(self, pages: int, page_size: int | None = None, slots: int = 2) -> HybridMemory:
        return super().make_memory(pages, page_size, slots)


class StaleSlots(TwoSlots):
    """A fault: a slot keeps the state of the sequence that had it before."""

    def make_memory(self, pages: int, page_size: int | None = None, slots: int = 2) -> HybridMemory:
        memory = super().make_memory(pages, page_size, slots)
        memory.delta.clear = lambda slots: None  # type: ignore[method-assign]
        return memory


def test_no_more_run_than_there_are_slots() -> None:
    model = TwoSlots.from_config(CONFIGS["dense"], seed=1, device="cpu")
    narrow = Engine(model, pages=60, page_size=16)
    for request in REQUESTS:
        narrow.add(*request)
    most = 0
    while narrow.busy:
        narrow.step()
        most = max(most, len(narrow.scheduler.running))
    assert most == 2
    assert [numbers(r) for r in Engine(model, pages=60, page_size=16).generate(*zip(*REQUESTS))] == baseline("dense")


def test_a_slot_that_is_not_cleared_is_caught() -> None:
    model = StaleSlots.from_config(CONFIGS["dense"], seed=1, device="cpu")
    assert [numbers(r) for r in Engine(model, pages=60, page_size=16).generate(*zip(*REQUESTS))] != baseline("dense")


def test_an_update_starts_over() -> None:
    """Rows and snapshots of old weights are not read again; the end equals the trainer's under the new ones."""
    trainer = Qwen35ForRL.from_config(CONFIGS["dense"], seed=1, device="cpu")
    model = Qwen35ForServing.from_config(CONFIGS["dense"], seed=1, device="cpu")
    served = Engine(model, pages=60, page_size=16)
    first = served.generate(*zip(*REQUESTS))
    other = Qwen35ForRL.from_config(CONFIGS["dense"], seed=2, device="cpu")
    parameters = dict(other.named_parameters())
    weights = [(p.published, p.of(parameters[entry.ours]).detach()) for entry, p in other.table_of().pieces()]
    served.update_weights(weights)
    trainer.load_weights(weights)
    before = served.stats.reused_rows
    again = served.generate(*zip(*REQUESTS))
    assert served.stats.reused_rows - before <= 64 + 128  # within the new version only
    for record in again:
        assert trained(trainer, record) == {name: getattr(record, name) for name in ("output_ids", "log_probs", "filtered_log_probs")}
    assert [r.output_ids for r in again] != [r.output_ids for r in first]


def test_memory_is_given_back_and_taken_again() -> None:
    served = engine()
    generate(served)
    ids = [served.add(*request) for request in REQUESTS]
    served.step()
    served.release_memory()
    served.resume_memory()
    done = {record.request_id: numbers(record) for record in drive(served)}
    assert [done[request_id] for request_id in ids] == baseline("dense")


def test_pages_that_fit_leave_room_for_slots() -> None:
    """The default number of pages counts slots and snapshots once, not with every page."""
    free = Engine(twins("dense")[1])
    memory = free.scheduler.memory
    assert memory.pages > 100 and memory.nbytes <= 2 << 30
