"""Memory: the one seam between training and serving. It moves bytes and computes nothing.

`append` writes the new rows' state and returns what the op reads. `PackedKeyValues` (training) returns the live tensors, so that
gradients flow and a recomputation under checkpointing changes nothing. `PagedMemory` (serving) writes pages.

The engine owns which page and slot belongs to whom and knows nothing of what they hold; it speaks `ServingMemory`:
- A sequence's tokens b * page_size .. (b + 1) * page_size - 1 live in its page b. Pages of one prefix may be shared by sequences.
- A memory with state that is not a row of a page (a recurrent state, an open compressor window) has `slots`, one per running
  sequence, slot 0 for padding. `table` writes slot and pages of a batch into one int32 tensor, opaque to drivers and graphs.
- Without slots, a sequence may start after any cached full pages. With slots it may start after L tokens iff a `snapshot` was
  taken when exactly L had been pushed, L a multiple of `grain`. A snapshot holds all of the sequence that its full pages don't:
  the slot, and copies of the rows of the page that L lies in. So a start shares full pages only, writes into none of them, and
  needs nothing of the sequence that the snapshot is of. `restore` writes it into the slot and the open page of another.
- `PagedMemory` is the plain case: no slots, no snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zoo.common.history import KeyValues
from zoo.common.rows import Rows

RESERVED_PAGE = 0  # padding rows of a CUDA graph write here; no sequence ever owns it
RESERVED_SLOT = 0  # likewise, in a memory with slots


class KeyValueMemory(Protocol):
    """One layer's keys and values."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues: ...


class PackedKeyValues:
    """Training: the rows pushed are the whole history of their documents. Stateless, so recomputation changes nothing."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        return KeyValues(k_RGE, v_RGE)


@dataclass
class PagedKeyValues:
    """One layer's pages, seen through the page table of the sequences now being pushed."""

    k_PSGE: Tensor
    v_PSGE: Tensor
    page_table_NB: Tensor

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        if self.k_PSGE.is_cuda:
            from zoo.common.page_kernels import write_rows

            if rows.count:
                write_rows(k_RGE, v_RGE, self.k_PSGE, self.v_PSGE, self.page_table_NB, rows)
        else:
            page_size = self.k_PSGE.shape[1]
            page_R = self.page_table_NB[rows.sequence_R, rows.positions_R // page_size].long()
            slot_R = page_R * page_size + rows.positions_R % page_size
            self.k_PSGE.view(-1, *self.k_PSGE.shape[2:])[slot_R] = k_RGE
            self.v_PSGE.view(-1, *self.v_PSGE.shape[2:])[slot_R] = v_RGE
        return KeyValues(self.k_PSGE, self.v_PSGE, self.page_table_NB)


class ServingMemory(Protocol):
    """What the engine asks of a memory; the module's docstring says what the words mean."""

    page_size: int
    pages: int
    slots: int
    grain: int  # snapshots are taken at multiples of so many tokens
    snapshots: int  # that may be alive at once; `nbytes` counts them

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, slots and snapshots."""

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
        """The cached bytes of one sequence by name, for comparisons: [layers, length, ...], and a slot's under `delta_` names."""


class Pages:
    """What memories of pages alone have in common: no slots and no snapshots, so a sequence may start after any cached full pages.

    Page 0 is reserved for padding rows. A subclass sets its buffers, [layers, pages, page_size, ...], and names them in `buffers`.
    """

    slots, grain, snapshots = 0, 1, 0

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2:
            raise ValueError(f"paged memory needs at least 2 pages (one is reserved for padding), got {pages}")
        if page_size < 1:
            raise ValueError(f"a page holds at least 1 token, not {page_size}")
        self.pages, self.page_size = pages, page_size

    def buffers(self) -> dict[str, Tensor]:
        raise AssertionError("written by each memory")

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers().values())

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def columns(self, blocks: int) -> int:
        return blocks

    def table(self, pages: Sequence[Sequence[int]], slots: Sequence[int], blocks: int) -> Tensor:
        padded = [[*held, *[RESERVED_PAGE] * (blocks - len(held))] for held in pages]
        return torch.tensor(padded, dtype=torch.int32).view(len(pages), blocks).to(self._device, non_blocking=True)

    def capacity(self, table_NB: Tensor) -> int:
        return table_NB.shape[1] * self.page_size

    def snapshot(self, slot: int, length: int, pages: Sequence[int]) -> Any:
        raise AssertionError("pages are all that there is")

    def restore(self, slot: int, pages: Sequence[int], snapshot: Any) -> None:
        raise AssertionError("pages are all that there is")

    def clear(self, pages: Sequence[int], slots: Sequence[int] = ()) -> None:
        """Zero-fills pages as they are assigned, so that no lane of an op ever reads an old or foreign value."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._device)
        for buffer in self.buffers().values():
            buffer.index_fill_(1, index, 0)

    def written(self, pages: list[int], length: int, slot: int = 0) -> dict[str, Tensor]:
        """The cached bytes of one sequence, [layers, length, ...] each, for the ladder's comparisons."""
        index = torch.tensor(pages, device=self._device)
        # selected rows are a copy already
        return {name: buffer.index_select(1, index).flatten(1, 2)[:, :length] for name, buffer in self.buffers().items()}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.buffers().values())).device


class PagedMemory(Pages):
    """Serving's memory: all layers' pages. `view(page_table)` gives the layers as a batch of sequences sees them.

    k_LPSGE, v_LPSGE: [layers, pages, page_size, kv heads, head dim].
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(pages, page_size)
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.k_LPSGE = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LPSGE = torch.zeros(shape, dtype=dtype, device=device)

    def buffers(self) -> dict[str, Tensor]:
        return {"k": self.k_LPSGE, "v": self.v_LPSGE}

    def view(self, page_table_NB: Tensor) -> list[PagedKeyValues]:
        return [PagedKeyValues(k, v, page_table_NB) for k, v in zip(self.k_LPSGE, self.v_LPSGE, strict=True)]
