"""Rows of layers that read their newest tokens and compressed rows of all the others: pages of both, and slots of open windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zoo.common.history import CompressedRows, OpenWindows, WholeWindows, WindowedRows
from zoo.common.memory.parts import SlotPart
from zoo.common.memory.views import Pager, Pages
from zoo.common.ops.compress.windows import Window
from zoo.common.rows import Rows


class CompressedMemory(Protocol):
    """One layer's rows: one a token, and where it compresses them one for several, and the keys of an index of these."""

    def open(self, name: str) -> OpenWindows | WholeWindows:
        """The windows of one of its compressors that are not complete."""

    def append(self, window_RE: Tensor, compressed_RE: Tensor | None, rows: Rows) -> WindowedRows: ...

    def append_index(self, key_RE: Tensor, rows: Rows) -> CompressedRows: ...


@dataclass(frozen=True)
class PackedCompressed:
    """Training: the rows pushed are the whole history of their documents.

    name, tokens  of the compressed rows; tokens 0: there are none
    """

    name: str
    tokens: int

    def open(self, name: str) -> WholeWindows:
        return WholeWindows(f"{name}_open")

    def append(self, window_RE: Tensor, compressed_RE: Tensor | None, rows: Rows) -> WindowedRows:
        return WindowedRows(window_RE, compressed_RE, self.tokens, self.name)

    def append_index(self, key_RE: Tensor, rows: Rows) -> CompressedRows:
        return CompressedRows(key_RE, self.tokens)


@dataclass(frozen=True)
class PagedCompressed:
    """One layer's pages: of token rows, of compressed rows by name, and its compressors' slots by name."""

    name: str
    tokens: int
    window_PSE: Tensor
    compressed: Mapping[str, Tensor]
    slots: Mapping[str, OpenWindows]
    pager: Pager

    def open(self, name: str) -> OpenWindows:
        return self.slots[name]

    def append(self, window_RE: Tensor, compressed_RE: Tensor | None, rows: Rows) -> WindowedRows:
        self.pager.write((window_RE,), (self.window_PSE,), rows)
        pages = self.compressed.get(self.name)
        if pages is not None:
            assert compressed_RE is not None, "a layer with compressed rows appends some"
            self.pager.write((compressed_RE,), (pages,), rows, self.tokens)
        return WindowedRows(self.window_PSE, pages, self.tokens, self.name, self.pager.page_table_NB)

    def append_index(self, key_RE: Tensor, rows: Rows) -> CompressedRows:
        pages = self.compressed["index"]
        self.pager.write((key_RE,), (pages,), rows, self.tokens)
        return CompressedRows(pages, self.tokens, self.pager.page_table_NB)


@dataclass(frozen=True)
class CompressedLayer:
    """A layer's place in the pages of token rows, in those of its kind's compressed rows, and in its kind's slots.

    names  of the tensors of the compressed rows' pages, in their order; none: the layer reads its window alone
    """

    windows: Pages
    index: int
    compressed: Pages
    slots: SlotPart
    place: int
    names: tuple[str, ...]
    tokens: int

    def __call__(self, pager: Pager, slot_N: Tensor | None) -> PagedCompressed:
        [window_PSE] = self.windows.layer(self.index)
        if not self.names:
            return PagedCompressed("", 0, window_PSE, {}, {}, pager)
        assert slot_N is not None, "sequences without a slot"
        pages = dict(zip(self.names, self.compressed.layer(self.place), strict=True))
        return PagedCompressed(self.names[0], self.tokens, window_PSE, pages, self.slots.layer(self.place, slot_N), pager)


class OpenSlots(SlotPart):
    """Rows before they are pooled, of one kind of windows, FP32: pools by compressor's name. A row is read once it is written.

    columns  of each compressor's rows, by its name
    """

    def __init__(
        self,
        name: str,
        layers: int,
        slots: int,
        window: Window,
        columns: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        kept = {f"{each}_SWC": (dtype, (window.held, width)) for each, width in columns.items()}
        super().__init__(name, layers, slots, kept, device, from_zero=())
        self.window = window
        self.grain = window.tokens

    @property
    def snapshot_nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values()) // self.slots // 2 if self.window.overlaps else 0

    def layer(self, index: int, slot_N: Tensor) -> dict[str, OpenWindows]:
        return {
            name.removesuffix("_SWC"): OpenWindows(pool[index], slot_N, f"{name.removesuffix('_SWC')}_open")
            for name, pool in self.pools.items()
        }

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """The window before, where windows overlap: no window is open where one begins."""
        self._check_grain(length)
        live = self.window.live(length)
        return {name: pool[:, slot][:, live] for name, pool in self.pools.items()}

    def restore(self, slot: int, snapshot: Mapping[str, Tensor]) -> None:
        for name, pool in self.pools.items():
            rows = snapshot[name]
            # every window begins at a multiple of its tokens, so the rows of the one before lie in either half
            pool[:, slot, : rows.shape[1]] = rows
            pool[:, slot, pool.shape[2] - rows.shape[1] :] = rows

    def written(self, slot: int, length: int) -> dict[str, Tensor]:
        live = self.window.live(length)
        return {f"{name.removesuffix('_SWC')}_open": pool[:, slot][:, live] for name, pool in self.pools.items()}
