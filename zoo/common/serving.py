"""Serving: rows through paged memory, eager or by CUDA graph. It chooses rows and memory and makes no number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.memory import RESERVED_SLOT, Memory, PagePart, Pages, ServingMemory, SlotPart
from zoo.common.pretrained import Pretrained, own_dtypes
from zoo.common.rows import Rows, check_ids, check_integers
from zoo.common.walk import CausalModel, walk

SEQUENCES = 64  # slots of a memory by default
PREFILL_ROWS = (64, 128, 256, 512, 1024)  # of a captured prefill; fewer are padded to the next
PREFILL_STRIDE = 1024  # above them every so many rows, up to a whole chunk
PREFILL_PADDING = 8  # of those above them at most one row in so many is padding; else a prefill runs eagerly
PREFILL_SEQUENCES = (8, 32)  # live ones at most: of a captured prefill of PREFILL_ROWS, of a larger one


class ForServing(Pretrained, nn.Module):
    """Base of every architecture's serving model; a subclass says what its memory is put together from.

    parts  names of its page parts and slot parts, which `prefill` asks of a memory
    """

    parts: ClassVar[tuple[str, ...]]
    model: CausalModel
    trainable = False

    @property
    def device(self) -> torch.device:
        """Where the weights are, and its memory."""
        return self.model.embed.weight.device

    def page_parts(self, pages: int, page_size: int) -> list[PagePart]:
        """What it keeps of tokens, in pages."""
        raise AssertionError("written by each architecture")

    def slot_parts(self, slots: int) -> list[SlotPart]:
        """What it keeps of running sequences beside their pages, slot 0 for padding; nothing by default."""
        return []

    def layer_views(self, pages: Sequence[Pages], slots: Sequence[SlotPart]) -> list[Any]:
        """The maker of each layer's view, over its own parts or over pages that somebody else keeps."""
        raise AssertionError("written by each architecture")

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> Memory:
        """Memory for this model on its device; page 0 is reserved for padding.

        slots: sequences that may run at once, where each holds state beside its pages, SEQUENCES by default; without such state it
        says nothing. ValueError for fewer than 2 pages, a page of no token, or no slot where there are any.
        """
        kept = self.page_parts(pages, self.family.page_size(self.config) if page_size is None else page_size)
        held = self.slot_parts((SEQUENCES if slots is None else slots) + 1)
        return Memory(kept, held, self.layer_views(kept, held))

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: Any, page_table_NB: Tensor) -> Tensor:
        """Token ids to final normed rows [R, D], writing memory."""
        return walk(self.model, ids_R, rows, memory.view(page_table_NB))

    @property
    def captured_length(self) -> int:
        """Tokens of a sequence in a captured prefill at most: one key segment, which is one pass of attention. 0: none is captured.

        The aligned program's kernels take every size that changes from the device; a rival's may wait for the host.
        """
        positions = self.config.positions
        return min(self.program.key_segment(self.config.head_dim) or positions, positions) if self.program.captures else 0

    @property
    def takes_any_page(self) -> bool:
        """Whether pages of every size are served: on CUDA FlashAttention 4 pages wide heads by its own key tile alone."""
        return self.config.head_dim <= 128 or self.program.device == "cpu"

    @own_dtypes
    @torch.no_grad()
    def prefill(self, ids_R: Tensor, rows: Rows, memory: ServingMemory, page_table_NB: Tensor, wanted_W: Tensor | None = None) -> Tensor:
        """Pushes rows (whole prompts or chunks of them) and returns the final rows [W, D] of `wanted_W` (all by default).

        page_table_NB int32, as `memory.table` makes it: page b of sequence n. ValueError for a memory of other parts than the model's,
        a position beyond the table, shapes that don't fit, ids that are no integers, or a table that isn't int32; which ids, pages and
        wanted rows they hold is not looked at, since they lie on the device: `Engine` has checked its own. Nor is whether the memory was
        made for this model's geometry. Runs eagerly, also under torch.compile.
        """
        if not isinstance(memory, Memory):
            raise ValueError(f"{type(self).__name__} takes a Memory, not a {type(memory).__name__}")
        if memory.parts != self.parts:
            raise ValueError(f"{type(self).__name__} takes a memory of {', '.join(self.parts)}, not of {', '.join(memory.parts)}")
        check_integers("ids_R", ids_R)
        if ids_R.shape != rows.positions_R.shape:
            raise ValueError(f"ids_R has shape {list(ids_R.shape)} for {rows.count} rows")
        if page_table_NB.dim() != 2 or page_table_NB.shape[0] != rows.lengths_N.shape[0]:
            raise ValueError(f"the page table has shape {list(page_table_NB.shape)} for {rows.lengths_N.shape[0]} sequences")
        if page_table_NB.dtype != torch.int32:
            raise ValueError(f"the page table must be int32, not {page_table_NB.dtype}")
        if rows.max_length > self.config.positions:
            raise ValueError(f"a sequence of {rows.max_length} tokens is longer than the position table of {self.config.positions}")
        if rows.max_length > memory.capacity(page_table_NB):
            raise ValueError(f"{rows.max_length} tokens do not fit a page table of {memory.capacity(page_table_NB)}")
        rows.renew()  # static rows change in place between calls, and a captured graph must derive its own
        hidden_RD = self.hidden_rows(ids_R, rows, memory, page_table_NB)
        return hidden_RD if wanted_W is None else hidden_RD.index_select(0, wanted_W)

    @torch.no_grad()
    def decode(self, ids_N: Tensor, rows: Rows, memory: ServingMemory, page_table_NB: Tensor) -> Tensor:
        """One row of each sequence: FP32 logits [N, V]."""
        return self.logits(self.prefill(ids_N, rows, memory, page_table_NB))

    @own_dtypes
    def logits(self, hidden_RD: Tensor, inverse_temperature_R: Tensor | None = None) -> Tensor:
        """FP32 logits [R, V] of final rows. ValueError for rows of another width or dtype than the model's."""
        self._check_final(hidden_RD)
        return ops.logits(hidden_RD, self.model.head_weight_VD, program=self.program, inverse_temperature_R=inverse_temperature_R)

    @own_dtypes
    @torch.no_grad()
    def log_prob(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """FP32 log-probabilities [R] of `targets_R`, int32 or int64 on the rows' device or the host, after final rows.

        ValueError for another count of targets than of rows, or a target outside the vocabulary. The check waits for targets that
        lie on a GPU, so the engine gives them from the host; no decode step and no captured graph comes through here.
        """
        self._check_final(hidden_RD)
        check_integers("targets_R", targets_R)
        if targets_R.shape != hidden_RD.shape[:-1]:
            raise ValueError(f"targets_R has shape {tuple(targets_R.shape)}, hidden_RD {tuple(hidden_RD.shape)}: one target per row")
        check_ids(targets_R, self.config.vocabulary)
        targets_R = targets_R.to(hidden_RD.device, torch.int64)
        return ops.log_prob(hidden_RD, self.model.head_weight_VD, targets_R, program=self.program).log_prob_R

    def _check_final(self, hidden_RD: Tensor) -> None:
        width = self.config.hidden
        dtype = self.program.torch_dtype
        if hidden_RD.dim() != 2 or hidden_RD.shape[1] != width or hidden_RD.dtype != dtype:
            raise ValueError(f"final rows are [R, {width}] of {dtype}, not {list(hidden_RD.shape)} of {hidden_RD.dtype}")


class DecodeGraph:
    """One captured decode step: `batch` sequences of at most `blocks` pages. Static inputs are overwritten before each replay.

    Padding sequences point at the reserved page with one token; their outputs are never read.
    """

    def __init__(self, model: ForServing, memory: ServingMemory, batch: int, blocks: int, pool: Any = None) -> None:
        """`pool` (torch.cuda.graph_pool_handle()) is shared by graphs whose outputs are read before another of them replays."""
        device = next(model.parameters()).device
        self.batch = batch
        self.blocks = blocks
        self.ids_N = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions_N = torch.zeros(batch, dtype=torch.int64, device=device)
        self.lengths_N = torch.ones(batch, dtype=torch.int32, device=device)
        self.page_table_NB = torch.zeros(batch, memory.columns(blocks), dtype=torch.int32, device=device)
        self.rows = Rows(  # kept: the graph reads these tensors on every replay
            self.positions_N,
            torch.arange(batch, device=device),
            torch.arange(batch + 1, dtype=torch.int32, device=device),
            self.lengths_N,
            max_rows=1,
            max_length=min(blocks * memory.page_size, model.config.positions),
        )
        self.graph, self.logits_NV = captured(lambda: model.decode(self.ids_N, self.rows, memory, self.page_table_NB), pool)

    def replay(self, ids_N: Tensor, positions_N: Tensor, page_table_NB: Tensor) -> Tensor:
        """Logits [n, V] of n <= batch sequences; valid until the next replay."""
        live, blocks = page_table_NB.shape
        self.ids_N[:live].copy_(ids_N)
        self.positions_N.zero_()[:live].copy_(positions_N)
        self.lengths_N.fill_(1)[:live].copy_(positions_N + 1)
        self.page_table_NB.zero_()[:live, :blocks].copy_(page_table_NB)
        self.graph.replay()
        return self.logits_NV[:live]


class PrefillGraph:
    """One captured prefill of at most `count` rows; see PaddedRows. `pool` as in DecodeGraph."""

    def __init__(self, model: ForServing, memory: ServingMemory, count: int, pool: Any = None) -> None:
        length = model.captured_length
        device = next(model.parameters()).device
        self.memory = memory
        self.padded = PaddedRows(count, length, memory.columns(memory.pages_for(length)), device)
        ids_R = self.padded.ids_R
        rows = self.padded.rows
        table_NB = self.padded.table_NB
        self.graph, self.hidden_RD = captured(lambda: model.prefill(ids_R, rows, memory, table_NB), pool)

    def replay(self, ids_R: Tensor, rows: Rows, table_NB: Tensor) -> Tensor:
        """Final rows [R, D] of a batch that `prefill_bucket` gives this count; valid until the next replay."""
        if self.memory.slots:
            self.memory.clear([], [RESERVED_SLOT])  # else padding's state would go on from one replay to the next
        self.padded.fill(ids_R, rows, table_NB)
        self.graph.replay()
        return self.hidden_RD[: rows.count]


def prefill_counts(length: int, most: int) -> tuple[int, ...]:
    """Rows of each captured prefill of at most `most` rows, and of no more than its live sequences of up to `length` tokens can have."""
    few, many = (min(most, sequences * length) for sequences in PREFILL_SEQUENCES)
    small = tuple(count for count in PREFILL_ROWS if count <= few)
    largest = PREFILL_ROWS[-1]
    return small if many <= largest else (*small, *range(largest + PREFILL_STRIDE, many, PREFILL_STRIDE), many)


def prefill_sequences(count: int) -> int:
    """Live sequences of a captured prefill of `count` rows at most."""
    return PREFILL_SEQUENCES[count > PREFILL_ROWS[-1]]


def prefill_padding(count: int) -> int:
    """Rows of it that `prefill_bucket` may leave to padding."""
    return count - 1 if count <= PREFILL_ROWS[-1] else count // PREFILL_PADDING


def prefill_bucket(rows: Rows, length: int, most: int) -> int | None:
    """Rows of the captured prefill, of `prefill_counts(length, most)`, that serves `rows`; None: they run eagerly."""
    if rows.max_length > length:
        return None
    count = next((count for count in prefill_counts(length, most) if rows.count <= count), None)
    if count is None or rows.lengths_N.shape[0] > prefill_sequences(count):
        return None
    return count if count - rows.count <= prefill_padding(count) else None


class PaddedRows:
    """The static inputs of a captured prefill: `count` rows of up to `prefill_sequences(count)` sequences of at most `length` tokens.

    The live sequences come first, then padding that owns the rows left over (one sequence, more where they are more than `length`),
    then empty ones (no rows, length 0). Padding's rows of the table are zeros, so it reads and writes the reserved page and slot 0
    alone, which no live sequence has. By the row and the place law live rows have the bytes that they have without it; its own are
    finite and never read.

    places    sequences in all: the most live ones and the padding beside them, and enough for padding alone
    ids_R     int64
    rows      kept: a graph reads its tensors on every replay
    table_NB  int32, as `hidden_rows` takes it
    """

    def __init__(self, count: int, length: int, columns: int, device: torch.device | str) -> None:
        assert count > 0 and length > 0, f"{count} rows of sequences of at most {length} tokens"
        self.count = count
        self.places = places = max(prefill_sequences(count) + -(-prefill_padding(count) // length), -(-count // length))
        self.ids_R = torch.zeros(count, dtype=torch.int64, device=device)
        self.table_NB = torch.zeros(places, columns, dtype=torch.int32, device=device)
        self.rows = Rows(
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(places + 1, dtype=torch.int32, device=device),
            torch.zeros(places, dtype=torch.int32, device=device),
            max_rows=count,
            max_length=length,
        )
        ramp_R = torch.arange(count, device=device)
        self._position_R = ramp_R % length
        self._piece_R = ramp_R // length
        self._begin_N1 = torch.arange(places + 1, dtype=torch.int32, device=device) * length
        self._pad(0, 0)

    def fill(self, ids_R: Tensor, rows: Rows, table_NB: Tensor) -> None:
        """The next live rows, on the current stream and without waiting for it. It is `prefill_bucket`'s for them."""
        live = rows.count
        sequences = rows.lengths_N.shape[0]
        mine = self.rows
        assert live <= self.count and rows.max_length <= mine.max_length
        assert self.count - live <= (self.places - sequences) * mine.max_length, f"no place for {self.count - live} rows of padding"
        self._pad(live, sequences)
        self.ids_R[:live].copy_(ids_R)
        mine.positions_R[:live].copy_(rows.positions_R)
        mine.sequence_R[:live].copy_(rows.sequence_R)
        mine.starts_N1[: sequences + 1].copy_(rows.starts_N1)
        mine.lengths_N[:sequences].copy_(rows.lengths_N)
        self.table_NB[:sequences, : table_NB.shape[1]].copy_(table_NB)

    def _pad(self, live: int, sequences: int) -> None:
        """All that is behind `live` rows of `sequences` sequences."""
        mine = self.rows
        left = self.count - live
        begin_N1 = (self._begin_N1[: len(self._begin_N1) - sequences] + live).clamp(max=self.count)
        self.ids_R[live:].zero_()
        mine.positions_R[live:].copy_(self._position_R[:left])
        torch.add(self._piece_R[:left], sequences, out=mine.sequence_R[live:])
        mine.starts_N1[sequences:].copy_(begin_N1)
        mine.lengths_N[sequences:].copy_(begin_N1[1:] - begin_N1[:-1])
        self.table_NB.zero_()


def captured(run: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """`run` as a graph, and what each replay overwrites."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels compile and libraries pick their workspaces before the capture
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result
