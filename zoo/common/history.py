"""What ops read of the tokens before a row: records of tensors, and no memory that keeps them.

A history is packed (training: the rows of the same call are all there is), paged (rows that a server keeps, behind a page table) or
in slots (one state a sequence, which the call itself moves on). Records are handed to ops by a memory's views, and by observers that
cut a call to one row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class History(Protocol):
    """What an observer asks of any history."""

    @property
    def packed(self) -> bool:
        """Whether the rows of the call are all that there is."""

    @property
    def takes_push(self) -> bool:
        """Whether a row reads the rows of its sequence that come before it in the same call through the call's other arguments."""

    @property
    def changes(self) -> bool:
        """Whether the call writes into it."""

    def of_row(self, n: int, first: int, row: int, position: int) -> Self:
        """A copy of what row `row` reads, at `position` of sequence n, whose rows in this call begin at `first`."""

    def copied(self) -> Self:
        """With tensors of its own."""

    def before(self) -> Self:
        """What a call reads, to be looked at behind it: itself, or of slots that the call moves on a copy of those it was given."""

    def words(self) -> str:
        """What it is, in a table's cell."""


class _Record:
    """What the records have in common."""

    def before(self) -> Self:
        return self

    def copied(self) -> Self:
        return replace(self, **{f.name: _copy(getattr(self, f.name)) for f in fields(self)})  # type: ignore[type-var,arg-type]


class _Rows(_Record):
    """Rows of tokens: packed, or pages behind a table."""

    page_table_NB: Tensor | None
    changes = False

    @property
    def packed(self) -> bool:
        return self.page_table_NB is None

    @property
    def takes_push(self) -> bool:
        return self.packed

    def of_row(self, n: int, first: int, row: int, position: int) -> Self:
        every = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "page_table_NB"}  # type: ignore[arg-type]
        if self.page_table_NB is None:
            return replace(self, **{name: _copy(rows[first : row + 1]) for name, rows in every.items()})  # type: ignore[type-var]
        page_size = next(iter(every.values())).shape[1]
        pages = self.page_table_NB[n, : position // page_size + 1].long()
        table_NB = torch.arange(len(pages), dtype=torch.int32, device=pages.device)[None]
        return replace(self, **{name: rows[pages] for name, rows in every.items()}, page_table_NB=table_NB)  # type: ignore[type-var]


class _Slots(_Record):
    """Pools of all slots, and the slots of the sequences now being pushed."""

    slot_N: Tensor
    packed = False
    takes_push = True
    changes = True

    def of_row(self, n: int, first: int, row: int, position: int) -> Self:
        """The slot as it is: an observer takes it before the call, which moves it on."""
        return self.of_sequences(slice(n, n + 1))

    def before(self) -> Self:
        return self.of_sequences()

    def of_sequences(self, sequences: slice = slice(None)) -> Self:
        """A copy of the slots of some of the sequences, by their order: slots 0, 1, ... of the copy."""
        mine = self.slot_N[sequences]
        every = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "slot_N"}  # type: ignore[arg-type]
        pools = {name: pool[mine] for name, pool in every.items() if isinstance(pool, Tensor)}
        return replace(self, **pools, slot_N=torch.arange(len(mine), device=mine.device))  # type: ignore[type-var]

    def words(self) -> str:
        return "a slot a sequence"


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class KeyValues(_Rows):
    """What attention reads: keys and values [T, G, E] in row order, or [P, page, G, E] behind a page table [N, B] (int32)."""

    k: Tensor
    v: Tensor
    page_table_NB: Tensor | None = None

    def words(self) -> str:
        return "packed keys" if self.packed else f"keys in pages of {self.k.shape[1]}"


@dataclass(frozen=True)
class TokenRows(_Rows):
    """One row a token: [R, E] in row order, or [P, page, E] behind a page table [N, B] (int32)."""

    rows: Tensor
    page_table_NB: Tensor | None = None

    def of(self, n: int, first: int, last: int, length: int) -> Tensor:
        """[length, E] of sequence n, whose rows first .. last are being pushed."""
        if self.page_table_NB is None:
            return self.rows[first:last]
        return self.rows[self.page_table_NB[n].long().clamp(min=0)].flatten(0, 1)[:length]

    def words(self) -> str:
        return "packed" if self.packed else f"tokens in pages of {self.rows.shape[1]}"


@dataclass(frozen=True)
class CodedRows(_Rows):
    """One row a token in E4M3 codes, [R, E] or [P, page, E], with its FP32 scale, [R, 1] or [P, page, 1]; a page table as above."""

    codes: Tensor
    scales: Tensor
    page_table_NB: Tensor | None = None

    def of(self, n: int, first: int, last: int, length: int) -> tuple[Tensor, Tensor]:
        """([length, E], [length]) of sequence n, whose rows first .. last are being pushed."""
        parts = (TokenRows(part, self.page_table_NB).of(n, first, last, length) for part in (self.codes, self.scales))
        codes_TE, scales_T1 = parts
        return codes_TE, scales_T1[:, 0]

    def words(self) -> str:
        return "packed codes" if self.packed else f"codes in pages of {self.codes.shape[1]}"


@dataclass(frozen=True)
class DeltaState(_Slots):
    """One layer's pools, and the slots of the sequences now being pushed. J: the rows of the live chunk; S: slots.

    start_SVKE    FP32, the state at the live chunk's start
    rounded_SVKE  the program's dtype, `start` rounded: what rows read
    k_SHJK, v_SVJE, u_SVJE   the program's dtype, rows of the live chunk
    beta_SVJ      FP32
    decay_SVJ     FP32, running sum of log-decay inside the chunk
    inverse_SVJJ  FP32, rows of the chunk's unit triangular inverse
    slot_N        int64, the slot of each sequence
    """

    start_SVKE: Tensor
    rounded_SVKE: Tensor
    k_SHJK: Tensor
    v_SVJE: Tensor
    u_SVJE: Tensor
    beta_SVJ: Tensor
    decay_SVJ: Tensor
    inverse_SVJJ: Tensor
    slot_N: Tensor


@dataclass(frozen=True)
class ConvCarry(_Slots):
    """One layer's last rows before the convolution, oldest first, [S, W, channels], and the slots being pushed (int64)."""

    rows_SWC: Tensor
    slot_N: Tensor


@dataclass(frozen=True)
class PackedDelta(_Record):
    """Training: whole documents, or a rank's part of them cut on the grid of chunks.

    initial_NVKE  FP32, the state before each document's first row; None: zero
    carry_NWC     the rows before the convolution that come before each document's first row; None: zero
    """

    initial_NVKE: Tensor | None = None
    carry_NWC: Tensor | None = None
    packed = True
    takes_push = True
    changes = False

    def of_row(self, n: int, first: int, row: int, position: int) -> Self:
        return self.of_sequences(slice(n, n + 1))

    def of_sequences(self, sequences: slice = slice(None)) -> Self:
        """A copy of what stands before some of the documents."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: None if part is None else _copy(part[sequences]) for name, part in parts.items()})

    def words(self) -> str:
        return "whole documents"


@dataclass(frozen=True)
class CompressedRows(_Rows):
    """One row for every `tokens` tokens: [R, E] in row order, where the row of a token that completes one alone says something, or
    [P, page / tokens, E] behind a page table [N, B] (int32)."""

    rows: Tensor
    tokens: int
    page_table_NB: Tensor | None = None

    def of_row(self, n: int, first: int, row: int, position: int) -> Self:
        return replace(self, **_cut(self, {"rows": self.tokens}, n, first, row, position))

    def of(self, n: int, first: int, last: int, length: int) -> Tensor:
        """[length // tokens, E] of sequence n, whose rows first .. last are being pushed."""
        return _compressed_of(self.rows, self.tokens, self.page_table_NB, n, first, last, length)

    def words(self) -> str:
        return "packed" if self.packed else f"a row for {self.tokens} tokens in pages of {self.rows.shape[1] * self.tokens}"


@dataclass(frozen=True)
class WindowedRows(_Rows):
    """One row a token, of which the newest are read, and one for every `tokens` tokens, all in the layouts of `TokenRows` and
    `CompressedRows`; without compressed rows `tokens` is 0.

    name  what a server names the compressed rows by
    """

    window: Tensor
    compressed: Tensor | None
    tokens: int
    name: str
    page_table_NB: Tensor | None = None

    def of_row(self, n: int, first: int, row: int, position: int) -> Self:
        kept = {"window": 1} | ({} if self.compressed is None else {"compressed": self.tokens})
        return replace(self, **_cut(self, kept, n, first, row, position))

    def window_of(self, n: int, first: int, last: int, length: int) -> Tensor:
        """[length, E] of sequence n, whose rows first .. last are being pushed."""
        return TokenRows(self.window, self.page_table_NB).of(n, first, last, length)

    def compressed_of(self, n: int, first: int, last: int, length: int) -> Tensor:
        """[length // tokens, E] of it; none without compressed rows."""
        if self.compressed is None:
            return self.window.new_empty(0, self.window.shape[-1])
        return _compressed_of(self.compressed, self.tokens, self.page_table_NB, n, first, last, length)

    def words(self) -> str:
        return "packed" if self.packed else f"tokens in pages of {self.window.shape[1]}, with one row for {self.tokens} of them"


def _compressed_of(rows: Tensor, tokens: int, page_table_NB: Tensor | None, n: int, first: int, last: int, length: int) -> Tensor:
    if page_table_NB is None:
        return rows[first:last][tokens - 1 :: tokens]
    return rows[page_table_NB[n].long().clamp(min=0)].flatten(0, 1)[: length // tokens]


def _cut(record: Any, kept: dict[str, int], n: int, first: int, row: int, position: int) -> dict[str, Any]:
    """Copies of what a row reads of tensors with a row for so many tokens each, and the table of the copied pages."""
    table_NB = record.page_table_NB
    if table_NB is None:
        return {name: getattr(record, name)[first : row + 1].detach().clone() for name in kept}
    page_size = max(getattr(record, name).shape[1] * tokens for name, tokens in kept.items())
    pages = table_NB[n, : position // page_size + 1].long()
    cut: dict[str, Any] = {name: getattr(record, name)[pages] for name in kept}
    return cut | {"page_table_NB": torch.arange(len(pages), dtype=torch.int32, device=pages.device)[None]}


@dataclass(frozen=True)
class OpenWindows(_Slots):
    """One layer's rows before they are pooled, of the window that is open and, where windows overlap, of the one before: position p
    lies at p % W of [S, W, C] (FP32), and the slots being pushed (int64).

    name  what a server names them by
    """

    rows_SWC: Tensor
    slot_N: Tensor
    name: str


@dataclass(frozen=True)
class WholeWindows(_Record):
    """Training: whole documents, whose windows are all in the call. `name`: what a server names the open ones by."""

    name: str
    packed = True
    takes_push = True
    changes = False

    def of_row(self, n: int, first: int, row: int, position: int) -> Self:
        return self

    def words(self) -> str:
        return "whole documents"
