"""The engine over pages and slots: batches, chunks, reuse by snapshots, preemption and updates leave every byte as it was."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import engine_harness
import pytest
import torch
from engine_harness import Family, drive, numbers, poison, scored, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from weights_tools.make_tiny import write_tokenizer
from zoo.common import generate as generate_module
from zoo.common.engine import Engine, sizing
from zoo.common.engine.pages import Key, PagePool
from zoo.common.engine.request import Request
from zoo.common.engine.scheduler import Scheduler, Start
from zoo.common.engine.sizing import CPU_BYTES
from zoo.common.memory import Memory, Snapshot
from zoo.common.rollouts import Completion, SamplingParams, check_draws
from zoo.qwen3_5 import MOE_SIZES, SIZES, Qwen35Config, Qwen35ForRL, Qwen35ForServing

SHAPE: dict[str, Any] = {
    "layers": 2,
    "full": (False, True),
    "hidden": 64,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "rope_dim": 8,
    "key_heads": 1,
    "value_heads": 2,
    "key_dim": 16,
    "value_dim": 16,
    "vocabulary": 300,
}
CONFIGS = {
    "dense": replace(SIZES["tiny"], **SHAPE, intermediate=64),
    "moe": replace(MOE_SIZES["tiny"], **SHAPE, expert_intermediate=16, shared_intermediate=32),
}
KINDS = tuple(CONFIGS)


tokens = partial(engine_harness.tokens, vocabulary=300)
STEM = tokens(128, 99)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([7], SamplingParams(seed=1, max_new_tokens=5)),
    (STEM[:60], SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_new_tokens=7)),  # closes its chunk while it decodes
    (STEM + tokens(22, 3), SamplingParams(temperature=0.0, max_new_tokens=4)),
    (STEM[:64] + [5, 9], SamplingParams(temperature=1.4, top_k=40, min_p=0.01, seed=3, max_new_tokens=6)),
    (STEM + [4], SamplingParams(temperature=0.6, top_p=0.8, top_k=20, seed=2**64 - 1, max_new_tokens=5)),
    (tokens(64, 4), SamplingParams(temperature=2.0, seed=5, max_new_tokens=4)),
]
FAMILY = Family(CONFIGS, Qwen35ForRL, Qwen35ForServing, REQUESTS)
twins = FAMILY.twins
baseline = FAMILY.baseline
generate = FAMILY.generate


def engine(kind: str = "dense", **options: Any) -> Engine:
    return Engine(twins(kind)[1], **{"pages": 60, "page_size": 16, **options})


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
    order = random.Random(0)
    shuffled = engine(chunk_rows=13)
    for free in (shuffled.scheduler.pool.free_slots, shuffled.scheduler.pool.free):
        before = list(free)
        order.shuffle(free)
        assert list(free) != before
    assert generate(shuffled) == baseline("dense")
    # the control: slots that are read in another order than written
    swapped = engine(chunk_rows=13)
    table = Memory.table
    memory = swapped.scheduler.memory
    turns = itertools.count()

    def turned(pages: Any, slots: Any, blocks: int) -> Any:
        slots = list(slots)
        return table(memory, pages, slots[::-1] if next(turns) % 2 else slots, blocks)

    memory.table = turned  # type: ignore[method-assign]
    assert generate(swapped) != baseline("dense")


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_prefix_is_a_cold_one(kind: str) -> None:
    """A prefix is reused up to the last whole chunk of a prompt that was there before."""
    warm = engine(kind)
    assert generate(warm) == baseline(kind)
    before = warm.stats.reused_rows
    assert generate(warm) == baseline(kind)
    assert warm.stats.reused_rows - before == 128 + 64 + 128  # of prompts of 150, 66 and 129; 64 tokens keep their last row


def test_a_wrong_snapshot_is_caught() -> None:
    warm = engine()
    generate(warm)
    snapshots = list(warm.scheduler.pool.snapshots.values())
    assert snapshots
    for snapshot in snapshots:
        snapshot.slot["start_SVKE"].add_(1e-2)
    assert generate(warm) != baseline("dense")


LONG = tokens(400, 8)
STRIDES = {  # stride: (tokens in common with LONG, tokens of its own, rows reused)
    64: [(400, 0, 384), (384, 1, 384), (384, 0, 320), (383, 9, 320), (64, 1, 64), (64, 0, 0), (63, 40, 0)],
    128: [(400, 0, 384), (384, 0, 256), (300, 5, 256), (255, 5, 128), (130, 0, 128), (127, 3, 0)],
    192: [(400, 7, 384), (383, 1, 192), (200, 0, 192), (192, 0, 0)],
    1024: [(400, 0, 384), (385, 0, 384), (384, 1, 384), (384, 0, 0), (383, 20, 0)],
}


def asked(common: int, own: int) -> list[int]:
    return LONG[:common] + tokens(own, common)


@cache
def cold(common: int, own: int) -> tuple[dict[str, Any], dict[int, Any]]:
    return watched(engine(prefix_cache=False, chunk_rows=150), asked(common, own))


def watched(served: Engine, prompt: list[int], new_tokens: int = 2) -> tuple[dict[str, Any], dict[int, Any]]:
    """A prompt's record, and every cached byte of it by the number of its tokens."""
    found = {}
    memory = served.scheduler.memory
    done = []
    served.add(prompt, SamplingParams(seed=6, max_new_tokens=new_tokens))
    request = served.scheduler.waiting[0]
    while not done:
        poison(served)
        shared = {node.page: memory.tensors()["k"][:, node.page].clone() for node in served.scheduler.pool.nodes.values()}
        done = served.step()
        assert all(torch.equal(memory.tensors()["k"][:, page], k) for page, k in shared.items()), "a shared page was written"
        if not done:
            found[request.computed] = memory.written(request.pages, request.computed, request.slot)
    return numbers(done[0]), found


def differing(warm: dict[int, Any], cold: dict[int, Any]) -> list[tuple[int, str]]:
    assert max(warm) in cold
    return [(n, name) for n in sorted(warm.keys() & cold.keys()) for name, t in cold[n].items() if not torch.equal(warm[n][name], t)]


@pytest.mark.parametrize("page", (16, 80, 128))
@pytest.mark.parametrize("stride", STRIDES)
def test_the_nearest_snapshot_is_restored_and_the_rest_pushed(page: int, stride: int) -> None:
    warm = engine(page_size=page, pages=1 + 800 // page, snapshot_stride=stride)
    assert watched(warm, LONG)[0] == cold(400, 0)[0]
    pool = warm.scheduler.pool
    kept = dict(pool.snapshots)
    assert len(kept) == len({384, *range(stride, 400, stride)})
    for common, own, reused in STRIDES[stride]:
        pool.snapshots = dict(kept)
        before = replace(warm.stats)
        record, caches = watched(warm, asked(common, own))
        assert record == cold(common, own)[0] and not differing(caches, cold(common, own)[1])
        assert warm.stats.reused_rows - before.reused_rows == reused
        rows = warm.stats.prefill_rows + warm.stats.decode_rows - before.prefill_rows - before.decode_rows
        assert rows == common + own - reused + 1  # the first of two drawn tokens is pushed too


@pytest.mark.parametrize("faulty", (False, True))
def test_nobody_writes_into_a_shared_page(faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has the whole page that a snapshot ends in: a start shares the pages before it only, and has this one of its own."""
    warm = engine(page_size=80, pages=12, snapshot_stride=64)
    nearest = Scheduler._nearest
    push = warm.runner.push
    started: list[int] = []

    def shared_open_page(scheduler: Scheduler, request: Request, cached: list[Any]) -> Start:
        start = nearest(scheduler, request, cached)
        return replace(start, nodes=cached[: -(-start.length // 80)])

    def watched_push(single: list[Request], chunks: list[tuple[Request, int]]) -> Any:
        for request in (*single, *(request for request, _ in chunks)):
            started.append(request.computed)
            assert request.computed >= 80 * len(request.nodes), "it writes into a shared page"
        return push(single, chunks)

    if faulty:
        monkeypatch.setattr(Scheduler, "_nearest", shared_open_page)
    warm.runner.push = watched_push  # type: ignore[method-assign]
    params = SamplingParams(seed=1, max_new_tokens=2)
    first = warm.generate([LONG[:170]], params)[0]
    if faulty:
        with pytest.raises(AssertionError, match="it writes into a shared page"):
            warm.generate([LONG[:170]], params)
        return
    del started[:]
    assert numbers(warm.generate([LONG[:170]], params)[0]) == numbers(first)
    assert started[0] == 128  # 80 tokens of a shared page, 48 of one of its own


@pytest.mark.parametrize("page", (80, 128))
@pytest.mark.parametrize("length", (65, 70, 128, 129))
def test_short_prompts_are_reused(page: int, length: int) -> None:
    """Below a page there is no full page to share: the snapshot has all rows."""
    warm = engine(page_size=page, pages=12)
    assert [watched(warm, LONG[:length])[0] for _ in range(2)] == [cold(length, 0)[0]] * 2
    assert warm.stats.reused_rows == (length - 1) // 64 * 64
    before = warm.stats.reused_rows
    assert watched(warm, asked(length, 3))[0] == cold(length, 3)[0]
    assert warm.stats.reused_rows - before == length // 64 * 64


class ClosedPages(Memory):
    """A fault: a snapshot's rows of the open page are not copied."""

    def restore(self, slot: int, pages: Any, snapshot: Snapshot) -> None:
        for part in self.slot_parts:
            part.restore(slot, snapshot.slot)


class EmptyStates(Memory):
    """A fault: the state is that of no tokens."""

    def snapshot(self, slot: int, length: int, pages: Any) -> Snapshot:
        found = super().snapshot(slot, length, pages)
        return replace(found, slot={**found.slot, "start_SVKE": torch.zeros_like(found.slot["start_SVKE"])})


@pytest.mark.parametrize(("fault", "name"), [(ClosedPages, "k"), (EmptyStates, "delta_start")])
def test_a_snapshot_without_a_part_is_caught(fault: type[Memory], name: str) -> None:
    warm = engine(page_size=80, pages=12)
    warm.scheduler.memory.__class__ = fault
    watched(warm, LONG[:390])
    record, caches = watched(warm, LONG[:390])
    assert warm.stats.reused_rows == 384
    assert name in {name for _, name in differing(caches, cold(390, 0)[1])} and record != cold(390, 0)[0]


class FirstMade(PagePool):
    """A fault: the snapshot made first goes first, though it was used since."""

    def use(self, key: Key) -> Any:
        return self.snapshots[key]


@pytest.mark.parametrize("pool", (PagePool, FirstMade))
def test_the_least_recently_used_snapshot_goes(pool: type[PagePool]) -> None:
    small = engine(page_size=80, max_batch=2)
    small.scheduler.pool.__class__ = pool
    a, b, c = (tokens(70, n) for n in (21, 22, 23))
    reused = []
    for prompt in (a, b, a, c, a, b, a):  # room for two: c takes b's, then b takes c's
        before = small.stats.reused_rows
        small.generate([prompt], SamplingParams(max_new_tokens=1))
        reused.append(small.stats.reused_rows - before)
        assert len(small.scheduler.pool.snapshots) <= 2
    assert (reused == [0, 0, 64, 0, 64, 0, 64]) == (pool is PagePool)


def test_a_snapshot_goes_with_its_page() -> None:
    """Pages that others needed take the snapshots after them along; those that remain are of pages that remain."""
    tight = engine(page_size=16, pages=14)
    for n in range(4):
        assert numbers(tight.generate([tokens(130, n)], SamplingParams(seed=6, max_new_tokens=2))[0])
        pool = tight.scheduler.pool
        assert {key[0] for key in pool.snapshots} <= {node.number for node in pool.nodes.values()}
    assert 1 <= len(pool.snapshots) < 4


def test_a_stride_is_whole_chunks() -> None:
    for stride, message in ((100, "multiple of 64, not 100"), (0, "at least 1, not 0")):
        with pytest.raises(ValueError, match=f"snapshot_stride must be .*{message}"):
            engine(snapshot_stride=stride)


def test_slots_are_as_many_as_requests_and_are_given_back() -> None:
    served = engine(max_batch=3)
    generate(served)
    memory = served.scheduler.memory
    pool = served.scheduler.pool
    assert (memory.slots, pool.slots, memory.nbytes) == (3, 3, twins("dense")[1].make_memory(60, 16, 3).nbytes)
    held = [weakref.ref(t) for t in memory.tensors().values()]
    held += [weakref.ref(snapshot) for snapshot in pool.snapshots.values()]
    assert len(held) > 10
    del memory, pool
    served.release_memory()
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert (served.scheduler.memory.slots, served.scheduler.memory.pages) == (1, 2)
    served.resume_memory()
    assert served.scheduler.memory.slots == 3
    assert generate(served) == baseline("dense")


@settings(max_examples=12)
@given(
    options=st.fixed_dictionaries(
        {
            "page_size": st.sampled_from((16, 80, 128)),
            "snapshot_stride": st.sampled_from((64, 128, 1024)),
            "max_batch": st.integers(1, 4),
            "chunk_rows": st.sampled_from((31, 64, 100, 2048)),
            "pages": st.integers(16, 30),
        }
    ),
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from((65, 80, 144, 170, 192))),
            st.tuples(st.just("step"), st.integers(1, 3)),
            st.tuples(st.just("preempt"), st.integers(0, 9)),
        ),
        min_size=3,
        max_size=9,
    ),
)
def test_no_schedule_of_shared_prefixes_moves_a_byte(options: dict[str, Any], moves: list[tuple[str, int]]) -> None:
    served = engine(**options)
    asked_for = {}
    done = []
    for move, value in [*moves, ("step", 500)]:
        if move == "add":
            common = value
            own = len(asked_for) % 3 * 7
            asked_for[served.add(asked(common, own), SamplingParams(seed=6, max_new_tokens=2))] = common, own
        elif move == "preempt" and served.scheduler.running:
            served.preempt(served.scheduler.running[value % len(served.scheduler.running)].request_id)
        for _ in range(value if move == "step" else 0):
            if served.busy:
                poison(served)
                done += served.step()
    assert len(done) == len(asked_for) and not served.busy
    pool = served.scheduler.pool
    assert pool.available == options["pages"] - 1 and len(pool.free_slots) == options["max_batch"]
    assert len(pool.snapshots) <= served.scheduler.memory.snapshots
    for record in done:
        assert numbers(record) == cold(*asked_for[record.request_id])[0]


@pytest.mark.parametrize(("page", "length"), [(16, 129), (80, 129), (80, 70), (128, 70), (128, 64)])
def test_samples_of_one_prompt_share_its_rows(page: int, length: int) -> None:
    group = engine(page_size=page)
    prompt = LONG[:length]
    params = [SamplingParams(seed=n, max_new_tokens=3) for n in range(4)]
    records = group.generate([prompt] * 4, params)
    assert group.stats.reused_rows == 3 * ((length - 1) // 64 * 64)
    alone = engine(prefix_cache=False)
    assert [numbers(r) for r in records] == [numbers(alone.generate([prompt], p)[0]) for p in params]


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


class Broken(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", (Broken, KeyboardInterrupt))
@pytest.mark.parametrize("at", (1, 2, 4, 6))
def test_a_step_that_breaks_off_leaves_no_trace(kind: str, error: type[BaseException], at: int) -> None:
    """The first layer has written its slots by then; nothing of that is read, then or by a later request."""
    served = engine(kind, chunk_rows=50)
    left = [at]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    handle = served.model.model.layers[-1].register_forward_pre_hook(hook)
    ids = [served.add(*request) for request in REQUESTS]
    done = []
    with pytest.raises(error):
        while True:
            done += served.step()
    handle.remove()
    pool = served.scheduler.pool
    assert not served.scheduler.running and not pool.nodes and not pool.snapshots and len(pool.free_slots) == pool.slots
    done += drive(served)
    records = {record.request_id: numbers(record) for record in done}
    assert [records[request_id] for request_id in ids] == baseline(kind)
    before = served.stats.reused_rows
    assert generate(served) == baseline(kind)
    assert served.stats.reused_rows > before


@pytest.mark.parametrize("kind", KINDS)
def test_weights_from_a_checkpoint_that_stores_narrow(tmp_path: Path, kind: str) -> None:
    """A_log, dt_bias and the gated norm may be stored in BF16: an update takes what a load takes, to the same bytes."""
    Qwen35ForServing.from_config(CONFIGS[kind], seed=2, device="cpu").save_pretrained(tmp_path / "next")
    file = tmp_path / "next" / "model.safetensors"
    stored = load_file(file)
    assert any(t.dtype == torch.float32 for t in stored.values())
    save_file({name: t.bfloat16() for name, t in stored.items()}, file, metadata={"format": "pt"})
    served = Engine(Qwen35ForServing.from_config(CONFIGS[kind], seed=1, device="cpu"), pages=60, page_size=16)
    loaded = Qwen35ForServing.from_pretrained(tmp_path / "next", device="cpu")
    assert served.update_weights(tmp_path / "next") == loaded.weights_version != twins(kind)[1].weights_version
    fresh = Engine(loaded, pages=60, page_size=16)
    assert [numbers(r) for r in served.generate(*zip(*REQUESTS))] == [numbers(r) for r in fresh.generate(*zip(*REQUESTS))]


def test_a_record_is_drawn_again() -> None:
    trainer = twins("dense")[0]
    for values in baseline("dense"):
        check_draws(trainer, Completion.from_dict({**values, "request_id": "0"}))
    record = Completion.from_dict({**baseline("dense")[0], "request_id": "0"})
    with pytest.raises(ValueError, match="drawn again"):
        check_draws(trainer, replace(record, sampling=replace(record.sampling, seed=7)))


class TwoSlots(Qwen35ForServing):
    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> Memory:
        return super().make_memory(pages, page_size, 2)


class StaleSlots(TwoSlots):
    """A fault: a slot keeps the state of the sequence that had it before."""

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> Memory:
        memory = super().make_memory(pages, page_size, slots)
        for part in memory.slot_parts:
            part.clear = lambda slots: None  # type: ignore[method-assign]
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
    weights = FAMILY.weights("dense")
    served.update_weights(weights)
    trainer.load_weights(weights)
    before = served.stats.reused_rows
    again = served.generate(*zip(*REQUESTS))
    assert served.stats.reused_rows - before <= 64 + 128  # within the new version only
    for record in again:
        assert trained(trainer, record) == {name: getattr(record, name) for name in ("output_ids", "log_probs", "filtered_log_probs")}
    assert [r.output_ids for r in again] != [r.output_ids for r in first]


class Forgetful(Engine):
    """A fault: an update by "recompute" leaves requests their slots and rows, as "keep" does, but calls them exact."""

    def update_weights(self, *args: Any, **options: Any) -> str:
        version = super().update_weights(*args, **{**options, "mode": "keep"})
        for request in self.scheduler.running:
            request.exact = request.pure = True
        return version


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "served_by"), [(1, Engine), (2, Engine), (4, Engine), (1, Forgetful), (4, Forgetful)])
def test_an_update_with_recompute_while_requests_hold_slots(kind: str, steps: int, served_by: type[Engine]) -> None:
    """In the middle of prompts and of drawing: tokens drawn before stay, all after is the new trainer's, and so is the cache."""
    old, new = (Qwen35ForRL.from_config(CONFIGS[kind], seed=seed, device="cpu") for seed in (1, 2))
    served = served_by(
        Qwen35ForServing.from_config(CONFIGS[kind], seed=1, device="cpu"), pages=40, page_size=80, chunk_rows=70, snapshot_stride=64
    )
    ids = [served.add(*request) for request in REQUESTS]
    done = [record for _ in range(steps) for record in served.step()]
    assert not done
    drawn = {request_id: len(served.requests.find(request_id).log_probs) for request_id in ids}
    running = [request for request in served.scheduler.running if request.computed]
    assert running and all(request.slot for request in running)
    assert any(request.computed % 64 for request in running)
    served.update_weights(new.published_tensors(), mode="recompute")
    assert served_by is Forgetful or (not served.scheduler.running and len(served.scheduler.pool.free_slots) == 64)
    records = {record.request_id: record for record in drive(served)}
    wrong = 0
    for request_id in ids:
        record = records[request_id]
        count = drawn[request_id]
        assert record.exact
        versions = (old.weights_version,) * count + (new.weights_version,) * (len(record.output_ids) - count)
        by_old = trained(old, record)
        by_new = trained(new, record)
        wanted = {name: (*by_old[name][:count], *by_new[name][count:]) for name in by_old}
        wrong += {name: getattr(record, name) for name in wanted} != wanted or record.output_versions != versions
    fresh = Engine(Qwen35ForServing.from_config(CONFIGS[kind], seed=2, device="cpu"), pages=60, page_size=16, prefix_cache=False)
    wrong += [numbers(r) for r in served.generate(*zip(*REQUESTS))] != [numbers(r) for r in fresh.generate(*zip(*REQUESTS))]
    assert (wrong > 0) == (served_by is Forgetful)


@pytest.mark.parametrize("shared", (False, True))
def test_rows_and_states_of_two_versions_are_not_shared(shared: bool) -> None:
    """ "keep" leaves a sequence whose state began under old weights. The control: a request that may share its pages."""
    model = Qwen35ForServing.from_config(CONFIGS["dense"], seed=1, device="cpu")
    served = Engine(model, pages=60, page_size=80, chunk_rows=30, snapshot_stride=64)
    request_id = served.add(LONG[:200], REQUESTS[0][1])
    served.step()
    served.update_weights(FAMILY.weights("dense"), mode="keep")
    request = served.requests.find(request_id)
    assert request.slot and request.computed == 30
    request.pure |= shared
    assert not drive(served)[0].exact
    fresh = Engine(Qwen35ForServing.from_config(CONFIGS["dense"], seed=2, device="cpu"), pages=60, page_size=16, prefix_cache=False)
    again, wanted = (e.generate([LONG[:200]], [REQUESTS[0][1]])[0] for e in (served, fresh))
    assert (numbers(again) == numbers(wanted), served.stats.reused_rows) == ((False, 192) if shared else (True, 0))


def test_memory_is_given_back_and_taken_again() -> None:
    served = engine()
    generate(served)
    ids = [served.add(*request) for request in REQUESTS]
    served.step()
    served.release_memory()
    served.resume_memory()
    done = {record.request_id: numbers(record) for record in drive(served)}
    assert [done[request_id] for request_id in ids] == baseline("dense")


def published(name: str) -> Qwen35Config:
    """A published size's states and pages around little else."""
    config = {**SIZES, **MOE_SIZES}[name]
    experts = (
        {"experts": 2, "experts_per_token": 1, "expert_intermediate": 16, "shared_intermediate": 16}
        if config.experts
        else {"intermediate": 16}
    )
    return replace(config, hidden=16, heads=config.kv_heads, vocabulary=300, eos=(), **experts)


@pytest.mark.parametrize("name", [name for name in (*SIZES, *MOE_SIZES) if name != "tiny"])
def test_default_memory_serves_published_sizes(name: str) -> None:
    """Slots and snapshots give way until there is room for pages; the sum stays in its budget."""
    served = Engine(Qwen35ForServing.from_config(published(name), seed=1, device="cpu"))
    memory = served.scheduler.memory
    assert memory.nbytes <= CPU_BYTES and memory.pages >= 100
    assert 1 <= memory.slots == memory.snapshots == served.scheduler.max_batch < 64
    served.add(tokens(1000, 1), SamplingParams(max_new_tokens=1000))
    if name == "4b":
        served.release_memory()
        served.resume_memory()
        assert served.scheduler.memory.slots == memory.slots and served.scheduler.memory.nbytes == memory.nbytes


def test_pages_that_fit_leave_room_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default number of pages counts slots and snapshots once, not with every page; a request fits, or none is served."""
    model = twins("dense")[1]
    memory = Engine(model).scheduler.memory
    assert memory.pages > 100 and memory.slots == 64 and memory.nbytes <= CPU_BYTES
    least = model.make_memory(2, None, 1).nbytes
    for room, slots in ((least, 1), (least + 100_000, 1), (2 * least, 1), (10 * least, 5), (100 * least, 50)):
        monkeypatch.setattr(sizing, "CPU_BYTES", room)
        memory = Engine(model).scheduler.memory
        assert memory.nbytes <= room and memory.pages >= 2 and memory.slots >= slots
    monkeypatch.setattr(sizing, "CPU_BYTES", least - 1)
    with pytest.raises(ValueError, match=f"one request of one page takes {least:,} bytes, there is room for {least - 1:,}"):
        Engine(model)


def test_default_sizes_are_measured_within_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second slot is allocated where it can't be had, and nothing more at all after a least memory that is too large."""
    model = twins("dense")[1]
    make = model.make_memory
    made = list[tuple[int, int | None, int]]()

    def noted(pages: int, page_size: int | None = None, slots: int = 1) -> Memory:
        made.append((pages, page_size, slots))
        return make(pages, page_size, slots)

    least = make(2, None, 1).nbytes
    page = make(3, None, 1).nbytes - make(2, None, 1).nbytes
    both = 2 * (least - page)  # from here on half of what is left may be a second slot
    monkeypatch.setattr(model, "make_memory", noted)
    tried = {least - 1: [(2, 1)], least: [(2, 1), (3, 1)], both - 1: [(2, 1), (3, 1)], both: [(2, 1), (3, 1), (2, 2)]}
    for room, sizes in tried.items():
        made.clear()
        monkeypatch.setattr(sizing, "CPU_BYTES", room)
        if room < least:
            with pytest.raises(ValueError, match="one request of one page takes"):
                Engine(model)
        else:
            memory = Engine(model).scheduler.memory
            made.pop()  # the engine's own
            assert memory.slots == 1 and memory.nbytes <= room < memory.nbytes + page
        assert [(pages, slots) for pages, _, slots in made] == sizes

    def full(*_: Any) -> Memory:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "make_memory", full)
    with pytest.raises(ValueError, match=f"one request of one page does not fit, there is room for {both:,} bytes"):
        Engine(model)


def test_generate_asks_for_as_many_slots_as_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a published size, which 64 slots would not leave a page of the default memory."""
    config = replace(published("4b"), layers=8, full=SIZES["4b"].full[:8], vocabulary=512, eos=tuple(range(512)))
    Qwen35ForServing.from_config(config, seed=1, device="cpu").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 512)
    made: list[Engine] = []

    class Kept(Engine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(generate_module, "Engine", Kept)
    done = generate_module.generate_command(tmp_path, ["The trainer", "and the sampler"], device="cpu")
    assert [g.completion.finish_reason for g in done] == ["stop", "stop"]
    memory = made[0].scheduler.memory
    assert memory.slots == 2 and memory.nbytes <= CPU_BYTES
