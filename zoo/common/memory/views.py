"""A layer's memory as its ops see it: `append` writes the new rows and returns the history that the op reads.

Packed views are training's: they hold nothing and return the live tensors, so that gradients flow and a recomputation under
checkpointing changes nothing. Paged views write through a pager, which knows where the rows of the sequences now being pushed go. The
makers (`KeyValueLayer` and the others) are what a model names its layers' memory by: called with a pager and the sequences' slots, each
gives the view of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zoo.common.history import CodedRows, ConvCarry, DeltaState, KeyValues, PackedDelta, TokenRows
from zoo.common.memory.parts import SlotPart
from zoo.common.rows import Rows


class Pager(Protocol):
    """Where the rows of one push go."""

    @property
    def page_table_NB(self) -> Tensor:
        """int32, page b of sequence n."""

    def write(self, new: Sequence[Tensor], pages: Sequence[Tensor], rows: Rows, tokens_a_row: int = 1) -> None:
        """Tensor i of `new`, [R, ...], into `pages[i]`, [P, rows, ...]. With several tokens a row, the rows of tokens that complete one."""


@dataclass(frozen=True)
class TablePager:
    """By the page table alone: token t of sequence n goes into its page t // page_size."""

    page_table_NB: Tensor

    def write(self, new: Sequence[Tensor], pages: Sequence[Tensor], rows: Rows, tokens_a_row: int = 1) -> None:
        if not rows.count:
            return
        if pages[0].is_cuda:
            from zoo.common.memory.kernels import write_pages

            write_pages(new, pages, self.page_table_NB, rows, tokens_a_row)
            return
        index_R = rows.positions_R // tokens_a_row
        sequence_R = rows.sequence_R
        complete = ((rows.positions_R + 1) % tokens_a_row == 0).nonzero()[:, 0] if tokens_a_row > 1 else slice(None)
        for row_R, page in zip(new, pages, strict=True):
            size = page.shape[1]
            page_R = self.page_table_NB[sequence_R, index_R // size].long()
            page[page_R[complete], (index_R % size)[complete]] = row_R[complete]


class Pages(Protocol):
    """A page part, or pages of somebody else's."""

    def layer(self, index: int) -> tuple[Tensor, ...]: ...


class KeyValueMemory(Protocol):
    """One layer's keys and values."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues: ...


class PackedKeyValues:
    """Training: the rows pushed are the whole history of their documents."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        return KeyValues(k_RGE, v_RGE)


@dataclass
class PagedKeyValues:
    """One layer's pages of keys and values."""

    k_PSGE: Tensor
    v_PSGE: Tensor
    pager: Pager

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        self.pager.write((k_RGE, v_RGE), (self.k_PSGE, self.v_PSGE), rows)
        return KeyValues(self.k_PSGE, self.v_PSGE, self.pager.page_table_NB)


@dataclass(frozen=True)
class KeyValueLayer:
    pages: Pages
    index: int

    def __call__(self, pager: Pager, slot_N: Tensor | None) -> PagedKeyValues:
        k_PSGE, v_PSGE = self.pages.layer(self.index)
        return PagedKeyValues(k_PSGE, v_PSGE, pager)


class LatentMemory(Protocol):
    """One layer's latent rows, and index keys where it chooses what it reads. Other layers read the choice of the last one that does."""

    def append(self, latent_RC: Tensor, rows: Rows) -> TokenRows: ...

    def append_index(self, key_RE: Tensor, rows: Rows) -> TokenRows: ...

    def append_codes(self, codes_RE: Tensor, scales_R1: Tensor, rows: Rows) -> CodedRows: ...


class PackedLatents:
    """Training: the rows pushed are the whole history of their documents."""

    def append(self, latent_RC: Tensor, rows: Rows) -> TokenRows:
        return TokenRows(latent_RC)

    def append_index(self, key_RE: Tensor, rows: Rows) -> TokenRows:
        return TokenRows(key_RE)

    def append_codes(self, codes_RE: Tensor, scales_R1: Tensor, rows: Rows) -> CodedRows:
        return CodedRows(codes_RE, scales_R1)


@dataclass
class PagedLatents:
    """One layer's pages of latent rows, and of index keys if it has an index: rows, or codes beside their scales."""

    latent_PSC: Tensor
    index_PSE: Tensor | None
    pager: Pager
    scales_PS1: Tensor | None = None

    def append(self, latent_RC: Tensor, rows: Rows) -> TokenRows:
        self.pager.write((latent_RC,), (self.latent_PSC,), rows)
        return TokenRows(self.latent_PSC, self.pager.page_table_NB)

    def append_index(self, key_RE: Tensor, rows: Rows) -> TokenRows:
        assert self.index_PSE is not None, "a layer without an index has no index keys"
        self.pager.write((key_RE,), (self.index_PSE,), rows)
        return TokenRows(self.index_PSE, self.pager.page_table_NB)

    def append_codes(self, codes_RE: Tensor, scales_R1: Tensor, rows: Rows) -> CodedRows:
        assert self.index_PSE is not None and self.scales_PS1 is not None, "a layer without an index of codes has no coded keys"
        self.pager.write((codes_RE, scales_R1), (self.index_PSE, self.scales_PS1), rows)
        return CodedRows(self.index_PSE, self.scales_PS1, self.pager.page_table_NB)


@dataclass(frozen=True)
class LatentLayer:
    """indexed  the layer's place in the part of index keys; None without an index"""

    latents: Pages
    index: int
    keys: Pages
    indexed: int | None

    def __call__(self, pager: Pager, slot_N: Tensor | None) -> PagedLatents:
        [latent_PSC] = self.latents.layer(self.index)
        if self.indexed is None:
            return PagedLatents(latent_PSC, None, pager)
        index_PSE, *scales = self.keys.layer(self.indexed)
        return PagedLatents(latent_PSC, index_PSE, pager, *scales)


class PagedRows(NamedTuple):
    """One layer's pages of rows of one or several tokens, in one or several tensors: codes beside their scales."""

    pages: tuple[Tensor, ...]
    pager: Pager
    tokens_a_row: int

    def append(self, new: Sequence[Tensor], rows: Rows) -> tuple[TokenRows, ...]:
        """`new` has a row for every token pushed; kept are those of tokens that complete a row."""
        self.pager.write(new, self.pages, rows, self.tokens_a_row)
        return tuple(TokenRows(page, self.pager.page_table_NB) for page in self.pages)


class DeltaMemory(NamedTuple):
    """What a Gated DeltaNet layer reads and writes of its sequences."""

    state: DeltaState | PackedDelta
    carry: ConvCarry | PackedDelta


@dataclass(frozen=True)
class DeltaLayer:
    states: SlotPart
    carries: SlotPart
    index: int

    def __call__(self, pager: Pager, slot_N: Tensor | None) -> DeltaMemory:
        assert slot_N is not None, "sequences without a slot"
        return DeltaMemory(self.states.layer(self.index, slot_N), self.carries.layer(self.index, slot_N))


def views_of(layers: Sequence[Any], pager: Pager, slot_N: Tensor | None) -> list[Any]:
    """The view of every layer, from their makers."""
    slots = None if slot_N is None else slot_N.to(torch.int64)
    return [layer(pager, slots) for layer in layers]
