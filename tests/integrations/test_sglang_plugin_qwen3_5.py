"""Qwen3.5 in the SGLang plugin without a GPU and without SGLang: slots, pages that are no power of two, options, weights.

Batches are built as SGLang's scheduler makes them; its objects are stand-ins with the fields that the plugin reads.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_harness import arguments, stand_in_sglang
from torch import Tensor

from zoo.common import serving as common_serving
from zoo.common.memory import KeyValueLayer, SlotPart
from zoo.common.rows import Rows
from zoo.qwen3 import SIZES as QWEN3_SIZES
from zoo.qwen3_5 import MOE_SIZES, SIZES, Qwen35Config, Qwen35ForRL, Qwen35ForServing
from zoo.sglang_plugin import loading, memory, options, slots, states
from zoo.sglang_plugin.loading import absent, load

PAGE = 80
SEGMENT = 256
POSITIONS = 512
REQUESTS = 5  # places in SGLang's table, the padding row counted
SHAPE: dict[str, Any] = {
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
    "positions": POSITIONS,
}
CONFIGS = {
    "dense": replace(SIZES["tiny"], **SHAPE, intermediate=64),
    "moe": replace(MOE_SIZES["tiny"], **SHAPE, expert_intermediate=16, shared_intermediate=32),
}


def every_state(slots: Sequence[SlotPart]) -> list[Tensor]:
    """Everything that slots hold."""
    return [pool for part in slots for pool in part.pools.values()]


def pool_of(serving: Qwen35ForServing, pages: memory.KeyValuePool, slots: Sequence[SlotPart]) -> states.HybridPool:
    return states.HybridPool(serving.layer_views([pages], slots), pages, slots, REQUESTS)


class Server:
    """SGLang's side of it: a request table, paged slots that are handed out as they were left, and batches. All memory starts NaN."""

    def __init__(self, serving: Qwen35ForServing, pages: int = 24) -> None:
        c = self.config = serving.config
        self.serving = serving
        shape = (pages * PAGE, c.kv_heads, c.head_dim)
        buffers = [[torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(sum(c.full))] for _ in range(2)]
        self.slots = serving.slot_parts(REQUESTS)
        for pool in every_state(self.slots):
            pool.fill_(torch.nan)
        self.pool = pool_of(serving, memory.KeyValuePool(*buffers, PAGE, torch.bfloat16), self.slots)
        self.table = torch.full((REQUESTS, POSITIONS), 12345, dtype=torch.int32)
        self.table[0] = 0
        self.free = torch.arange(1, pages)
        self.builder = memory.StepBuilder(self.table, PAGE, SEGMENT, POSITIONS)
        self.prefills: memory.PrefillSteps | None = None

    def pad(self, steps: type[memory.PrefillSteps] = memory.PrefillSteps, most: int = 256) -> None:
        """Prefills run padded from now on, as captured ones of up to `most` rows do."""
        self.prefills = steps(self.builder, SEGMENT, most, "cpu")
        self.prefills.replays = {
            count: lambda s=step: self.run(s.padded.ids_R, s.step)  # type: ignore[misc]
            for count, step in self.prefills.steps.items()
        }

    def extend(self, parts: list[tuple[str, int, list[int], int]]) -> Tensor:
        """(request id, place, tokens, context) of each: final rows."""
        counts = [len(ids) for _, _, ids, _ in parts]
        contexts = [context for *_, context in parts]
        places = torch.tensor([place for _, place, _, _ in parts])
        prefix = torch.tensor(contexts)
        length = torch.tensor(contexts) + torch.tensor(counts)
        last = torch.tensor([self.table[p, c - 1] if c else -1 for p, c in zip(places.tolist(), contexts, strict=True)])
        mine = slots.extend_slots(prefix, length, last, self.free, sum(counts), PAGE)
        self.free = self.free[int(((length + PAGE - 1) // PAGE - (prefix + PAGE - 1) // PAGE).sum()) :]
        start = 0
        for place, count, context in zip(places.tolist(), counts, contexts, strict=True):
            self.table[place, context : context + count] = mine[start : start + count]
            start += count
        rows = Rows.pushed(counts, contexts, "cpu")
        step = self.builder.extend(
            places, length, rows.positions_R, mine, torch.tensor(counts, dtype=torch.int32), prefix.int(), counts, contexts
        )
        self.pool.begin([rid for rid, *_ in parts], places, prefix.int(), counts, contexts)
        flat = torch.tensor([t for _, _, ids, _ in parts for t in ids])
        found = self.prefills.push(flat, step) if self.prefills is not None else None
        return self.run(flat, step) if found is None else found

    def decode(self, parts: list[tuple[int, int, int]], padded: int = 0) -> Tensor:
        """(place, token, length with it) of each; `padded` rows more, as a graph of a larger batch has them."""
        places, ids, lengths = (torch.tensor(column) for column in zip(*parts, *[(0, 0, 1)] * padded, strict=True))
        mine = torch.zeros(len(places), dtype=torch.int64)
        for n, (place, _, length) in enumerate(parts):
            if (length - 1) % PAGE:
                mine[n] = self.table[place, length - 2] + 1
            else:
                mine[n] = self.free[0] * PAGE
                self.free = self.free[1:]
            self.table[place, length - 1] = mine[n]
        step = self.builder.decode(places, lengths, lengths - 1, mine, int(lengths.max()))
        return self.run(ids, step)[: len(parts)]

    def finish(self, place: int, length: int) -> None:
        """Its pages go first to the next one, dirty."""
        self.free = torch.cat([self.table[place, :length:PAGE].long() // PAGE, self.free])

    def run(self, ids: Tensor, step: memory.Step) -> Tensor:
        step.rows.launch.clear()
        return self.serving.hidden_rows(ids, step.rows, self.pool.during(step), step.table_NB)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def trained(trainer: Qwen35ForRL, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return trainer.score(torch.tensor(ids), torch.tensor([0, len(ids)]), torch.roll(torch.tensor(ids), -1))


def served(serving: Qwen35ForServing, hidden: Tensor, ids: list[int]) -> Tensor:
    return serving.log_prob(hidden, torch.roll(torch.tensor(ids), -1)[: len(hidden)])


def twins(kind: str) -> tuple[Qwen35ForServing, Qwen35ForRL]:
    return (
        Qwen35ForServing.from_config(CONFIGS[kind], seed=3, device="cpu"),
        Qwen35ForRL.from_config(CONFIGS[kind], seed=3, device="cpu"),
    )


def of_length_0(slots: Sequence[SlotPart]) -> list[Tensor]:
    """What is read of a sequence without tokens."""
    return [part.pools[name] for part in slots for name in part.from_zero]


def test_padding_is_clean_after_memory_comes_back() -> None:
    server = Server(twins("dense")[0])
    server.pool.clear_padding()
    for pages in (*server.pool.pages.k_pages, *server.pool.pages.v_pages):
        assert pages[0].eq(0).all() and pages[1:].isnan().all()
    assert all(t[:, 0].eq(0).all() for t in of_length_0(server.slots))
    assert all(t[:, 1:].isnan().all() for t in every_state(server.slots))


def test_stand_in_backend_clears_row_page_and_slot_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    stock = types.ModuleType("sglang.srt.layers.attention.base_attn_backend")
    name = "zoo.sglang_plugin.backend"
    stock.AttentionBackend = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stock.__name__, stock)
    monkeypatch.setitem(sys.modules, name, stock)  # the page over a stand-in is forgotten after the test
    del sys.modules[name]
    serving, _ = twins("dense")
    server = Server(serving)
    server.table.fill_(12345)
    pages = server.pool.pages
    runner = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(req_to_token=server.table),
        token_to_kv_pool=types.SimpleNamespace(
            kv_cache_layout="nhd", k_buffer=[t.flatten(0, 1) for t in pages.k_pages], v_buffer=[t.flatten(0, 1) for t in pages.v_pages]
        ),
        model=types.SimpleNamespace(zoo=serving, pool=lambda made, requests: pool_of(serving, made, server.slots)),
        model_config=types.SimpleNamespace(context_len=POSITIONS),
        page_size=PAGE,
        device="cpu",
    )
    import_module(name).PagedBackend(runner).clear_padding()
    assert server.table[0].eq(0).all() and server.table[1:].eq(12345).all()
    for page in (*pages.k_pages, *pages.v_pages):
        assert page[0].eq(0).all() and page[1:].isnan().all()
    assert all(t[:, 0].eq(0).all() for t in of_length_0(server.slots))
    assert all(t[:, 1:].isnan().all() for t in every_state(server.slots))


@pytest.mark.parametrize("kind", CONFIGS)
def test_slots_and_dirty_memory_give_the_trainers_bytes(kind: str) -> None:
    """A prefill cut inside a chunk of 64, decode across a chunk's end with padding rows, a slot and pages taken over, a
    retraction."""
    serving, trainer = twins(kind)
    server = Server(serving)
    a = tokens(140, 1)
    b = tokens(70, 2)
    c = tokens(67, 3)
    found: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}

    def keep(hidden: Tensor, **counts: int) -> None:
        start = 0
        for name, count in counts.items():
            found[name].append(hidden[start : start + count])
            start += count

    keep(server.extend([("a", 3, a[:80], 0), ("b", 1, b[:60], 0)]), a=80, b=60)
    keep(server.extend([("a", 3, a[80:125], 80)]), a=45)
    for i in range(10):  # both close a chunk on the way: at 128 and at 64
        keep(server.decode([(1, b[60 + i], 61 + i), (3, a[125 + i], 126 + i)], padded=i % 3), b=1, a=1)
    server.finish(1, 70)
    keep(server.extend([("c", 1, c[:64], 0)]), c=64)  # b's place and pages
    for i in range(2):
        keep(server.decode([(3, a[135 + i], 136 + i), (1, c[64 + i], 65 + i)]), a=1, c=1)
    server.finish(3, 137)
    again = server.extend([("a", 4, a[:138], 0)])  # a retracted request starts again, elsewhere
    assert torch.equal(again[:137].view(torch.int16), torch.cat(found["a"]).view(torch.int16))
    keep(again[137:], a=1)
    keep(server.decode([(4, a[138], 139), (1, c[66], 67)]), a=1, c=1)
    for name, ids in (("a", a[:139]), ("b", b), ("c", c)):
        mine = served(serving, torch.cat(found[name]), ids)
        wanted = trained(trainer, ids)
        assert mine.isfinite().all() and torch.equal(mine[:-1], wanted[:-1]), name
    # padding's slot keeps the zeros of a sequence without a closed chunk
    assert server.slots[0].pools["start_SVKE"][:, 0].eq(0).all()


def test_control_without_a_clean_slot_the_bytes_differ() -> None:
    serving, _ = twins("dense")
    first = tokens(70, 1)
    second = tokens(70, 2)
    rows = {}
    for clean in (True, False):
        server = Server(serving)
        server.extend([("first", 1, first, 0)])
        if not clean:
            server.pool.begin = lambda *a: None  # type: ignore[method-assign]
        rows[clean] = server.extend([("second", 1, second, 0)])
    assert not torch.equal(rows[True], rows[False])


class LivePadding(memory.PrefillSteps):
    """A fault: padding has the place of request 3."""

    def push(self, ids_R: Tensor, step: memory.Step) -> Tensor | None:
        def faulty(run: Any, padded: memory.PaddedStep) -> Tensor:
            padded.step.request_N[step.request_N.shape[0]] = 3
            return run()

        right = self.replays
        self.replays = {count: lambda c=count: faulty(right[c], self.steps[c]) for count in right}  # type: ignore[misc]
        try:
            return super().push(ids_R, step)
        finally:
            self.replays = right


def pushed(server: Server) -> list[tuple[Tensor, list[Tensor]]]:
    """Final rows of each forward, and after it every byte of states and pages that padding does not own. All memory starts NaN."""
    a = tokens(200, 1)
    b = tokens(70, 2)
    c = tokens(67, 3)
    forwards: list[Any] = [
        lambda: server.extend([("a", 3, a[:80], 0), ("b", 1, b[:60], 0)]),
        lambda: server.extend([("a", 3, a[80:125], 80)]),
        lambda: server.decode([(1, b[60], 61), (3, a[125], 126)], padded=2),
        lambda: server.extend([("c", 4, c[:64], 0)]),  # fills its bucket
        lambda: server.extend([("b", 2, b[:1], 0), ("c", 4, c[64:], 64)]),
        lambda: server.decode([(4, c[0], 68), (3, a[126], 127)], padded=1),
    ]
    seen = []
    pools = server.pool.pages
    for forward in forwards:
        rows = forward().clone()
        states = [t[:, 1:].clone() for t in every_state(server.slots)]
        seen.append((rows, [*states, *(t[1:].clone() for t in (*pools.k_pages, *pools.v_pages))]))
    return seen


def first_difference(one: list[tuple[Tensor, list[Tensor]]], two: list[tuple[Tensor, list[Tensor]]]) -> int | None:
    """The forward after which something differs."""
    for n, ((rows, held), (other, kept)) in enumerate(zip(one, two, strict=True)):
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip([rows, *held], [other, *kept], strict=True)):
            return n
    return None


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_padded_prefills_leave_every_byte_of_pages_and_states(kind: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large: by those beyond PREFILL_ROWS, up to a chunk of 150 rows."""
    if large:
        monkeypatch.setattr(common_serving, "PREFILL_ROWS", (8,))
        monkeypatch.setattr(common_serving, "PREFILL_STRIDE", 16)
    serving, _ = twins(kind)
    plain = Server(serving)
    padded = Server(serving)
    padded.pad(most=150 if large else 256)
    wanted = pushed(plain)
    assert wanted[0][0].isfinite().all() and first_difference(wanted, pushed(padded)) is None
    prefills = padded.prefills
    assert prefills is not None and prefills.pushed == 140 + (0 if large else 45) + 64 + 4  # 45 of 56 rows are too few
    assert [*prefills.steps] == ([8, *range(24, 150, 16), 150] if large else [64, 128, 256])
    for static in prefills.steps.values():
        assert len(static.step.request_N) == len(static.padded.rows.lengths_N) == len(static.padded.table_NB)
    pages = (t[0] for t in (*padded.pool.pages.k_pages, *padded.pool.pages.v_pages))
    states = (t[:, 0] for t in of_length_0(padded.slots))
    assert all(t.isfinite().all() for t in (*pages, *states))
    leaking = Server(serving)
    leaking.pad(LivePadding, 150 if large else 256)
    assert first_difference(wanted, pushed(leaking)) == 0


def test_a_prefix_of_another_request_is_refused() -> None:
    serving, _ = twins("dense")
    server = Server(serving)
    ids = tokens(100, 5)
    server.extend([("a", 1, ids[:80], 0)])
    with pytest.raises(RuntimeError, match="'b' goes on after 80 tokens, its own pieces ended at None"):
        server.extend([("b", 1, ids[80:], 80)])
    with pytest.raises(RuntimeError, match="'a' goes on after 64 tokens, its own pieces ended at 80"):
        server.extend([("a", 1, ids[64:], 64)])
    server.extend([("a", 1, ids[80:], 80)])
    for i in range(100):  # finished requests are forgotten
        server.pool.begin([f"r{i}"], torch.tensor([1]), torch.tensor([0]), [4], [0])
    assert len(server.pool._ends) == 4 * REQUESTS


def test_pools_that_do_not_fit_the_model_are_refused() -> None:
    serving, _ = twins("dense")
    buffers = [torch.zeros(2 * PAGE, 1, 16, dtype=torch.bfloat16)]
    pages = memory.KeyValuePool(buffers, buffers, PAGE, torch.bfloat16)
    held = serving.slot_parts(REQUESTS)
    layers = serving.layer_views([pages], held)
    with pytest.raises(ValueError, match="6 requests have only 5 slots of delta"):
        states.HybridPool(layers, pages, held, 6)
    with pytest.raises(ValueError, match="pool has 1 layers, the model has 2 of attention"):
        states.HybridPool([*layers, KeyValueLayer(pages, 1)], pages, held, REQUESTS)


def naive_slots(prefix: list[int], length: list[int], last: list[int], free: list[int], page: int) -> list[int]:
    """Token by token."""
    out = []
    free = list(free)
    for start, end, slot in zip(prefix, length, last, strict=True):
        for token in range(start, end):
            slot = free.pop(0) * page if token % page == 0 else slot + 1
            out.append(slot)
    return out


@pytest.mark.parametrize("page", [80, 128, 7])
def test_slots_of_a_prefill(page: int) -> None:
    draw = random.Random(page)
    for _ in range(30):
        prefix = [draw.choice([0, 0, 1, page - 1, page, page + 3, 3 * page]) for _ in range(draw.randint(1, 4))]
        length = [p + draw.choice([1, 2, page - 1, page, page + 1, 2 * page + 5]) for p in prefix]
        last = [draw.randrange(100, 200) * page + (p - 1) % page if p else -1 for p in prefix]
        free = draw.sample(range(1, 90), 40)
        found = slots.extend_slots(
            torch.tensor(prefix),
            torch.tensor(length, dtype=torch.int32),
            torch.tensor(last),
            torch.tensor(free),
            sum(length) - sum(prefix),
            page,
        )
        assert found.tolist() == naive_slots(prefix, length, last, free, page) and found.dtype == torch.int64
    inside = slots.extend_slots(torch.tensor([3]), torch.tensor([6]), torch.tensor([72]), torch.tensor([]), 3, page)
    assert inside.tolist() == [73, 74, 75]


def test_stand_in_allocator_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    context = types.ModuleType("sglang.srt.runtime_context")
    backend = types.SimpleNamespace(attention_backend="zoo")
    context.get_server_args = lambda: backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)

    def allocator(page: int, free: list[int]) -> Any:
        return types.SimpleNamespace(page_size=page, free_pages=torch.tensor(free), need_sort=False)

    def ask(made: Any, prefix: list[int], length: list[int], last: list[int]) -> Any:
        p = torch.tensor(prefix)
        n = torch.tensor(length)
        total = int((n - p).sum())
        return slots.around_alloc_extend(lambda *a: "original", made, p, p, n, n, torch.tensor(last), total)

    assert ask(allocator(128, [1]), [0], [5], [-1]) == "original"
    made = allocator(80, [4, 2, 9])
    assert ask(made, [0, 78], [81, 81], [-1, 637]).tolist() == [*range(320, 400), 160, 638, 639, 720]
    assert made.free_pages.tolist() == []
    assert ask(made, [0], [1], [-1]) is None and ask(made, [1], [2], [80]).tolist() == [81]
    backend.attention_backend = "triton"
    assert ask(allocator(80, [1]), [0], [5], [-1]) == "original"


@pytest.mark.parametrize("page", [80, 128])
def test_stand_in_slots_of_a_decode_step(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own, here token by token, is asked where a sequence starts a page and where it may do more than hand out slots."""
    backend = types.SimpleNamespace(attention_backend="zoo")
    context = types.SimpleNamespace(get_server_args=lambda: backend)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)  # type: ignore[arg-type]
    asked: list[list[int]] = []

    def original(made: Any, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor:
        length = seq_lens_cpu.tolist()
        free = made.free_pages.tolist()
        asked.append(length)
        made.free_pages = made.free_pages[sum(n % page == 1 for n in length) :]
        return torch.tensor(naive_slots([n - 1 for n in length], length, last_loc.tolist(), free, page))

    def ask(length: list[int], last: list[int], free: list[int], debug: bool = False) -> tuple[list[int], list[int], bool]:
        """The slots, the pages left, and whether SGLang's own gave them."""
        made = types.SimpleNamespace(page_size=page, free_pages=torch.tensor(free), debug_mode=debug)
        before = len(asked)
        n = torch.tensor(length)
        found = slots.around_alloc_decode(original, made, n, n, torch.tensor(last, dtype=torch.int32))
        assert found is not None and found.dtype == torch.int64
        return found.tolist(), made.free_pages.tolist(), len(asked) > before

    draw = random.Random(page)
    starts = []
    for _ in range(60):
        length = [draw.choice([2, page - 1, page, page + 2, 2 * page, 3 * page + draw.randint(1, 4)]) for _ in range(draw.randint(1, 4))]
        last = [draw.randrange(100, 200) * page + (n - 2) % page for n in length]
        free = draw.sample(range(1, 90), 8)
        wanted = naive_slots([n - 1 for n in length], length, last, free, page)
        starts.append(any(n % page == 1 for n in length))
        taken = sum(n % page == 1 for n in length)
        assert ask(length, last, free) == (wanted, free[taken:], starts[-1])
        # control: the slot behind the last one is wrong exactly where a page starts
        assert ([slot + 1 for slot in last] != wanted) == starts[-1]
    assert {True, False} == set(starts)
    plain = [5, 6], [page + 3, 2 * page + 4]
    assert ask(*plain, free=[7, 8]) == ([page + 4, 2 * page + 5], [7, 8], False)
    # too few pages if both started one: SGLang sorts the pages that came back; its checks; another backend
    assert ask(*plain, free=[7])[2] and ask(*plain, free=[7, 8], debug=True)[2]
    backend.attention_backend = "triton"
    assert ask(*plain, free=[7, 8])[2]


def wrapped(config: Qwen35Config) -> dict[str, Any]:
    kind = config.model_type
    return {
        "model_type": kind,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": config.to_hf(),
        "vision_config": {"model_type": kind},
        "tie_word_embeddings": config.tied,
    }


PUBLISHED = {"4b": wrapped(SIZES["4b"]), "35b-a3b": wrapped(MOE_SIZES["35b-a3b"])}


def resolution(default: int, seen: list[Any] | None = None) -> Callable[[Any], None]:
    """A stand-in of what SGLang does with its options: a chunk that was not given becomes the default of this GPU."""

    def resolve(args: Any) -> None:
        if seen is not None:
            seen.append((args, args.chunked_prefill_size, args.page_size))
        if args.chunked_prefill_size is None:
            args.chunked_prefill_size = default

    return resolve


@pytest.mark.parametrize("size", PUBLISHED)
def test_stand_in_the_one_option_implies_what_a_state_needs(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "read_config", lambda path, revision: PUBLISHED[size])
    stand_in_sglang(monkeypatch)
    args = arguments()
    options.around_resolution(resolution(8192), args)
    assert (args.page_size, args.chunked_prefill_size, args.max_running_requests) == (80, 8960, 64)
    assert args.disable_radix_cache is True and args.model_config_parser == "zoo"
    given = arguments(chunked_prefill_size=560, max_running_requests=16)
    options.imply(given, PUBLISHED[size])
    assert (given.chunked_prefill_size, given.max_running_requests) == (560, 16)
    whole = arguments(chunked_prefill_size=-1)
    options.imply(whole, PUBLISHED[size])
    assert whole.chunked_prefill_size == -1


@pytest.mark.parametrize(("default", "chunk"), [(2048, 2240), (4096, 4480), (8192, 8960), (16384, 17920), (100, 560), (-1, -1)])
def test_stand_in_chunks_are_sglangs_own_with_room_for_whole_pages(default: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "read_config", lambda path, revision: PUBLISHED["4b"])
    stand_in_sglang(monkeypatch)
    args = arguments()
    seen: list[Any] = []
    options.around_resolution(resolution(default, seen), args)
    # SGLang is asked by a copy, then resolves the options with their chunk
    (asked, before, page), (final, given, _) = seen
    assert asked is not args and (before, page) == (None, 80) and final is args and given == args.chunked_prefill_size == chunk
    assert chunk < 0 or (chunk % 80 == 0 and chunk >= default)
    seen.clear()
    explicit = arguments(chunked_prefill_size=240)
    options.around_resolution(resolution(default, seen), explicit)
    assert [given for _, given, _ in seen] == [240] and explicit.chunked_prefill_size == 240
    # pages of a power of two: SGLang's own as it is
    monkeypatch.setattr(options, "read_config", lambda path, revision: QWEN3_SIZES["8b"].to_hf())
    seen.clear()
    plain = arguments()
    options.around_resolution(resolution(default, seen), plain)
    assert [given for _, given, _ in seen] == [None] and plain.chunked_prefill_size == default


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chunked_prefill_size": 8192}, "--chunked-prefill-size 8192 is not a multiple of the model's page of 80"),
        ({"page_size": 128}, "implies --page-size 80, not 128"),
        ({"model_config_parser": "hf"}, "implies --model-config-parser zoo, not hf"),
        ({"context_length": 300000}, "longer than the model's position table of 262144"),
    ],
)
def test_stand_in_contradictions_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.imply(arguments(**changed), PUBLISHED["4b"])


@pytest.mark.parametrize(
    ("field", "value"), [("disaggregation_mode", "decode"), ("enable_hierarchical_cache", True), ("enable_mixed_chunk", True)]
)
def test_stand_in_ways_that_leave_a_state_behind_are_refused_in_any_program(field: str, value: Any) -> None:
    loose = {"attention_backend": "zoo_unaligned", "sampling_backend": "zoo", field: value}
    options.check(arguments(**loose))  # an attention model only warns
    with pytest.raises(ValueError, match="--" + field.replace("_", "-")):
        options.check(arguments(**loose, model_config_parser="zoo"))


@pytest.mark.parametrize("size", PUBLISHED)
def test_sglang_sees_a_plain_attention_model(size: str) -> None:
    seen = states.served_fields(PUBLISHED[size])
    assert seen["architectures"] == ["ZooHybridForCausalLM"] and seen["num_hidden_layers"] == (32 if size == "4b" else 40)
    assert seen["head_dim"] == 256 and seen["eos_token_id"] == [248044]
    assert seen.get("num_experts_per_tok") == (None if size == "4b" else 8)
    # nothing that SGLang would take for mrope, vision or recurrent layers
    assert not {"text_config", "vision_config", "rope_parameters", "layer_types", "model_type"} & set(seen)


def test_stand_in_sglang_sees_the_end_tokens_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published config.json names one, generation_config.json two; the parser is SGLang's way to the checkpoint."""
    made: list[Any] = []
    registry = types.ModuleType("sglang.srt.configs.model_config_parser_registry")
    registry.ModelConfigParserBase = object  # type: ignore[attr-defined]
    registry.register_model_config_parser = lambda name: made.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    importlib.import_module("zoo.sglang_plugin.parser").register_parser()
    [parser] = made
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["4b"]))
    assert parser().parse(tmp_path, trust_remote_code=False).eos_token_id == [248044]
    for said, ends in (([248046, 248044], [248044, 248046]), (248046, [248044, 248046])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
        assert parser().parse(tmp_path, trust_remote_code=False).eos_token_id == ends


def test_bounds_of_pages_that_do_not_divide_a_segment() -> None:
    bound = memory.Bound(300, PAGE, SEGMENT)
    assert bound.columns == 7  # 512 keys, the last page in part
    assert memory.Bound(2081, 80, 2080).columns == 52 and memory.Bound(90, 80, 2080).columns == 2


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_under_published_names(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapped names; vision and MTP pass by; FP32 parameters may come narrower; later any part."""
    monkeypatch.setattr(loading, "LOAD_BYTES", 1 << 12)
    config = replace(CONFIGS[kind], wrapped=True)
    source, target = (Qwen35ForServing.from_config(config, seed=s, device="cpu") for s in (3, 4))
    parameters = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.endswith("dt_bias"):
                parameter.copy_(parameter.bfloat16())
    pieces = [(p.published, p.of(parameters[e.ours]).detach()) for e, p in source.table_of().pieces()]
    assert all(name == "lm_head.weight" or name.startswith("model.language_model.") for name, _ in pieces)
    narrow = [(n, t.bfloat16() if n.endswith("dt_bias") else t) for n, t in pieces]
    extra = [("model.visual.blocks.0.attn.qkv.weight", torch.zeros(2)), ("mtp.fc.weight", torch.zeros(2))]
    arrived: set[str] = set()
    load(target, [*extra, *[(n, t) for n, t in narrow if n != "model.language_model.norm.weight"]], arrived.update)
    assert absent(target.table_of(), arrived) == {"model.language_model.norm.weight"}
    load(target, [*narrow, *extra], arrived.update)
    assert not absent(target.table_of(), arrived) and not arrived & {name for name, _ in extra}
    assert source.weights_version == target.weights_version
    one = [(n, t * 2) for n, t in pieces if n.endswith("A_log")][:1]
    load(target, one, arrived.update)
    assert source.weights_version != target.weights_version
    load(target, [(n, t) for n, t in pieces if n == one[0][0]], arrived.update)
    assert source.weights_version == target.weights_version
