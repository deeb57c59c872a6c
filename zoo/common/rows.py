"""Rows: everything that an op may know about the tokens in a batch.

A row is one token's activation. Activations are packed `[R, ...]`; there is no padded `[B, T]` behind `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import Tensor

FLAG = object()  # marks the keys of `Rows.launch` that are flags


@dataclass(frozen=True)
class Rows:
    """Metadata of R packed rows of N sequences.

    positions_R  int64, the row's absolute position in its sequence
    sequence_R   int64, which of the N sequences the row belongs to
    starts_N1    int32, row offsets: sequence n owns rows starts[n] .. starts[n + 1]
    lengths_N    int32, tokens of sequence n in memory after these rows are pushed
    max_rows     host bound on the rows of one sequence (shapes a launch, never a byte)
    max_length   host bound on lengths_N (likewise)
    launch       what a launch derives from the rows once for all layers; ops fill it, and every Rows starts with an empty one
    """

    positions_R: Tensor
    sequence_R: Tensor
    starts_N1: Tensor
    lengths_N: Tensor
    max_rows: int
    max_length: int
    launch: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "launch", {})  # also of a copy, to which dataclasses.replace hands everything on

    @property
    def count(self) -> int:
        return self.positions_R.shape[0]

    def flag(self, what: str) -> Tensor:
        """int32 [1] beside the rows, 0 until an op writes another value there: what it found and can't wait to say. See `check_flags`.

        It stays where it was made, see `renew`: a graph's own memory is written by the other graphs of its pool before anyone looks.
        """
        key = (FLAG, what)
        if key not in self.launch:
            self.launch[key] = torch.zeros(1, dtype=torch.int32, device=self.positions_R.device)
        flag: Tensor = self.launch[key]
        return flag

    def renew(self) -> None:
        """Drops what was derived from rows that have changed in place, and sets their flags back to 0.

        Captured, it is how each replay derives its own; flags then lie outside the graph, since the runs before a capture made them.
        """
        kept = {key: flag for key, flag in self.launch.items() if isinstance(key, tuple) and key[0] is FLAG}
        for flag in kept.values():
            flag.zero_()
        self.launch.clear()
        self.launch.update(kept)

    def check_flags(self) -> None:
        """ValueError for a flag that an op has set on these rows. It waits for the device if there is any: ask where that is waited for."""
        raised = [key[1] for key, flag in self.launch.items() if isinstance(key, tuple) and key[0] is FLAG and bool(flag)]
        if raised:
            raise ValueError("; ".join(raised))

    @classmethod
    def packed(cls, cu_seqlens: Tensor) -> Rows:
        """Whole documents packed one after another: training's rows. ValueError unless cu_seqlens ascends from 0."""
        starts = check_cu_seqlens(cu_seqlens)
        return cls.pushed([b - a for a, b in zip(starts, starts[1:], strict=False)], None, cu_seqlens.device)

    @classmethod
    def pushed(cls, counts: list[int], contexts: list[int] | None, device: torch.device | str) -> Rows:
        """`counts[n]` new rows of sequence n after `contexts[n]` tokens that memory already holds.

        ValueError without a sequence, for a sequence without a row, and for contexts below 0 or of another count.
        """
        before = contexts or [0] * len(counts)
        if not counts or len(before) != len(counts) or min(counts) < 1 or min(before) < 0:
            raise ValueError(f"a push has sequences of at least one row and a context >= 0 each: counts {counts}, contexts {contexts}")
        counts_N = torch.tensor(counts)
        before_N = torch.tensor(before)
        starts = torch.zeros(len(counts) + 1, dtype=torch.int64)
        starts[1:] = counts_N.cumsum(0)
        sequence_R = torch.repeat_interleave(torch.arange(len(counts)), counts_N)
        positions_R = torch.arange(int(starts[-1])) - starts[sequence_R] + before_N[sequence_R]
        lengths = counts_N + before_N
        return cls(
            positions_R.to(device),
            sequence_R.to(device),
            starts.to(device, torch.int32),
            lengths.to(device, torch.int32),
            max(counts),
            int(lengths.max()),
        )


def check_cu_seqlens(cu_seqlens: Tensor) -> list[int]:
    """The offsets as a list; ValueError unless they are int32 or int64 [N + 1], start at 0 and ascend strictly."""
    check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must be [N + 1], not {list(cu_seqlens.shape)}")
    starts = [int(v) for v in cu_seqlens.tolist()]
    if len(starts) < 2 or starts[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0 and hold at least one document, got {starts[:4]}")
    for a, b in zip(starts, starts[1:], strict=False):
        if b <= a:
            raise ValueError(f"cu_seqlens must ascend: {a} is followed by {b}")
    return starts


def check_integers(name: str, value: object) -> None:
    """ValueError unless `value` is an int32 or int64 tensor."""
    given = value.dtype if isinstance(value, Tensor) else type(value).__name__
    if given not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be an int32 or int64 tensor, not {given}")
    check_dense(name, value)


def check_dense(name: str, value: object) -> None:
    """ValueError unless `value` is a tensor whose elements can be read here."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
    elif hasattr(value, "full_tensor"):  # FSDP2's DTensor, whose module takes long to import
        kind = "a sharded one"
    elif value.is_meta:
        kind = "one on meta"
    elif value.layout != torch.strided:
        kind = str(value.layout)
    else:
        return
    raise ValueError(f"{name} must be a dense tensor with data, whole on one device, not {kind}")


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """ValueError for an id outside the vocabulary. It waits for ids that lie on a GPU."""
    if ids.numel():
        check_id(int(ids.min()), vocabulary)
        check_id(int(ids.max()), vocabulary)


def check_id(token: int, vocabulary: int) -> None:
    """ValueError for an id outside the vocabulary."""
    if not 0 <= token < vocabulary:
        raise ValueError(f"token id {token} is outside the vocabulary of {vocabulary}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer, Python's or numpy's, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)
