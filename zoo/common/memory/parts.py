"""Parts of a memory: rows of tokens in pages, and what a sequence holds in a slot. They move bytes and compute nothing.

A page holds `page_size` tokens of one sequence in every page part of a memory. A part keeps one row for each `tokens_a_row` tokens, in
one or several tensors (codes beside their scales). A row of several tokens is there once the last of them was pushed; what is open
until then belongs to a slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RESERVED_PAGE = 0  # padding rows of a CUDA graph write here; no sequence ever owns it
RESERVED_SLOT = 0  # likewise, in a memory with slots

Kept = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of one row, or of one slot, by name


class PagePart:
    """Rows of `layers` layers: tensors [layers, pages, page_size // tokens_a_row, ...] by name, zeros at first.

    joined: a page is one block of memory, all rows of the first tensor, then those of the next, as kernels of libraries read codes with
    their scales. A tensor is then contiguous inside a page only.
    ValueError for fewer than 2 pages (one is reserved for padding) and for a page that holds no token or no whole rows.
    """

    def __init__(
        self,
        name: str,
        layers: int,
        pages: int,
        page_size: int,
        kept: Kept,
        device: torch.device | str,
        tokens_a_row: int = 1,
        joined: bool = False,
    ) -> None:
        if pages < 2:
            raise ValueError(f"paged memory needs at least 2 pages (one is reserved for padding), got {pages}")
        if page_size < 1:
            raise ValueError(f"a page holds at least 1 token, not {page_size}")
        if page_size % tokens_a_row:
            raise ValueError(f"a page of {page_size} tokens does not hold whole rows of {tokens_a_row}")
        self.name = name
        self.pages = pages
        self.page_size = page_size
        self.tokens_a_row = tokens_a_row
        rows = page_size // tokens_a_row
        self.tensors: dict[str, Tensor] = {}
        if joined:
            begins: dict[str, int] = {}
            end = 0
            for each, (dtype, shape) in kept.items():
                begins[each] = -(-end // dtype.itemsize) * dtype.itemsize
                end = begins[each] + rows * math.prod(shape) * dtype.itemsize
            # whole units of 16 bytes, which is what the libraries' copies of whole pages ask of a page's beginning
            blocks = torch.zeros(layers, pages, -(-end // 16) * 16, dtype=torch.uint8, device=device)
            for each, (dtype, shape) in kept.items():
                size = rows * math.prod(shape) * dtype.itemsize
                part = blocks[:, :, begins[each] : begins[each] + size]
                self.tensors[each] = part.view(dtype).unflatten(2, (rows, *shape))
            return
        for each, (dtype, shape) in kept.items():
            self.tensors[each] = torch.zeros(layers, pages, rows, *shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """One layer's pages [P, rows, ...] of each tensor."""
        return tuple(tensor[index] for tensor in self.tensors.values())

    def open_nbytes(self, tokens: int) -> int:
        """Bytes of the rows that `tokens` tokens of one page have."""
        return self.nbytes // (self.pages * (self.page_size // self.tokens_a_row)) * (tokens // self.tokens_a_row)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero-fills pages as they are assigned, so that no lane of an op ever reads an old or foreign value."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._device)
        for tensor in self.tensors.values():
            in_bytes(tensor).index_fill_(1, index, 0)

    def open_rows(self, page: int, tokens: int) -> dict[str, Tensor]:
        """Copies of the rows that the first `tokens` tokens of a page have."""
        return {name: tensor[:, page, : tokens // self.tokens_a_row].clone() for name, tensor in self.tensors.items()}

    def write_open_rows(self, page: int, rows: Mapping[str, Tensor]) -> None:
        """Writes such copies into a page."""
        for name, tensor in self.tensors.items():
            tensor[:, page, : rows[name].shape[1]] = rows[name]

    def written(self, pages: Sequence[int], length: int) -> dict[str, Tensor]:
        """The cached bytes of one sequence of `length` tokens, [layers, rows, ...] each, for comparisons."""
        index = torch.tensor(pages, device=self._device)
        rows = length // self.tokens_a_row
        # selected rows are a copy already
        chosen = {name: in_bytes(tensor).index_select(1, index).view(tensor.dtype) for name, tensor in self.tensors.items()}
        return {name: tensor.flatten(1, 2)[:, :rows] for name, tensor in chosen.items()}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.tensors.values())).device


class SlotPart:
    """What `slots` sequences hold in `layers` layers beside their pages: pools [layers, slots, ...] by name. Slot 0 is for padding.

    grain      a sequence can be copied out where its length is a multiple of so many tokens
    from_zero  names of the pools that are read in a sequence of length 0, and so must be zero there; all of them by default

    The op that reads a pool is the one that writes it; this moves slots, and makes them sequences of length 0.
    ValueError for fewer than 2 slots.
    """

    grain = 1

    def __init__(
        self, name: str, layers: int, slots: int, kept: Kept, device: torch.device | str, from_zero: Sequence[str] | None = None
    ) -> None:
        if slots < 2:
            raise ValueError(f"{name} memory needs at least 2 slots (one is reserved for padding), got {slots}")
        self.name = name
        self.slots = slots
        self.layers = layers
        self.pools = {each: torch.zeros(layers, slots, *shape, dtype=dtype, device=device) for each, (dtype, shape) in kept.items()}
        self.from_zero = tuple(self.pools) if from_zero is None else tuple(from_zero)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes of a snapshot of one slot."""
        return self.nbytes // self.slots

    def layer(self, index: int, slot_N: Tensor) -> Any:
        """What an op reads and writes of one layer's sequences, which are in `slot_N`."""
        raise AssertionError("written by each part")

    def view(self, slot_N: Tensor) -> list[Any]:
        return [self.layer(index, slot_N) for index in range(self.layers)]

    def clear(self, slots: Sequence[int] | Tensor) -> None:
        """Makes slots (a list, or int64 on the device), as they are assigned, sequences of length 0."""
        first = next(iter(self.pools.values()))
        index = slots if isinstance(slots, Tensor) else torch.tensor(list(slots), dtype=torch.int64, device=first.device)
        for name in self.from_zero:
            _in_eights(self.pools[name]).index_fill_(1, index, 0)

    def copy(self, source: int, target: int) -> None:
        """Moves or forks a sequence at any length: every byte of its slot."""
        for pool in self.pools.values():
            pool[:, target] = pool[:, source]

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copies, by pool, from which a sequence of `length` tokens can go on. ValueError off multiples of `grain`."""
        self._check_grain(length)
        return {name: pool[:, slot].clone() for name, pool in self.pools.items()}

    def restore(self, slot: int, snapshot: Mapping[str, Tensor]) -> None:
        """A slot just assigned becomes the sequence that the snapshot is of."""
        for name, pool in self.pools.items():
            pool[:, slot] = snapshot[name]

    def written(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copies of the bytes that say something of a sequence of `length` tokens, [layers, ...] each, for comparisons."""
        return {name: pool[:, slot].clone() for name, pool in self.pools.items()}

    def _check_grain(self, length: int) -> None:
        if length % self.grain:
            raise ValueError(f"a snapshot is taken at a multiple of {self.grain} tokens, not at {length}")


def in_bytes(tensor: Tensor) -> Tensor:
    """Codes of one byte as integers: torch moves no FP8 by index."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _in_eights(pool: Tensor) -> Tensor:
    """[L, S, ...] seen as 8-byte integers where a slot has whole ones: an index_fill takes its time by the element."""
    slot = pool.flatten(2)
    return slot.view(torch.int64) if slot.shape[2] * slot.element_size() % 8 == 0 else slot
