"""The engine leaves every byte as it was: batches, chunks, pages, reuse, preemption, aborts, updates. Each with a control."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import (
    QWEN3,
    REQUESTS,
    STEM,
    SkippingScheduler,
    baseline,
    check_pages,
    drive,
    generate,
    numbers,
    plant,
    poison,
    scored,
    serving,
    tokens,
    trained,
    twins,
)
from safetensors.torch import load_file, save_file

from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.engine.pages import Key, Node, PagePool
from zoo.common.engine.request import Request
from zoo.common.engine.runner import Runner, batch_bucket
from zoo.common.engine.scheduler import Scheduler
from zoo.common.generate import generate_command
from zoo.common.memory import Memory, SlotPart
from zoo.common.ops import CONTRACTS, watch
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows
from zoo.qwen3 import Qwen3Config, Qwen3ForServing

KINDS = ("dense", "moe")


def engine(kind: str = "dense", **options: Any) -> Engine:
    return Engine(twins(kind)[1], **{"pages": 24, "page_size": 16, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_draws_and_scores_the_same_bytes(kind: str) -> None:
    trainer = twins(kind)[0]
    for values in baseline(kind):
        record = Completion.from_dict({**values, "request_id": "0"})
        again = trained(trainer, record)
        assert again == {name: getattr(record, name) for name in again}
        assert record.filtered_log_probs == scored(trainer, record, record.sampling)
        unfiltered = record.sampling if record.sampling.is_greedy else SamplingParams(record.sampling.temperature)
        assert record.log_probs == scored(trainer, record, unfiltered)
    assert any(values["log_probs"] != values["filtered_log_probs"] for values in baseline(kind))


class LateRunner(Runner):
    """A fault: noise of the position after the one that is drawn."""

    def _decode_sampling(self, requests: list[Request]) -> RowSampling:
        rows = super()._decode_sampling(requests)
        return replace(rows, position_R=rows.position_R + 1)


def test_a_position_off_by_one_in_the_seed_is_caught() -> None:
    broken = engine()
    broken.runner = LateRunner(broken.model, broken.scheduler.memory, graphs=False, chunk_rows=2048)
    record = broken.generate([REQUESTS[5][0]], REQUESTS[5][1])[0]
    assert trained(twins("dense")[0], record)["output_ids"] != record.output_ids
    assert numbers(record) != baseline("dense")[5]


VARIANTS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one at a time": {"max_batch": 1},
    "two at a time, 7 rows": {"max_batch": 2, "chunk_rows": 7},
    "a row at a time": {"chunk_rows": 1, "prefix_cache": False},
    "chunks of 16": {"chunk_rows": 16, "prefix_cache": False},
    "pages of 64": {"page_size": 64, "chunk_rows": 33},
    "pages of 128": {"page_size": 128, "pages": 8, "chunk_rows": 50},
    "few pages": {"pages": 8, "chunk_rows": 20},
    "few pages, nothing cached": {"pages": 7, "prefix_cache": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_schedule_moves_a_byte(kind: str, options: dict[str, Any]) -> None:
    assert generate(engine(kind, **options)) == baseline(kind)


def test_page_order_moves_no_byte() -> None:
    shuffled = engine(chunk_rows=13)
    random.shuffle(shuffled.scheduler.pool.free)
    assert generate(shuffled) == baseline("dense")


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_prefix_is_a_cold_one(kind: str) -> None:
    warm = engine(kind)
    assert generate(warm) == baseline(kind)
    before = warm.stats.reused_rows
    assert generate(warm) == baseline(kind)
    assert warm.stats.reused_rows - before == 64 + 48 + 32 + 16  # whole pages short of each prompt's last row


def test_a_wrong_cached_byte_is_caught() -> None:
    warm = engine()
    generate(warm)
    page = next(iter(warm.scheduler.pool.nodes.values())).page
    warm.scheduler.memory.tensors()["v"][0, page, 3] += 1.0
    assert generate(warm) != baseline("dense")


def test_samples_of_one_prompt_share_its_rows() -> None:
    group = engine()
    params = [SamplingParams(seed=n, max_new_tokens=3) for n in range(4)]
    records = group.generate([STEM] * 4, params)
    assert group.stats.prefill_rows == 48 + 3 * 16 and group.stats.reused_rows == 3 * 32
    alone = engine(prefix_cache=False)
    assert [numbers(r) for r in records] == [numbers(alone.generate([STEM], p)[0]) for p in params]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", (False, True))
def test_preempted_is_uninterrupted(kind: str, cached: bool) -> None:
    interrupted = engine(kind, prefix_cache=cached, chunk_rows=40)
    ids = [interrupted.add(*request) for request in REQUESTS]
    done: list[Completion] = []
    for turn in range(1000):
        if not interrupted.busy:
            break
        if turn % 3 == 2:
            for request in list(interrupted.scheduler.running)[turn % 2 :: 2]:
                interrupted.preempt(request.request_id)
        poison(interrupted)
        done += interrupted.step()
        check_pages(interrupted)
    assert interrupted.stats.preemptions >= 4
    by_id = {record.request_id: numbers(record) for record in done}
    assert [by_id[request_id] for request_id in ids] == baseline(kind)


def test_a_resume_with_a_row_missing_is_caught() -> None:
    broken = plant(engine(prefix_cache=False), SkippingScheduler)
    request_id = broken.add(*REQUESTS[3])
    for _ in range(3):
        broken.step()
    broken.preempt(request_id)
    assert numbers(broken.run()[0]) != baseline("dense")[3]


def test_aborted_neighbours_move_no_byte() -> None:
    crowded = engine(chunk_rows=24)
    ids = [crowded.add(*request) for request in REQUESTS]
    kept = {ids[1], ids[4]}
    done = []
    aborted = []
    for request_id in ids:
        poison(crowded)
        done += crowded.step()
        if request_id not in kept and request_id not in {r.request_id for r in done}:
            aborted.append(crowded.abort(request_id))
        check_pages(crowded)
    by_id = {record.request_id: numbers(record) for record in done + drive(crowded)}
    expected = dict(zip(ids, baseline("dense"), strict=True))
    assert len(aborted) >= 3 and kept <= by_id.keys()
    assert all(values == expected[request_id] for request_id, values in by_id.items())
    for record in aborted:
        whole = Completion.from_dict({**expected[record.request_id], "request_id": ""})
        assert record.finish_reason == "abort"
        assert record.log_probs == whole.log_probs[: len(record.log_probs)]
        assert record.output_ids == whole.output_ids[: len(record.output_ids)]
    assert crowded.scheduler.pool.available == 23


def rows_of(op: str, work: Callable[[], Any]) -> int:
    pushed = 0

    def count(contract: Any, arguments: dict[str, Any], result: Any) -> None:
        nonlocal pushed
        pushed += result.shape[0] if contract is CONTRACTS[op] else 0

    with watch(count):
        work()
    return pushed


def test_decoding_n_tokens_pushes_n_rows() -> None:
    prompt, params = REQUESTS[5]
    counted = engine()
    assert rows_of("embed", lambda: counted.generate([prompt], params)) == len(prompt) + params.max_new_tokens - 1
    batch = engine(prefix_cache=False)
    asked = sum(len(p) + s.max_new_tokens - 1 for p, s in REQUESTS)
    assert rows_of("embed", lambda: generate(batch)) == asked == batch.stats.prefill_rows + batch.stats.decode_rows
    assert rows_of("embed", lambda: counted.generate([prompt], params)) == len(prompt) % 16 + params.max_new_tokens - 1


class DirtyMemory(Memory):
    """A fault: pages are assigned with whatever they hold."""

    def clear(self, pages: Any, slots: Any = ()) -> None:
        pass


def test_a_page_that_is_not_cleaned_is_caught() -> None:
    dirty = engine()
    dirty.scheduler.memory.__class__ = DirtyMemory
    with pytest.raises(AssertionError, match="holds something behind"):
        generate(dirty)


@pytest.mark.parametrize("chunk_rows", (5, 2048))
def test_prompt_log_probs_are_the_trainers(chunk_rows: int) -> None:
    trainer = twins("dense")[0]
    record = None
    asked = engine(chunk_rows=chunk_rows)
    asked.generate([STEM])  # a cached prefix must not hide rows that are to be scored
    for prompt in ([7], STEM + [4]):
        request_id = asked.add(prompt, SamplingParams(temperature=0.5, max_new_tokens=3), prompt_log_probs=True)
        asked.step()
        asked.preempt(request_id)
        record = asked.run()[0]
        values = trainer.score(torch.tensor(prompt), torch.tensor([0, len(prompt)]))[:-1]
        assert record.prompt_log_probs == tuple(values.tolist())
    assert record is not None and len(set(record.prompt_log_probs or ())) > 40


# weight updates


def updated(kind: str, mode: str, steps: int, weights: Any = None) -> tuple[Engine, list[Request], list[Completion]]:
    """An engine whose weights changed after some steps, what its requests had then, and what they became."""
    served = Engine(serving(kind), pages=30, page_size=16, chunk_rows=40)
    ids = [served.add(*request) for request in REQUESTS]
    done = [record for _ in range(steps) for record in served.step()]
    assert not done
    before = [
        replace(served.requests.find(i), tokens=list(served.requests.find(i).tokens), log_probs=list(served.requests.find(i).log_probs))
        for i in ids
    ]
    served.update_weights(QWEN3.weights(kind) if weights is None else weights, mode)
    by_id = {record.request_id: record for record in drive(served)}
    return served, before, [by_id[i] for i in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", (1, 3))
def test_an_update_with_recompute_is_a_fresh_engine_given_the_same_tokens(kind: str, steps: int) -> None:
    served, before, after = updated(kind, "recompute", steps)
    fresh = Engine(serving(kind, seed=2), pages=30, page_size=64, prefix_cache=False)
    old = serving(kind).weights_version
    assert served.version == fresh.version != old
    assert any(request.log_probs for request in before) and any(not request.log_probs for request in before) == (steps == 1)
    for request, record in zip(before, after, strict=True):
        drawn = len(request.log_probs)
        params = replace(record.sampling, max_new_tokens=record.sampling.max_new_tokens - drawn)
        alone = fresh.generate([request.tokens], params)[0]
        assert record.output_ids[drawn:] == alone.output_ids
        assert record.log_probs == (*request.log_probs, *alone.log_probs)
        assert record.filtered_log_probs[drawn:] == alone.filtered_log_probs
        assert record.output_versions == (old,) * drawn + (fresh.version,) * len(alone.output_ids)
        assert record.exact


def test_keep_tags_rows_and_is_not_exact() -> None:
    served, before, after = updated("dense", "keep", 3)
    old = serving("dense").weights_version
    fresh = Engine(serving("dense", seed=2), pages=30, page_size=64)
    differing = 0
    for request, record in zip(before, after, strict=True):
        drawn = len(request.log_probs)
        assert not record.exact
        assert record.versions == (old,) * request.computed + (served.version,) * (len(record.versions) - request.computed)
        alone = fresh.generate([request.tokens], replace(record.sampling, max_new_tokens=record.sampling.max_new_tokens - drawn))[0]
        differing += record.log_probs[drawn:] != alone.log_probs
    assert differing == len(after)  # so the comparison of the test above can fail
    again = served.generate([p for p, _ in REQUESTS], [s for _, s in REQUESTS])
    assert [numbers(r) for r in again] == [numbers(fresh.generate([p], s)[0]) for p, s in REQUESTS]


@pytest.mark.parametrize("shared", (False, True))
def test_rows_of_two_versions_are_not_shared(shared: bool) -> None:
    """A page that "keep" left half full of old rows is filled by new weights. The control: a request that may share it."""
    served = Engine(serving("dense"), pages=30, page_size=64, chunk_rows=30)
    prompt = tokens(150, 7)
    request_id = served.add(prompt, REQUESTS[0][1])
    served.step()
    assert served.requests.find(request_id).computed == 30
    served.update_weights(QWEN3.weights("dense"), "keep")
    if shared:
        served.requests.find(request_id).pure = True
    [first] = drive(served)
    assert not first.exact
    fresh = Engine(serving("dense", seed=2), pages=30, page_size=64, prefix_cache=False).generate([prompt], REQUESTS[0][1])[0]
    again = served.generate([prompt], REQUESTS[0][1])[0]
    assert (numbers(again) == numbers(fresh), served.stats.reused_rows) == ((False, 128) if shared else (True, 0))


class UnversionedPool(PagePool):
    """A fault: cached pages answer for whatever weights."""

    def key(self, version: str, parent: Node | None, tokens: Any) -> Key:
        return super().key("", parent, tokens)


@pytest.mark.parametrize("pool", (PagePool, UnversionedPool))
def test_a_stale_prefix_is_never_read(pool: type[PagePool]) -> None:
    served = Engine(serving("dense"), pages=30, page_size=16)
    served.scheduler.pool = pool(30, 0, 16)
    first = numbers(served.generate([STEM], REQUESTS[0][1])[0])
    served.update_weights(QWEN3.weights("dense"))
    got = numbers(served.generate([STEM], REQUESTS[0][1])[0])
    fresh = numbers(Engine(serving("dense", seed=2)).generate([STEM], REQUESTS[0][1])[0])
    assert (got == fresh) == (pool is PagePool)
    if pool is PagePool:  # pages are keyed by content, so the first weights find theirs again
        reused = served.stats.reused_rows
        model = serving("dense")
        parameters = dict(model.named_parameters())
        served.update_weights((p.published, p.of(parameters[e.ours])) for e, p in model.table_of().pieces())
        assert numbers(served.generate([STEM], REQUESTS[0][1])[0]) == first
        assert served.stats.reused_rows == reused + 32


def test_weights_from_a_checkpoint(tmp_path: Path) -> None:
    serving("dense", seed=2).save_pretrained(tmp_path / "next")
    assert [numbers(r) for r in updated("dense", "recompute", 2, tmp_path / "next")[2]] == [
        numbers(r) for r in updated("dense", "recompute", 2)[2]
    ]
    with pytest.raises(ValueError, match="geometry"):
        Engine(serving("moe"), pages=4).update_weights(tmp_path / "next")


def test_a_config_is_compared_by_its_fields(tmp_path: Path) -> None:
    class Mine(Qwen3Config):
        """As the family's, with somebody's own methods."""

    model = serving("dense", seed=2)
    model.save_pretrained(tmp_path / "next")
    mine = Mine(**vars(model.config))
    assert mine != model.config, "a dataclass compares classes"
    served = Engine(Qwen3ForServing.from_config(mine, device="cpu"), pages=4)
    assert served.update_weights(tmp_path / "next") == model.weights_version
    assert served.fingerprint().program == model.fingerprint().program
    other = Qwen3ForServing.from_config(replace(mine, theta=2 * mine.theta), device="cpu")
    with pytest.raises(ValueError, match="is of another geometry"):
        Engine(other, pages=4).update_weights(tmp_path / "next")


def test_a_refused_update_changes_nothing() -> None:
    served = Engine(serving("dense"), pages=24, page_size=16)
    request_id = served.add(*REQUESTS[4])
    served.step()
    name, tensor = QWEN3.weights("dense")[0]
    for weights, mode, message in (
        ([(name, tensor), ("model.nothing.weight", tensor)], "recompute", "no tensor"),
        ([(name, tensor[:5])], "recompute", "must be"),
        ([(name, torch.full_like(tensor, torch.nan))], "recompute", "NaN"),
        ([(name, tensor)], "replace", "recompute, keep"),
        ([(name, tensor), (QWEN3.weights("dense")[1][0], None)], "recompute", "must be a dense tensor with data, .* NoneType"),
        ([(name, tensor.to_sparse())], "recompute", "must be a dense tensor with data, .* torch.sparse_coo"),
        ([(name, tensor.to("meta"))], "recompute", "must be a dense tensor with data, .* meta"),
        (None, "recompute", "weights must be .* pairs, .* not NoneType"),
        (dict([(name, tensor)]), "recompute", "weights must be .* pairs, as published_tensors gives, not dict"),
        (served.model.state_dict(), "recompute", "weights must be .* pairs, .* not OrderedDict"),
        (tensor, "recompute", "weights must be .* pairs, .* not Tensor"),
        ([(name, tensor), name], "recompute", "pairs, entry 1 is a str and none"),
        ([(tensor, name)], "recompute", "pairs, entry 0 is a tuple and none"),
    ):
        with pytest.raises(ValueError, match=message):
            served.update_weights(weights, mode)
    with pytest.raises(ValueError, match="version must be text, a label for the fingerprint, not 3"):
        served.update_weights(QWEN3.weights("dense"), version=3)  # type: ignore[arg-type]
    assert served.scheduler.running[0].request_id == request_id
    assert numbers(served.run()[0]) == baseline("dense")[4]


def test_an_iterator_of_weights_serves_one_engine() -> None:
    first, second = (Engine(serving("dense"), pages=4) for _ in range(2))
    published = serving("dense", seed=2).published_tensors()
    version = first.update_weights(published)
    with pytest.raises(ValueError, match="iterator of weights has no tensor left"):
        second.update_weights(published)
    assert second.version == second.model.weights_version == twins("dense")[1].weights_version != version
    assert second.update_weights([]) == second.version  # the controls: what is empty on purpose, and a fresh iterator
    assert second.update_weights(serving("dense", seed=2).published_tensors()) == version


def test_weights_written_behind_the_engine_are_noticed() -> None:
    served = Engine(serving("dense"), pages=24, page_size=16)
    served.add(*REQUESTS[4])
    served.step()
    with torch.no_grad():
        served.model.model.norm.weight.mul_(2.0)
    with pytest.raises(ValueError, match="written since version"):
        served.step()
    before = served.version
    assert served.update_weights([]) != before
    assert served.run()[0].output_versions[-1] == served.version == served.model.weights_version


def test_weights_replaced_behind_the_engine_are_noticed() -> None:
    def norm(model: Qwen3ForServing) -> None:
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2, requires_grad=False)

    def assigned(model: Qwen3ForServing) -> None:
        model.load_state_dict(serving("dense", seed=2).state_dict(), assign=True)

    def data(model: Qwen3ForServing) -> None:
        model.model.norm.weight.data = model.model.norm.weight.data * 2

    def layer(model: Qwen3ForServing) -> None:
        model.model.layers[1] = serving("dense", seed=2).model.layers[1]

    for write in (norm, assigned, data, layer):
        served = Engine(serving("dense"), pages=24, page_size=16)
        first = served.version
        runner = served.runner
        served.update_weights([])
        assert served.version == first and served.runner is runner
        write(served.model)
        served.add(*REQUESTS[4])
        with pytest.raises(ValueError, match="written since version"):
            served.step()
        assert served.update_weights([]) == served.model.weights_version != first
        assert served.runner is not runner  # its graphs would read the weights that were there
        (record,) = served.run()
        alone = Engine(served.model, pages=24, page_size=64, prefix_cache=False).generate(*zip(REQUESTS[4]))[0]
        assert numbers(record) == numbers(alone) != baseline("dense")[4]


def test_an_update_that_breaks_off_is_not_taken_for_done() -> None:
    served = Engine(serving("dense"), pages=24, page_size=16)
    served.add(*REQUESTS[4])
    fingerprint = served.model.fingerprint
    served.model.fingerprint = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        served.update_weights(QWEN3.weights("dense"))
    served.model.fingerprint = fingerprint  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="written since version"):
        served.step()


def test_weights_whose_writes_are_not_counted_are_refused() -> None:
    with torch.inference_mode():
        uncounted = serving("dense")
    with pytest.raises(ValueError, match=r"was made under torch.inference_mode\(\)"):
        Engine(uncounted, pages=4)
    with pytest.raises(ValueError, match="wants gradients"):
        Engine(serving("dense").requires_grad_(True), pages=4)
    with pytest.raises(ValueError, match="takes a ForServing model, not Qwen3ForRL"):
        Engine(twins("dense")[0], pages=4)  # type: ignore[arg-type]


def test_a_checkpoint_is_rounded_as_at_a_load(tmp_path: Path) -> None:
    serving("dense", seed=2).save_pretrained(tmp_path / "wide")
    file = tmp_path / "wide" / "model.safetensors"
    stored = load_file(file)
    noise = {name: t.float() * (1.006) for name, t in stored.items()}  # so that rounding has something to do
    save_file(noise, file, metadata={"format": "pt"})
    served = Engine(serving("dense"), pages=24, page_size=16)
    with pytest.raises(ValueError, match="tensors of a wrong dtype.*dtype=torch.bfloat16 rounds"):
        served.update_weights(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"dtype=torch.float32 for a model whose weights are torch.bfloat16"):
        served.update_weights(tmp_path / "wide", dtype=torch.float32)
    with pytest.raises(ValueError, match="tensors are taken as they are"):
        served.update_weights([], dtype=torch.bfloat16)
    loaded = Qwen3ForServing.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16, device="cpu")
    assert served.update_weights(tmp_path / "wide", dtype=torch.bfloat16) == loaded.weights_version
    assert loaded.weights_version != serving("dense", seed=2).weights_version


# steps that break off


@pytest.mark.parametrize("at", range(1, 40, 2))
def test_a_step_that_breaks_off_leaves_no_trace(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is: among the layers, pages, cache or records."""
    served = engine(chunk_rows=40)
    left = [at]

    def breaking(name: str, owner: Any) -> None:
        call = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner, name, wrapped)

    scheduler = ("_start", "advance", "release", "schedule")
    pool = ("take", "insert", "hold", "release")
    for owner, names in ((Scheduler, scheduler), (PagePool, pool), (Runner, ("push",)), (Request, ("mark", "finish_reason"))):
        for name in names:
            breaking(name, owner)
    ids = [served.add(*request) for request in REQUESTS]
    done = []
    broken = 0
    while served.busy:
        poison(served)
        try:
            done += served.step()
        except KeyboardInterrupt:
            broken += 1
            assert not served.scheduler.running and not served.scheduler.pool.nodes
        check_pages(served)
    assert broken == 1
    records = {record.request_id: record for record in done}
    assert [numbers(records[request_id]) for request_id in ids] == baseline("dense")


def test_a_generate_that_fails_leaves_nothing_queued() -> None:
    served = engine()
    foreign = served.add(*REQUESTS[1])
    hook = served.model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served.generate(*zip(*REQUESTS))
    hook.remove()
    assert list(served.requests.active) == [foreign] and not served.requests.finished
    assert [numbers(record) for record in served.generate(*zip(*REQUESTS))] == baseline("dense")
    assert [numbers(record) for record in served.run()] == baseline("dense")[1:2]


def test_released_memory_comes_back() -> None:
    served = engine()
    served.add(*REQUESTS[4])
    served.step()
    served.release_memory()
    assert served.scheduler.memory.pages == 2
    with pytest.raises(ValueError, match="resume_memory"):
        served.step()
    served.add(*REQUESTS[2])  # of 5 pages, where there is 1 now
    with pytest.raises(ValueError, match="needs 26 pages of 16 tokens, there are 23"):
        served.add([1] * 400, SamplingParams(max_new_tokens=2))
    served.resume_memory()
    by_order = sorted(served.run(), key=lambda record: int(record.request_id))
    assert [numbers(record) for record in by_order] == [baseline("dense")[4], baseline("dense")[2]]


def test_memory_that_does_not_fit_yet_stays_released(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine()
    served.add(*REQUESTS[4])
    served.step()
    served.release_memory()
    make = served.model.make_memory

    def taken(pages: int, *rest: Any) -> Any:
        """Room for what a released engine holds, until the trainer has gone."""
        if pages > 2:
            raise torch.OutOfMemoryError("no room")
        return make(pages, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(served.model, "make_memory", taken)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                served.resume_memory()
        with pytest.raises(ValueError, match="resume_memory"):
            served.step()
        served.add(*REQUESTS[2])
    served.resume_memory()
    by_order = sorted(served.run(), key=lambda record: int(record.request_id))
    assert [numbers(record) for record in by_order] == [baseline("dense")[4], baseline("dense")[2]]


# a memory with per-sequence state


class CountingSlots(SlotPart):
    """A slot's state is how many tokens were pushed. `bad` makes snapshots that are one too high."""

    def __init__(self, slots: int, grain: int, bad: bool) -> None:
        super().__init__("count", 1, slots, {"count_S1": (torch.int64, (1,))}, "cpu")
        self.grain = grain
        self.bad = bad
        self.count_S = self.pools["count_S1"].view(slots)
        self.count_S.fill_(-7)

    def snapshot(self, slot: int, length: int) -> dict[str, torch.Tensor]:
        assert self.count_S[slot] == length
        return {name: count + self.bad for name, count in super().snapshot(slot, length).items()}


class CountingServing(Qwen3ForServing):
    """Checks that each sequence's slot knows exactly the tokens before the rows pushed."""

    parts = ("keys", "count")
    bad = False

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> Memory:
        kept = self.page_parts(pages, page_size or 64)
        return Memory(kept, [CountingSlots(5, page_size or 64, self.bad)], self.layer_views(kept, []), snapshots=8)

    def hidden_rows(self, ids_R: torch.Tensor, rows: Rows, memory: Any, page_table_NB: torch.Tensor) -> torch.Tensor:
        slots = page_table_NB[:, 0].long()
        count_S = memory.slot_parts[0].count_S
        assert (slots > 0).all() and len(slots.unique()) == len(slots)
        counts = rows.starts_N1[1:] - rows.starts_N1[:-1]
        assert torch.equal(count_S[slots], (rows.lengths_N - counts).long()), "state of another length"
        count_S[slots] += counts
        return super().hidden_rows(ids_R, rows, memory, page_table_NB)


@pytest.mark.parametrize("bad", (False, True))
def test_state_in_slots_follows_its_sequence(bad: bool) -> None:
    model = CountingServing.from_config(twins("dense")[1].config, seed=1, device="cpu")
    model.bad = bad
    served = Engine(model, pages=16, page_size=16, chunk_rows=40)
    if bad:
        with pytest.raises(AssertionError, match="state of another length"):
            for _ in range(2):
                generate(served)
        return
    for _ in range(2):
        assert generate(served) == baseline("dense")
    ids = [served.add(*request) for request in REQUESTS]
    for _ in range(2):
        served.step()
    for request in list(served.scheduler.running):
        served.preempt(request.request_id)
    done = {record.request_id: numbers(record) for record in drive(served)}
    assert [done[request_id] for request_id in ids] == baseline("dense")
    assert served.stats.reused_rows > 200 and len(served.scheduler.pool.free_slots) == 4


# doors


def test_bad_requests_change_nothing() -> None:
    small = engine(pages=4)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: small.add([]), "prompt is empty"),
        (lambda: small.add([1, 512]), "token id 512 is outside the vocabulary of 512"),
        (lambda: small.add([-1]), "token id -1"),
        (lambda: small.add([1, 1 << 80]), f"token id {1 << 80} is outside the vocabulary of 512"),
        (lambda: small.add([1], SamplingParams(stop_token_ids=(600,))), "token id 600"),
        (lambda: small.add([1] * 4000, SamplingParams(max_new_tokens=97)), "4000 prompt tokens and 97 .* table of 4096"),
        (lambda: small.add([1] * 40, SamplingParams(max_new_tokens=10)), "needs 4 pages of 16 tokens, there are 3"),
        (lambda: small.add([1], {"temperature": 1.0}), "must be SamplingParams, not dict"),  # type: ignore[arg-type]
        (lambda: small.generate([1, 2, 3]), "a prompt must be a sequence of token ids, not 1"),  # type: ignore[list-item]
        (lambda: small.generate(5), "prompts must be a sequence of prompts"),  # type: ignore[arg-type]
        (lambda: small.generate("text"), "text needs a tokenizer"),  # type: ignore[arg-type]
        (lambda: small.generate(torch.tensor([1, 2])), "not a tensor of shape"),  # type: ignore[arg-type]
        (lambda: small.add("text"), "text needs a tokenizer, and the model was not loaded from a folder"),
        (lambda: small.add(None), "a sequence of token ids, not None"),  # type: ignore[arg-type]
        (lambda: small.add([1.0]), "token ids are integers, not 1.0"),  # type: ignore[list-item]
        (lambda: small.add([True]), "token ids are integers, not True"),
        (lambda: small.add(torch.tensor([1.0])), "token ids are integers, not 1.0"),
        (lambda: small.add(torch.tensor([[1, 2]])), r"one row of token ids, not a tensor of shape \[1, 2\]"),
        (lambda: small.add([[1, 2]]), r"token ids are integers, not \[1, 2\]"),  # type: ignore[list-item]
        (lambda: small.add([1], None, 5), "request_id must be text, not 5"),  # type: ignore[arg-type]
        (lambda: small.generate([[1], []], SamplingParams(max_new_tokens=2)), "prompt is empty"),
        (lambda: small.generate([[1], [2]], [SamplingParams()]), "1 sampling parameters for 2 prompts"),
        (lambda: small.add({1, 2}), "a prompt must be a sequence of token ids, not {1, 2}"),  # type: ignore[arg-type]
        (lambda: small.add({1: 2}), "a prompt must be a sequence of token ids, not {1: 2}"),  # type: ignore[arg-type]
        (lambda: small.add([1], {}), "must be SamplingParams, not dict"),  # type: ignore[arg-type]
        (lambda: small.add([1], prompt_log_probs="no"), "prompt_log_probs must be True or False, not 'no'"),  # type: ignore[arg-type]
        (lambda: small.abort("7"), "no request '7'"),
        (lambda: small.abort([]), r"no request \[\]"),  # type: ignore[arg-type]
        (lambda: small.preempt("7"), "no request '7'"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert not small.busy and small.add([1], SamplingParams(max_new_tokens=1)) == "0"
    with pytest.raises(ValueError, match="'0' is in use"):
        small.add([1], SamplingParams(max_new_tokens=1), "0")
    small.add([1] * 40, SamplingParams(max_new_tokens=9))
    assert [len(record.output_ids) for record in small.run()] == [1, 9]
    for options, message in (
        ({"max_batch": 0}, "max_batch must be at least 1, not 0"),
        ({"graphs": True}, "needs a CUDA device"),
        ({"pages": 2.5}, "pages must be an integer, not 2.5"),
        ({"page_size": True}, "page_size must be an integer, not True"),
        ({"prefix_cache": "no"}, "prefix_cache must be True or False, not 'no'"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(**options)


def test_a_request_waits_for_pages() -> None:
    small = engine(pages=5, prefix_cache=False)
    first, second = (small.add(tokens(40, n), SamplingParams(max_new_tokens=3)) for n in (1, 2))
    small.step()
    assert [r.request_id for r in small.scheduler.running] == [first] and small.scheduler.waiting[0].request_id == second
    assert [r.request_id for r in small.run()] == [first, second] and small.stats.preemptions == 0


def test_stop_tokens_end_a_request() -> None:
    whole = baseline("dense")[0]["output_ids"]
    prompt, params = REQUESTS[0]
    record = engine().generate([prompt], replace(params, stop_token_ids=(whole[2],)))[0]
    assert record.finish_reason == "stop" and list(record.output_ids) == whole[: whole.index(whole[2]) + 1]
    model = twins("dense")[1]
    assert model.config.eos == (2,)
    # the first token of the baseline is made the end of sequence
    ended = Engine(serving("dense"), pages=24, page_size=16)
    ended.model.config = replace(model.config, eos=(whole[0],))
    assert ended.generate([prompt], params)[0].finish_reason == "stop"
    assert len(ended.generate([prompt], replace(params, ignore_eos=True))[0].output_ids) == params.max_new_tokens


def test_a_prompt_token_matters() -> None:
    one, other = (engine().generate([[*STEM[:20], t, 9]], SamplingParams(max_new_tokens=2))[0] for t in (5, 6))
    assert one.log_probs != other.log_probs


def test_requests_that_others_added_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    shared = engine(progress=True)
    foreign = shared.add([5], SamplingParams(max_new_tokens=1))
    assert [r.prompt_ids for r in shared.generate([[6], [7]], SamplingParams(max_new_tokens=2))] == [(6,), (7,)]
    assert [r.request_id for r in shared.run()] == [foreign]
    assert "drawing tokens" in capsys.readouterr().out


def test_buckets() -> None:
    assert [batch_bucket(n) for n in (1, 3, 8, 17, 33, 64, 65, 130)] == [1, 4, 8, 24, 48, 64, 128, 192]


def test_generate_command(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path / "tiny")
    arguments = {"max_new_tokens": 5, "temperature": 0.8, "seed": 3, "device": "cpu"}
    made = generate_command(folder, ["Guess the word", "Guess the word"], json=tmp_path / "out.json", **arguments)
    assert made[0].text and made[0].completion.output_ids != made[1].completion.output_ids
    stored = json.loads((tmp_path / "out.json").read_text())
    assert [Completion.from_dict(g["completion"]) for g in stored["generations"]] == [g.completion for g in made]
    assert generate_command(folder, "Guess the word", **arguments)[0].completion == made[0].completion
    for prompt in ("\udcff\udcfe", 5):
        with pytest.raises(ValueError, match="a prompt must be text in valid UTF-8"):
            generate_command(folder, [prompt], device="cpu")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        generate_command(folder, "x", device="cpu")


def test_an_engine_is_imported_where_nobody_has_a_home() -> None:
    """A container's user without HOME and without an entry among the system's users."""
    code = """
import pwd
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = unknown
import zoo.common.engine
print(zoo.common.engine.Engine.__name__)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("Engine\n", 0), done.stderr
