"""Memory of models that mix attention layers (pages) and Gated DeltaNet layers (a slot a sequence)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.common.delta_memory import DeltaLayer, DeltaMemory, DeltaSnapshot
from zoo.common.memory import PagedKeyValues, PagedMemory
from zoo.common.ops.gated_delta.slots import CHUNK


@dataclass(frozen=True)
class HybridSnapshot:
    """A sequence at a multiple of 64 tokens: its states, and the rows [attention layers, rows, G, E] of the page it ends in."""

    delta: DeltaSnapshot
    k_LRGE: Tensor
    v_LRGE: Tensor

    @property
    def length(self) -> int:
        return self.delta.length


class HybridMemory:
    """A table row is [slot, page 0, page 1, ...]. Layer i has pages where `full[i]`, else a slot's state.

    `snapshots` may be alive at once, by default one per slot. The engine keeps to it; `nbytes` counts them.
    """

    grain = CHUNK

    def __init__(self, full: Sequence[bool], paged: PagedMemory, delta: DeltaMemory, snapshots: int | None = None) -> None:
        self.full, self.paged, self.delta = tuple(full), paged, delta
        self.page_size, self.pages = paged.page_size, paged.pages
        self.slots = delta.slots - 1
        self.snapshots = self.slots if snapshots is None else snapshots

    def view(self, table_NB: Tensor) -> list[PagedKeyValues | DeltaLayer]:
        attention, recurrent = iter(self.paged.view(table_NB[:, 1:])), iter(self.delta.view(table_NB[:, 0].long()))
        return [next(attention) if full else next(recurrent) for full in self.full]

    @property
    def nbytes(self) -> int:
        return self.paged.nbytes + self.delta.nbytes + self.snapshots * self.snapshot_nbytes

    @property
    def snapshot_nbytes(self) -> int:
        """At most: a page of 80 may be open with 64 of its rows written."""
        row = self.paged.nbytes // (self.pages * self.page_size)
        return self.delta.snapshot_nbytes + row * (self.page_size - math.gcd(self.page_size, CHUNK))

    def pages_for(self, length: int) -> int:
        return self.paged.pages_for(length)

    def columns(self, blocks: int) -> int:
        return blocks + 1

    def table(self, pages: Sequence[Sequence[int]], slots: Sequence[int], blocks: int) -> Tensor:
        pages_NB = self.paged.table(pages, slots, blocks)
        slot_N1 = torch.tensor(slots, dtype=torch.int32)[:, None].to(pages_NB.device, non_blocking=True)
        return torch.cat([slot_N1, pages_NB], dim=1)

    def capacity(self, table_NB: Tensor) -> int:
        return (table_NB.shape[1] - 1) * self.page_size

    def clear(self, pages: Sequence[int], slots: Sequence[int] = ()) -> None:
        self.paged.clear(pages)
        if slots:
            self.delta.clear(list(slots))

    def snapshot(self, slot: int, length: int, pages: Sequence[int]) -> HybridSnapshot:
        """ValueError off multiples of 64 tokens."""
        full, rows = divmod(length, self.page_size)
        page = pages[full] if rows else 0
        k_LRGE, v_LRGE = (t[:, page, :rows].clone() for t in (self.paged.k_LPSGE, self.paged.v_LPSGE))
        return HybridSnapshot(self.delta.snapshot(slot, length), k_LRGE, v_LRGE)

    def restore(self, slot: int, pages: Sequence[int], snapshot: HybridSnapshot) -> None:
        self.delta.restore(slot, snapshot.delta)
        full, rows = divmod(snapshot.length, self.page_size)
        if rows:
            self.paged.k_LPSGE[:, pages[full], :rows] = snapshot.k_LRGE
            self.paged.v_LPSGE[:, pages[full], :rows] = snapshot.v_LRGE

    def written(self, pages: list[int], length: int, slot: int = 0) -> dict[str, Tensor]:
        """[attention layers, length, ...] of keys and values; a slot's live bytes [recurrent layers, ...] as `delta_...`."""
        state = {f"delta_{name}": bytes_ for name, bytes_ in self.delta.written(slot, length).items()}
        return {**self.paged.written(pages, length), **state}
