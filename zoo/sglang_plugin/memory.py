"""SGLang's token slots seen as the zoo's pages, and its forward batches as the zoo's rows. It moves bytes and computes nothing.

Slots of one page follow each other and page 0 is SGLang's own, for padding. SGLang hands out pages as they were left, so the row
that starts a page zeroes the rest of it: no lane of an op ever reads an old or foreign value, and no NaN outlives its page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.common.memory import KeyValueLayer, Pager, views_of
from zoo.common.rows import Rows
from zoo.common.serving import PaddedRows, prefill_bucket, prefill_counts


@dataclass(frozen=True)
class Step:
    """One forward: its rows, and where they go.

    table_NB  int32, page b of sequence n
    slot_R    int64, the row's slot
    tail_R    int32, slots behind the row's own that it zeroes
    request_N the sequences' places in SGLang's request table, for memory with a slot per running sequence
    """

    rows: Rows
    table_NB: Tensor
    slot_R: Tensor
    tail_R: Tensor
    request_N: Tensor

    @property
    def decode(self) -> bool:
        return self.rows.max_rows == 1


@dataclass(frozen=True)
class StepPager:
    """Rows of a step go to their slots, and each that starts a page zeroes the rest of it."""

    step: Step

    @property
    def page_table_NB(self) -> Tensor:
        return self.step.table_NB

    def write(self, new: Sequence[Tensor], pages: Sequence[Tensor], rows: Rows, tokens_a_row: int = 1) -> None:
        assert tokens_a_row == 1 and len(new) == 2, "SGLang's pools hold a key and a value of each token"
        k_RGE, v_RGE = new
        k_SGE, v_SGE = (page.view(-1, *page.shape[2:]) for page in pages)
        _writer(k_RGE)(k_RGE, v_RGE, k_SGE, v_SGE, self.step.slot_R, self.step.tail_R, self.step.decode)


def _writer(rows: Tensor) -> Callable[..., None]:
    if not rows.is_cuda:
        return _append
    from zoo.sglang_plugin.kernels import append

    return append


def _table_maker(table: Tensor) -> Callable[..., None]:
    if not table.is_cuda:
        return _page_table
    from zoo.sglang_plugin.kernels import page_table

    return page_table


def _append(k_RGE: Tensor, v_RGE: Tensor, k_SGE: Tensor, v_SGE: Tensor, slot_R: Tensor, tail_R: Tensor, decode: bool) -> None:
    """The same on a CPU, for tests."""
    for slot, tail in zip(slot_R.tolist(), tail_R.tolist(), strict=True):
        k_SGE[slot + 1 : slot + 1 + tail] = 0
        v_SGE[slot + 1 : slot + 1 + tail] = 0
    k_SGE[slot_R] = k_RGE
    v_SGE[slot_R] = v_RGE


@dataclass(frozen=True)
class BoundPool:
    """What a serving model's `hidden_rows` takes as memory: the makers of its layers' views, during one step.

    slots  whether a layer holds something in the slots of the step's requests
    """

    layers: Sequence[Callable[[Pager, Tensor | None], Any]]
    step: Step
    slots: bool

    def view(self, page_table_NB: Tensor) -> list[Any]:
        return views_of(self.layers, StepPager(self.step), self.step.request_N if self.slots else None)


class KeyValuePool:
    """Buffers [slots, kv heads, head dim], one pair per layer, as pages [P, page, G, E].

    ValueError for buffers of another dtype, layout or a number of slots that isn't whole pages.
    """

    def __init__(self, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], page_size: int, dtype: torch.dtype) -> None:
        for buffer in (*k_buffers, *v_buffers):
            if buffer.dtype != dtype:
                raise ValueError(f"the key-value pool holds {buffer.dtype}, the program's history is {dtype}")
            if buffer.dim() != 3 or not buffer.is_contiguous():
                raise ValueError(f"the key-value pool's layout {list(buffer.shape)} is not [slots, heads, width] in one piece")
            if buffer.shape[0] % page_size:
                raise ValueError(f"{buffer.shape[0]} slots are not whole pages of {page_size}")
        self.k_pages = [t.view(-1, page_size, *t.shape[1:]) for t in k_buffers]
        self.v_pages = [t.view(-1, page_size, *t.shape[1:]) for t in v_buffers]
        self.page_size = page_size
        self.layers = [KeyValueLayer(self, index) for index in range(len(self.k_pages))]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        return self.k_pages[index], self.v_pages[index]

    def during(self, step: Step) -> BoundPool:
        """Of a model whose every layer has keys and values."""
        return BoundPool(self.layers, step, slots=False)

    def begin(
        self, rids: Sequence[str] | None, request_N: Tensor, contexts_N: Tensor, counts: Sequence[int], contexts: Sequence[int]
    ) -> None:
        """Before a prefill's rows: nothing to do, a page's bytes are anybody's."""

    def clear_padding(self) -> None:
        """Zeroes page 0, to which every column of a page table beyond its sequence points."""
        for pages in (*self.k_pages, *self.v_pages):
            pages[0].zero_()


@dataclass(frozen=True)
class Bound:
    """Tokens per sequence that a step's launch shapes allow: whole key segments, so that nothing is padded on the way."""

    length: int
    page_size: int
    segment: int | None

    @property
    def columns(self) -> int:
        """Columns of a page table for such sequences."""
        unit = self.segment or self.page_size
        tokens = -(-self.length // unit) * unit if self.length > unit else self.length
        return -(-tokens // self.page_size)


class StepBuilder:
    """Makes steps from what SGLang says about a batch. request_to_slot [requests, positions]: slot of each token."""

    def __init__(self, request_to_slot: Tensor, page_size: int, segment: int | None, positions: int) -> None:
        self.request_to_slot = request_to_slot
        self.page_size = page_size
        self.segment = segment
        self.positions = positions

    def bound(self, longest: int) -> Bound:
        return Bound(min(longest, self.positions), self.page_size, self.segment)

    def fill(self, request_N: Tensor, length_N: Tensor, table_NB: Tensor, lengths_N: Tensor, tails_N: Tensor | None) -> None:
        """A step's page table, lengths and, for decode, tails, into tensors that exist."""
        _table_maker(table_NB)(self.request_to_slot, request_N, length_N, self.page_size, table_NB, lengths_N, tails_N)

    def decode(self, request_N: Tensor, length_N: Tensor, positions_N: Tensor, slot_N: Tensor, longest: int) -> Step:
        """One new row of each sequence, whose length counts it."""
        bound = self.bound(longest)
        count = request_N.shape[0]
        device = request_N.device
        table = torch.empty(count, bound.columns, dtype=torch.int32, device=device)
        lengths, tails = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
        self.fill(request_N, length_N, table, lengths, tails)
        rows = Rows(
            positions_N,
            torch.arange(count, device=device),
            torch.arange(count + 1, dtype=torch.int32, device=device),
            lengths,
            max_rows=1,
            max_length=bound.length,
        )
        return Step(rows, table, slot_N, tails, request_N)

    def extend(
        self,
        request_N: Tensor,
        length_N: Tensor,
        positions_R: Tensor,
        slot_R: Tensor,
        counts_N: Tensor,
        contexts_N: Tensor,
        counts: Sequence[int],
        contexts: Sequence[int],
    ) -> Step:
        """`counts[n]` new rows of sequence n after `contexts[n]` tokens, known on host and device; no synchronisation."""
        count = len(counts)
        device = request_N.device
        bound = self.bound(max(c + before for c, before in zip(counts, contexts, strict=True)))
        table = torch.empty(count, bound.columns, dtype=torch.int32, device=device)
        lengths = torch.empty(count, dtype=torch.int32, device=device)
        self.fill(request_N, length_N, table, lengths, None)
        starts = torch.zeros(count + 1, dtype=torch.int32, device=device)
        starts[1:] = counts_N.cumsum(0)
        total = positions_R.shape[0]
        sequence_R = torch.repeat_interleave(torch.arange(count, device=device), counts_N.long(), output_size=total)
        last = lengths - 1
        within = last % self.page_size
        tails = torch.zeros(total, dtype=torch.int32, device=device)
        tails[starts[1:].long() - 1] = torch.where(last - within >= contexts_N, self.page_size - 1 - within, 0).to(torch.int32)
        rows = Rows(positions_R, sequence_R, starts, lengths, max_rows=max(counts), max_length=bound.length)
        return Step(rows, table, slot_R, tails, request_N)


def _page_table(
    request_to_slot: Tensor,
    request_N: Tensor,
    length_N: Tensor,
    page: int,
    table_NB: Tensor,
    lengths_N: Tensor,
    tails_N: Tensor | None,
) -> None:
    """The same on a CPU, for tests."""
    lengths_N.copy_(length_N)
    if tails_N is not None:
        tails_N.copy_(torch.where((lengths_N - 1) % page == 0, page - 1, 0))
    table_NB.zero_()
    for n, (request, length) in enumerate(zip(request_N.tolist(), length_N.tolist(), strict=True)):
        pages = request_to_slot[request, :length:page] // page
        table_NB[n, : pages.shape[0]] = pages


class GraphSteps:
    """Static decode steps, one per captured batch size and bound; graphs read their tensors on every replay.

    A graph's launch shape is fixed by its bound, so one bound of the whole context would make a short sequence pay for
    segments that it does not have. `lengths` are the bounds captured: one segment, then four times as much, and the context.
    """

    def __init__(self, builder: StepBuilder, largest: int, context: int, device: torch.device | str) -> None:
        self.builder = builder
        self.lengths = graph_lengths(context, builder.segment)
        self.tables = {
            length: torch.zeros(largest * builder.bound(length).columns, dtype=torch.int32, device=device) for length in self.lengths
        }
        self.lengths_N = torch.ones(largest, dtype=torch.int32, device=device)
        self.tails_N = torch.zeros(largest, dtype=torch.int32, device=device)
        self.sequence_N = torch.arange(largest, device=device)
        self.starts_N1 = torch.arange(largest + 1, dtype=torch.int32, device=device)

    def length_for(self, longest: int) -> int:
        """The smallest bound that holds `longest` tokens. ValueError if none does."""
        for length in self.lengths:
            if longest <= length:
                return length
        raise ValueError(f"a sequence of {longest} tokens is longer than the largest captured graph's {self.lengths[-1]}")

    def step(self, length: int, request_N: Tensor, positions_N: Tensor, slot_N: Tensor) -> Step:
        """The static step of a batch size at one bound, for capture: positions and slots are SGLang's own static tensors."""
        count = request_N.shape[0]
        rows = Rows(
            positions_N,
            self.sequence_N[:count],
            self.starts_N1[: count + 1],
            self.lengths_N[:count],
            max_rows=1,
            max_length=length,
        )
        return Step(rows, self._table(length, count), slot_N, self.tails_N[:count], request_N)

    def refresh(self, length: int, request_N: Tensor, length_N: Tensor) -> None:
        """Before a capture or replay, on its stream: SGLang may rewrite its request table as soon as the replay starts."""
        count = request_N.shape[0]
        self.builder.fill(request_N, length_N, self._table(length, count), self.lengths_N[:count], self.tails_N[:count])

    def _table(self, length: int, count: int) -> Tensor:
        columns = self.builder.bound(length).columns
        return self.tables[length][: count * columns].view(count, columns)


def graph_lengths(context: int, segment: int | None) -> list[int]:
    """One key segment, then four times the last while that is at most half of the context, and the context."""
    if segment is None or segment >= context:
        return [context]
    lengths = [segment]
    while 8 * lengths[-1] <= context:
        lengths.append(4 * lengths[-1])
    return [*lengths, context]


class PaddedStep:
    """A static prefill step: `PaddedRows`, and where they go.

    Padding rows all go to slot 0 and the last one zeroes the rest of page 0, so they read finite values whatever that page held.
    """

    def __init__(self, builder: StepBuilder, count: int, length: int, device: torch.device | str) -> None:
        self.padded = PaddedRows(count, length, builder.bound(length).columns, device)
        self.step = Step(
            self.padded.rows,
            self.padded.table_NB,
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
            torch.zeros(self.padded.places, dtype=torch.int64, device=device),
        )
        self._rest = builder.page_size - 1
        self._pad(0, 0)

    def fill(self, ids_R: Tensor, live: Step) -> None:
        """The next live rows, on the current stream."""
        self.padded.fill(ids_R, live.rows, live.table_NB)
        rows = live.rows.count
        sequences = live.request_N.shape[0]
        self._pad(rows, sequences)
        self.step.slot_R[:rows].copy_(live.slot_R)
        self.step.tail_R[:rows].copy_(live.tail_R)
        self.step.request_N[:sequences].copy_(live.request_N)

    def _pad(self, live: int, sequences: int) -> None:
        self.step.slot_R[live:].zero_()
        self.step.tail_R[live:].zero_()
        self.step.tail_R[max(live, self.padded.count - 1) :].fill_(self._rest)
        self.step.request_N[sequences:].zero_()


class PrefillSteps:
    """Static prefill steps, one per captured number of rows up to `most`, for sequences of up to `length` tokens.

    replays  what runs each of them and returns its final rows [count, D]; whoever captures them fills it
    pushed   live rows that replays have served
    """

    def __init__(self, builder: StepBuilder, length: int, most: int, device: torch.device | str) -> None:
        self.length = length
        self.most = most
        self.steps = {count: PaddedStep(builder, count, length, device) for count in prefill_counts(length, most)}
        self.replays: dict[int, Callable[[], Tensor]] = {}
        self.pushed = 0

    def push(self, ids_R: Tensor, step: Step) -> Tensor | None:
        """The final rows [R, D] of a prefill by graph, valid until the next one; None where no graph serves it."""
        count = prefill_bucket(step.rows, self.length, self.most)
        if count not in self.replays:
            return None
        self.steps[count].fill(ids_R, step)
        self.pushed += step.rows.count
        return self.replays[count]()[: step.rows.count]
