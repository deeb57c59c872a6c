"""Memory: the one seam between training and serving. It moves bytes and computes nothing.

`append` writes the new rows' state and returns what the op reads. `PackedMemory` (training) returns the live tensors, so that
gradients flow and a recomputation under checkpointing changes nothing. `PagedMemory` (serving) writes pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zoo.common.rows import Rows

RESERVED_PAGE = 0  # padding rows of a CUDA graph write here; no sequence ever owns it


@dataclass(frozen=True)
class KeyValues:
    """What attention reads: keys and values [T, G, E] in row order, or [P, page, G, E] behind a page table [N, B] (int32)."""

    k: Tensor
    v: Tensor
    page_table_NB: Tensor | None = None


class KeyValueMemory(Protocol):
    """One layer's keys and values."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues: ...


class PackedKeyValues:
    """Training: the rows pushed are the whole history of their documents."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        return KeyValues(k_RGE, v_RGE)


class PackedMemory:
    """Training's memory: one stateless layer view for all layers, so recomputation is idempotent by construction."""

    def __getitem__(self, layer: int) -> PackedKeyValues:
        return PackedKeyValues()


@dataclass
class PagedKeyValues:
    """One layer's pages, seen through the page table of the sequences now being pushed."""

    k_PSGE: Tensor
    v_PSGE: Tensor
    page_table_NB: Tensor

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        page_size = self.k_PSGE.shape[1]
        page_R = self.page_table_NB[rows.sequence_R, rows.positions_R // page_size].long()
        slot_R = page_R * page_size + rows.positions_R % page_size
        self.k_PSGE.view(-1, *self.k_PSGE.shape[2:])[slot_R] = k_RGE
        self.v_PSGE.view(-1, *self.v_PSGE.shape[2:])[slot_R] = v_RGE
        return KeyValues(self.k_PSGE, self.v_PSGE, self.page_table_NB)


class PagedMemory:
    """Serving's memory: all layers' pages. `view(page_table)` gives the layers as a batch of sequences sees them.

    k_LPSGE, v_LPSGE: [layers, pages, page_size, kv heads, head dim]. Page 0 is reserved for padding rows.
    """

    def __init__(
        self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if pages < 2:
            raise ValueError(f"paged memory needs at least 2 pages (one is reserved for padding), got {pages}")
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.k_LPSGE = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LPSGE = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size
        self.pages = pages

    def view(self, page_table_NB: Tensor) -> list[PagedKeyValues]:
        return [PagedKeyValues(k, v, page_table_NB) for k, v in zip(self.k_LPSGE, self.v_LPSGE, strict=True)]

    def clear(self, pages: list[int]) -> None:
        """Zero-fills pages as they are assigned, so that no lane of an op ever reads an old or foreign value."""
        index = torch.tensor(pages, device=self.k_LPSGE.device)
        self.k_LPSGE.index_fill_(1, index, 0)
        self.v_LPSGE.index_fill_(1, index, 0)

    def written(self, pages: list[int], length: int) -> dict[str, Tensor]:
        """The cached bytes of one sequence, [layers, length, kv heads, head dim] each, for the ladder's comparisons."""
        index = torch.tensor(pages, device=self.k_LPSGE.device)
        return {
            name: t.index_select(1, index).flatten(1, 2)[:, :length].clone()
            for name, t in (("k", self.k_LPSGE), ("v", self.v_LPSGE))
        }
