"""Memory of models that mix attention layers (pages) and Gated DeltaNet layers (a slot a sequence)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.common.delta_memory import CHUNK, DeltaLayer, DeltaMemory, DeltaSnapshot
from zoo.common.memory import PagedKeyValues, PagedMemory


class HybridMemory:
    """A table row is [slot, page 0, page 1, ...]. Layer i has pages where `full[i]`, else a slot's state.

    At most `snapshots` are alive at once, by default one per slot; `nbytes` counts them, so that there is room for them.
    """

    def __init__(self, full: Sequence[bool], paged: PagedMemory, delta: DeltaMemory, snapshots: int | None = None) -> None:
        self.full, self.paged, self.delta = tuple(full), paged, delta
        self.page_size, self.pages = paged.page_size, paged.pages
        self.slots = delta.slots - 1
        self.snapshots = self.slots if snapshots is None else snapshots
        self._alive: weakref.WeakValueDictionary[int, DeltaSnapshot] = weakref.WeakValueDictionary()
        self._taken = 0

    def view(self, table_NB: Tensor) -> list[PagedKeyValues | DeltaLayer]:
        attention, recurrent = iter(self.paged.view(table_NB[:, 1:])), iter(self.delta.view(table_NB[:, 0].long()))
        return [next(attention) if full else next(recurrent) for full in self.full]

    @property
    def nbytes(self) -> int:
        return self.paged.nbytes + self.delta.nbytes + self.snapshots * self.delta.snapshot_nbytes

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

    def reusable_length(self, length: int) -> int:
        """Whole pages and whole chunks."""
        stride = math.lcm(self.page_size, CHUNK)
        return length // stride * stride

    def snapshot(self, slot: int, length: int) -> DeltaSnapshot | None:
        """None off multiples of 64 positions, and where `snapshots` are alive already."""
        if length % CHUNK or len(self._alive) >= self.snapshots:
            return None
        self._taken += 1
        made = self._alive[self._taken] = self.delta.snapshot(slot, length)
        return made

    def restore(self, slot: int, snapshot: DeltaSnapshot) -> None:
        self.delta.restore(slot, snapshot)

    def written(self, pages: list[int], length: int, slot: int = 0) -> dict[str, Tensor]:
        """[attention layers, length, ...] of keys and values; a slot's live bytes [recurrent layers, ...] as `delta_...`."""
        state = {f"delta_{name}": bytes_ for name, bytes_ in self.delta.written(slot, length).items()}
        return {**self.paged.written(pages, length), **state}
