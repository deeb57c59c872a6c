"""Captured prefills: rows padded to a bucket give the bytes of the rows alone, hidden rows, pages and states. Faults are caught.

Without a GPU the static rows run through the same code again in place of a replay; with one they are captured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_harness import numbers
from prefill_harness import MODELS, Sequences, made, pools, rerun, same

from zoo.common import serving
from zoo.common.engine import Engine
from zoo.common.engine.runner import Runner
from zoo.common.rollouts import SamplingParams
from zoo.common.rows import Rows
from zoo.common.serving import (
    PREFILL_SEQUENCES,
    PaddedRows,
    PrefillGraph,
    prefill_bucket,
    prefill_counts,
    prefill_padding,
    prefill_sequences,
)
from zoo.qwen3 import Qwen3ForServing

KINDS = tuple(MODELS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [130, 131, 70, 66, 5, 5, 5, 205]
# pushed one after another through the same static tensors
PUSHES: list[dict[int, int]] = [
    {0: 13, 1: 70, 2: 1},  # cut inside a chunk of 64
    {2: 63, 0: 51},  # chunks closed to the row
    {1: 60, 0: 1, 2: 2, 3: 5},
    {3: 59},
    {0: 64},  # fills its bucket: nothing is padded
    {4: 1, 1: 1, 6: 1, 5: 2, 7: 5, 0: 1, 2: 4, 3: 2},  # as many sequences as there may be
    {7: 200},
    {4: 4, 5: 3},
]
MOST = 2500
LONG = [900, 1500]  # of a GPU, whose key segments are longer
LONG_PUSHES: list[dict[int, int]] = [{8: 700, 9: 1}, {9: 999}, {8: 200, 9: 500}]
# of captured prefills larger than PREFILL_ROWS: on a CPU those constants are small, on a GPU the sequences long
LARGE = [30, 31, 5, 9, 40, 20, 11, 3, 7, 200]
LARGE_PUSHES: list[dict[int, int]] = [{n: LARGE[n] // 2 for n in range(10)}, {9: 90, 0: 15, 1: 16, 4: 20, 5: 10}, {8: 4, 7: 2, 3: 5}]
LARGE_GPU = [1600, 70, 64, 63, 65, 5, 2, 3, 1300, 1500]
LARGE_GPU_PUSHES: list[dict[int, int]] = [{n: LARGE_GPU[n] // 2 for n in range(10)}, {9: 750, 8: 650, 0: 600}, {0: 200, 1: 35, 2: 32}]


def prepared(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Sequences, Sequences, list[dict[int, int]]]:
    """Two equal sets of sequences, and the pushes of this device."""
    if device == "cpu":
        monkeypatch.setattr(serving, "captured", rerun)
    lengths, pushes = (LENGTHS, PUSHES) if device == "cpu" else (LENGTHS + LONG, PUSHES + LONG_PUSHES)
    model = made(kind, device)
    page = None if device == "cuda" else 16 if kind == "qwen3" else 80
    return Sequences(model, lengths, page), Sequences(model, lengths, page), pushes


def differing(plain: Sequences, padded: Sequences, pushes: list[dict[int, int]], kinds: int = 3) -> list[str]:
    """What differs after each push, pushed eagerly and through captured prefills."""
    model = plain.model
    found = []
    graphs: dict[int, PrefillGraph] = {}
    for step, counts in enumerate(pushes):
        ids, rows, table = plain.batch(counts)
        wanted = model.prefill(ids, rows, plain.memory, table)
        assert wanted.isfinite().all()
        ids, rows, table = padded.batch(counts)
        count = prefill_bucket(rows, model.captured_length, MOST)
        assert count is not None
        if count not in graphs:
            graphs[count] = PrefillGraph(model, padded.memory, count)
        found += [] if same(graphs[count].replay(ids, rows, table), wanted) else [f"push {step}: hidden rows"]
        found += [f"push {step}: pool {n}" for n, (a, b) in enumerate(zip(plain.alive(), padded.alive(), strict=True)) if not same(a, b)]
    assert len(graphs) >= kinds
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_padded_prefills_leave_every_byte(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, padded, pushes = prepared(kind, device, monkeypatch)
    assert not differing(plain, padded, pushes)
    assert all(pool[:, 0].isfinite().all() for pool in pools(padded.memory))


@pytest.mark.gpu
def test_padded_prefills_of_wide_heads_leave_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not differing(*prepared("wide", "cuda", monkeypatch))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_even_padding_of_nan_reaches_nobody(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, padded, pushes = prepared(kind, device, monkeypatch)
    with torch.no_grad():
        for sequences in (plain, padded):
            sequences.model.model.embed.weight[0] = torch.nan  # padding's token, which no sequence has
    assert not differing(plain, padded, pushes)
    assert pools(padded.memory)[0][:, 0].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_larger_captured_prefills_leave_every_byte(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a whole chunk, of many sequences. Captured, padding alone is several of them."""
    lengths, pushes = (LARGE_GPU, LARGE_GPU_PUSHES) if device == "cuda" else (LARGE, LARGE_PUSHES)
    if device == "cpu":
        monkeypatch.setattr(serving, "captured", rerun)
        monkeypatch.setattr(serving, "PREFILL_ROWS", (16, 32))
        monkeypatch.setattr(serving, "PREFILL_STRIDE", 32)
        monkeypatch.setitem(globals(), "MOST", 180)
    model = made(kind, device)
    page = None if device == "cuda" else 16 if kind == "qwen3" else 80
    plain, padded = (Sequences(model, lengths, page) for _ in range(2))
    rows = [Rows.pushed(list(counts.values()), None, "cpu") for counts in pushes]
    large = [prefill_bucket(r, model.captured_length, MOST) for r in rows]
    assert sum(count is not None and count > serving.PREFILL_ROWS[-1] for count in large) == 2
    assert not differing(plain, padded, pushes, kinds=2)
    if device == "cpu":  # the control, as in test_padding_that_leaks_is_caught
        monkeypatch.setattr(serving, "PaddedRows", OfALiveSequence)
        assert differing(*(Sequences(model, lengths, page) for _ in range(2)), pushes[:1], kinds=1)


class OnALivePage(PaddedRows):
    """A fault: padding's pages are the first page of somebody (in a memory with slots the table's first column is one)."""

    page = 0
    first = 0

    def _pad(self, live: int, sequences: int) -> None:
        super()._pad(live, sequences)
        self.table_NB[sequences, self.first :] = self.page


class OnALiveSlot(PaddedRows):
    """A fault: padding has the slot of somebody."""

    slot = 0

    def _pad(self, live: int, sequences: int) -> None:
        super()._pad(live, sequences)
        self.table_NB[sequences, 0] = self.slot


class OfALiveSequence(PaddedRows):
    """A fault: the rows left over say that they are the last live sequence's."""

    def _pad(self, live: int, sequences: int) -> None:
        super()._pad(live, sequences)
        self.rows.sequence_R[live:] = max(sequences - 1, 0)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("qwen3", OnALivePage), ("qwen3_5", OnALivePage), ("qwen3_5", OnALiveSlot), ("qwen3", OfALiveSequence), ("qwen3_5", OfALiveSequence)],
)
def test_padding_that_leaks_is_caught(kind: str, fault: type[PaddedRows], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, padded, pushes = prepared(kind, "cpu", monkeypatch)
    monkeypatch.setattr(OnALivePage, "page", padded.pages[1][0])
    monkeypatch.setattr(OnALivePage, "first", 1 if padded.memory.slots else 0)
    monkeypatch.setattr(OnALiveSlot, "slot", padded.slots[1])
    monkeypatch.setattr(serving, "PaddedRows", fault)
    assert differing(plain, padded, pushes)


def test_static_rows_in_numbers() -> None:
    padded = PaddedRows(64, 256, 3, "cpu")
    rows = padded.rows
    addresses = [t.data_ptr() for t in (padded.ids_R, padded.table_NB, padded.rows.starts_N1)]
    empty = PREFILL_SEQUENCES[0]
    assert rows.starts_N1.tolist() == [0] + [64] * (empty + 1) and rows.lengths_N.tolist() == [64] + [0] * empty
    assert rows.positions_R.tolist() == list(range(64)) and (rows.max_rows, rows.max_length) == (64, 256)
    for counts, contexts in (([40, 24], [5, 0]), ([3, 1, 2], [0, 100, 7])):  # full, then few: nothing of the first is left
        live = Rows.pushed(counts, contexts, "cpu")
        padded.fill(torch.arange(1, live.count + 1), live, torch.full((len(counts), 2), 9, dtype=torch.int32))
        left = 64 - live.count
        n = len(counts)
        assert padded.ids_R.tolist() == [*range(1, live.count + 1), *[0] * left]
        assert rows.positions_R.tolist() == [*live.positions_R.tolist(), *range(left)]
        assert rows.sequence_R.tolist() == [*live.sequence_R.tolist(), *[n] * left]
        assert rows.starts_N1.tolist() == [*live.starts_N1.tolist(), *[64] * (empty + 1 - n)]
        assert rows.lengths_N.tolist() == [*live.lengths_N.tolist(), left, *[0] * (empty - n)]
        assert padded.table_NB.tolist() == [*[[9, 9, 0]] * n, *[[0] * 3] * (empty + 1 - n)]
    assert addresses == [t.data_ptr() for t in (padded.ids_R, padded.table_NB, padded.rows.starts_N1)]
    with pytest.raises(AssertionError):
        padded.fill(torch.zeros(65), Rows.pushed([65], None, "cpu"), torch.zeros(1, 2))


def test_padding_longer_than_a_sequence_is_several() -> None:
    padded = PaddedRows(640, 256, 3, "cpu")
    # three places of padding beside the live ones
    rows = padded.rows
    empty = PREFILL_SEQUENCES[0] + 2
    assert rows.starts_N1.tolist() == [0, 256, 512, *[640] * (empty - 1)]
    assert rows.lengths_N.tolist() == [256, 256, 128, *[0] * (empty - 2)]
    assert rows.positions_R.tolist() == [*range(256), *range(256), *range(128)]
    assert rows.sequence_R.tolist() == [0] * 256 + [1] * 256 + [2] * 128
    live = Rows.pushed([3, 300], [0, 0], "cpu")
    with pytest.raises(AssertionError):  # a longer sequence than it was captured for
        padded.fill(torch.zeros(303), live, torch.zeros(2, 2))
    padded.fill(torch.zeros(203), Rows.pushed([3, 200], [0, 40], "cpu"), torch.zeros(2, 2))
    assert rows.starts_N1.tolist()[:6] == [0, 3, 203, 459, 640, 640] and rows.lengths_N.tolist()[:5] == [3, 240, 256, 181, 0]
    full = PaddedRows(2048, 100, 3, "cpu")  # at most 256 rows of padding beside 32 live sequences
    assert full.places == full.rows.lengths_N.shape[0] == PREFILL_SEQUENCES[1] + 3
    full.fill(torch.zeros(1792), Rows.pushed([56] * 32, None, "cpu"), torch.zeros(32, 2))
    assert full.rows.lengths_N.tolist() == [56] * 32 + [100, 100, 56] and full.rows.starts_N1.tolist()[-4:] == [1792, 1892, 1992, 2048]
    assert full.rows.sequence_R.tolist() == [n for n, count in enumerate(full.rows.lengths_N.tolist()) for _ in range(count)]
    with pytest.raises(AssertionError, match="no place for 301 rows"):
        full.fill(torch.zeros(1747), Rows.pushed([55] * 31 + [42], None, "cpu"), torch.zeros(32, 2))


def test_which_prefills_are_captured() -> None:
    def count(counts: list[int], contexts: list[int] | None = None, length: int = 2048, most: int = 1024) -> int | None:
        return prefill_bucket(Rows.pushed(counts, contexts, "cpu"), length, most)

    assert [count([n]) for n in (1, 64, 65, 512, 1000, 1024, 1025)] == [64, 64, 128, 512, 1024, 1024, None]
    assert (count([1] * 8), count([1] * 9)) == (64, None)
    assert prefill_counts(2048, 4000) == (64, 128, 256, 512, 1024, 2048, 3072, 4000) and prefill_counts(0, 4000) == ()
    # 32 sequences of 100 tokens, or of 30, are no more rows than that, whatever the chunk
    assert prefill_counts(100, 5000) == (64, 128, 256, 512, 2048, 3072, 3200) and prefill_counts(2048, 128) == (64, 128)
    assert (prefill_counts(30, 5000), prefill_counts(0, 5000), prefill_counts(2048, 1 << 20)[-1]) == ((64, 128), (), 1 << 16)
    assert (count([100] * 32, length=100, most=5000), count([100] * 30, length=100, most=5000)) == (3200, 3072)
    for length in (30, 100, 200, 2048):  # the most live sequences, the most padding; padding alone
        for n in prefill_counts(length, 8960):
            padded = PaddedRows(n, length, 3, "cpu")
            live = prefill_sequences(n)
            assert padded.rows.starts_N1[-1] == n and padded.rows.lengths_N.max() <= length
            least = max(live, n - prefill_padding(n))
            counts = [least // live + (i < least % live) for i in range(live)]
            if max(counts) <= length:
                padded.fill(torch.zeros(least), Rows.pushed(counts, None, "cpu"), torch.zeros(live, 3))
                assert (
                    padded.rows.starts_N1[-1] == n and padded.rows.lengths_N.max() <= length and padded.rows.sequence_R[-1] < padded.places
                )
    large = [count([n // 2, n - n // 2], most=4000) for n in (1024, 1025, 1791, 1792, 2048, 2049, 3499, 3500, 4000, 4001)]
    assert large == [1024, None, None, 2048, 2048, None, None, 4000, 4000, None], "at most an eighth is padding"
    assert (count([100] * 32, most=3300), count([100] * 33, most=3300)) == (3300, None)
    assert (count([48, 5], [2000, 0]), count([49, 5], [2000, 0])) == (64, None)  # tokens 0 .. 2047 and 0 .. 2048
    assert (count([60], length=100), count([65], length=100), count([1], length=0)) == (64, 128, None)
    plain = made("qwen3", "cpu")
    assert plain.captured_length == 256  # the reference's key segment
    exact = Qwen3ForServing.from_config(plain.config, dtype=torch.float32, device="cpu", program="transformers")
    assert exact.captured_length == 0


PROMPTS = [1, 16, 70, 129, 31, 300]


def drive(engine: Engine, seed: int = 3) -> list[dict[str, Any]]:
    """Prompts of these lengths, two with scores, to their end; what nobody holds is NaN before each step."""
    draw = torch.Generator().manual_seed(seed)
    ids = [
        engine.add(
            torch.randint(3, 500, (count,), generator=draw),
            SamplingParams(temperature=0.8, top_p=0.9, seed=count, max_new_tokens=3),
            prompt_log_probs=count in (70, 31),
        )
        for count in PROMPTS
    ]
    done = {}
    while engine.busy:
        pool = engine.scheduler.pool
        memory = engine.scheduler.memory
        for n, buffer in enumerate(pools(memory)):
            buffer[:, torch.tensor(list(pool.free if n < 2 else pool.free_slots), dtype=torch.int64, device=buffer.device)] = torch.nan
        done |= {record.request_id: numbers(record) for record in engine.step()}
    return [done[request_id] for request_id in ids]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_takes_graphs_where_they_fit_and_no_byte_moves(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode's graphs too. Prompts beyond a key segment (256 on a CPU) are pushed eagerly."""
    model = made(kind, device)
    sizes = {"pages": 60, "page_size": 16 if device == "cpu" else None}
    wanted = drive(Engine(model, graphs=False, **sizes))
    for given in ({"max_batch": 1}, {"chunk_rows": 100}, {"max_batch": 2, "chunk_rows": 65, "prefix_cache": False}):
        engine = Engine(model, graphs=device == "cuda", **{**sizes, **given})
        if device == "cpu":
            monkeypatch.setattr(serving, "captured", rerun)
            monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
            engine.graphs = True
            engine.runner = Runner(model, engine.scheduler.memory, True, engine.scheduler.chunk_rows)
        assert drive(engine) == wanted
        assert engine.stats.graph_rows > 0 and (engine.stats.graph_rows < engine.stats.prefill_rows) == (device == "cpu")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("prompts", [[57] * 32, [64] * 28])
def test_a_whole_chunk_of_short_contexts_by_graph(kind: str, prompts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sequences as there may be, and padding of more rows than one sequence can have."""
    family, config = MODELS[kind]
    model = family.from_config(replace(config, positions=100), seed=1, device="cpu")
    monkeypatch.setattr(serving, "captured", rerun)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    draw = torch.Generator().manual_seed(2)
    found = []
    ids = [torch.randint(3, 500, (count,), generator=draw) for count in prompts]
    for padded in (None, PaddedRows, OfALiveSequence):
        engine = Engine(model, graphs=False, pages=260, page_size=16 if kind == "qwen3" else 80, chunk_rows=2048, max_batch=32)
        if padded is not None:
            monkeypatch.setattr(serving, "PaddedRows", padded)
            engine.graphs = True
            engine.runner = Runner(model, engine.scheduler.memory, True, 2048)
        found.append([numbers(record) for record in engine.generate(ids, SamplingParams(seed=0, max_new_tokens=1), prompt_log_probs=True)])
        assert engine.stats.prefill_rows == sum(prompts) and engine.stats.graph_rows == (sum(prompts) if padded else 0)
    assert found[0] == found[1] != found[2]
