"""A server's memory, put together from parts, as the engine speaks to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zoo.common.memory.parts import RESERVED_PAGE, PagePart, SlotPart
from zoo.common.memory.views import Pager, TablePager, views_of


class ServingMemory(Protocol):
    """What the engine asks of a memory; the package's page says what the words mean."""

    page_size: int
    pages: int
    slots: int
    grain: int  # snapshots are taken at multiples of so many tokens
    snapshots: int  # that may be alive at once; `nbytes` counts them

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, slots and snapshots."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it keeps, by name."""

    def pages_for(self, length: int) -> int:
        """Pages that a sequence of `length` tokens holds."""

    def columns(self, blocks: int) -> int:
        """Columns of a table for sequences of at most `blocks` pages."""

    def table(self, pages: Sequence[Sequence[int]], slots: Sequence[int], blocks: int) -> Tensor:
        """int32 [N, columns(blocks)] on the memory's device, padded with the reserved page."""

    def capacity(self, table_NB: Tensor) -> int:
        """Tokens of one sequence that such a table can address."""

    def clear(self, pages: Sequence[int], slots: Sequence[int] = ()) -> None:
        """Pages become zeros, slots sequences of length 0, as they are assigned."""

    def snapshot(self, slot: int, length: int, pages: Sequence[int]) -> Any:
        """Copies of a slot and of the open page of a sequence of `length` tokens. ValueError off multiples of `grain`."""

    def restore(self, slot: int, pages: Sequence[int], snapshot: Any) -> None:
        """Writes a snapshot into a slot and into the page that its length lies in, cleared and nobody else's."""

    def written(self, pages: list[int], length: int, slot: int = 0) -> dict[str, Tensor]:
        """The cached bytes of one sequence by name, for comparisons: [layers, ...] each."""

    def written_slot(self, slot: int, length: int) -> dict[str, Tensor]:
        """Those of them that its slot holds."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A sequence of `length` tokens: the rows of the page that it ends in, and its slot, by name and [layers, ...] each."""

    length: int
    rows: Mapping[str, Tensor]
    slot: Mapping[str, Tensor]


class Memory:
    """Page parts and slot parts, and for each layer of the model the maker of its view.

    With slot parts a row of the table is [slot, page 0, page 1, ...], else the pages alone. `snapshots` may be alive at once, by
    default one per slot. The engine keeps to it; `nbytes` counts them.
    ValueError for page parts of other numbers or sizes of pages, or slot parts of other numbers of slots, than the first's.
    """

    def __init__(
        self,
        page_parts: Sequence[PagePart],
        slot_parts: Sequence[SlotPart],
        layers: Sequence[Callable[[Pager, Tensor | None], Any]],
        snapshots: int | None = None,
    ) -> None:
        first = page_parts[0]
        for part in page_parts:
            if (part.pages, part.page_size) != (first.pages, first.page_size):
                raise ValueError(
                    f"{part.name} has {part.pages} pages of {part.page_size} tokens, {first.name} {first.pages} of {first.page_size}"
                )
        for held in slot_parts:
            if held.slots != slot_parts[0].slots:
                raise ValueError(f"{held.name} has {held.slots} slots, {slot_parts[0].name} {slot_parts[0].slots}")
        self.page_parts = tuple(page_parts)
        self.slot_parts = tuple(slot_parts)
        self.layers = tuple(layers)
        self.page_size = first.page_size
        self.pages = first.pages
        self.slots = slot_parts[0].slots - 1 if slot_parts else 0
        self.grain = math.lcm(*(part.grain for part in slot_parts)) if slot_parts else 1
        self.snapshots = self.slots if snapshots is None else snapshots

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts: what a model checks before it writes."""
        return *(part.name for part in self.page_parts), *(part.name for part in self.slot_parts)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: [layers, pages, rows, ...] of page parts, [layers, slots, ...] of slot parts."""
        kept: dict[str, Tensor] = {}
        for part in self.page_parts:
            kept |= part.tensors
        for held in self.slot_parts:
            kept |= held.pools
        return kept

    def view(self, table_NB: Tensor) -> list[Any]:
        """The layers as the sequences of a table see them."""
        if not self.slot_parts:
            return views_of(self.layers, TablePager(table_NB), None)
        return views_of(self.layers, TablePager(table_NB[:, 1:]), table_NB[:, 0])

    @property
    def nbytes(self) -> int:
        held = sum(part.nbytes for part in self.page_parts) + sum(part.nbytes for part in self.slot_parts)
        return held + self.snapshots * self.snapshot_nbytes

    @property
    def snapshot_nbytes(self) -> int:
        """At most: a page of 80 may be open with 64 of its tokens where snapshots are taken at multiples of 64."""
        most = self.page_size - math.gcd(self.page_size, self.grain)
        return sum(part.open_nbytes(most) for part in self.page_parts) + sum(part.snapshot_nbytes for part in self.slot_parts)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def columns(self, blocks: int) -> int:
        return blocks + bool(self.slot_parts)

    def table(self, pages: Sequence[Sequence[int]], slots: Sequence[int], blocks: int) -> Tensor:
        device = next(iter(self.page_parts[0].tensors.values())).device
        padded = [[*held, *[RESERVED_PAGE] * (blocks - len(held))] for held in pages]
        pages_NB = torch.tensor(padded, dtype=torch.int32).view(len(pages), blocks).to(device, non_blocking=True)
        if not self.slot_parts:
            return pages_NB
        slot_N1 = torch.tensor(slots, dtype=torch.int32)[:, None].to(device, non_blocking=True)
        return torch.cat([slot_N1, pages_NB], dim=1)

    def capacity(self, table_NB: Tensor) -> int:
        return (table_NB.shape[1] - bool(self.slot_parts)) * self.page_size

    def clear(self, pages: Sequence[int], slots: Sequence[int] = ()) -> None:
        for part in self.page_parts:
            part.clear(pages)
        for held in self.slot_parts if slots else ():
            held.clear(slots)

    def snapshot(self, slot: int, length: int, pages: Sequence[int]) -> Snapshot:
        """ValueError off multiples of `grain` tokens."""
        assert self.slot_parts, "pages are all that there is"
        kept: dict[str, Tensor] = {}
        for held in self.slot_parts:
            kept |= held.snapshot(slot, length)
        full, tokens = divmod(length, self.page_size)
        page = pages[full] if tokens else RESERVED_PAGE
        rows: dict[str, Tensor] = {}
        for part in self.page_parts:
            rows |= part.open_rows(page, tokens)
        return Snapshot(length, rows, kept)

    def restore(self, slot: int, pages: Sequence[int], snapshot: Snapshot) -> None:
        for held in self.slot_parts:
            held.restore(slot, snapshot.slot)
        full, tokens = divmod(snapshot.length, self.page_size)
        for part in self.page_parts if tokens else ():
            part.write_open_rows(pages[full], snapshot.rows)

    def written(self, pages: list[int], length: int, slot: int = 0) -> dict[str, Tensor]:
        """Rows as [layers, rows, ...]; a slot's bytes as [layers, ...]."""
        found: dict[str, Tensor] = {}
        for part in self.page_parts:
            found |= part.written(pages, length)
        return found | self.written_slot(slot, length)

    def written_slot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A slot's bytes as [layers, ...]."""
        found: dict[str, Tensor] = {}
        for part in self.slot_parts:
            found |= part.written(slot, length)
        return found
