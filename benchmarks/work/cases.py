"""One op's work at one shape, where it runs, and its row law in a hurry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.work.shapes import CONTEXTS
from zoo.common.program import Program
from zoo.testing import assert_same_bytes
from zoo.verify.qualify import Target

Call = Callable[[int], Any]


@dataclass
class Work:
    """One op at one shape and row count. Calls take the number of a set of rotated operands.

    ours    the op as the program runs it first, then named providers of its class
    law     raises LawBroken if a subset of rows gives other bytes
    exact   float64 result for `picked` of an output, None where there is none
    last    what `exact` is compared with where one call is not enough, e.g. the last of many decode steps, by contender
    """

    op: str
    shape: str
    rows: int
    ours: dict[str, Call]
    rivals: dict[str, Call]
    flops: float
    nbytes: float
    law: Callable[[], None]
    exact: Callable[[], Tensor] | None = None
    picked: Callable[[Any], Tensor] = lambda out: out[0] if isinstance(out, tuple) else out
    sets: int = 1
    last: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    eager: bool = False
    targets: tuple[Target, ...] = field(default=())


@dataclass(frozen=True)
class Place:
    """Where and by which programs. `tiny`: smoke runs, whose shapes `size` caps."""

    device: torch.device
    ours: Program
    theirs: Program | None
    contexts: tuple[int, ...] = CONTEXTS
    tiny: bool = False

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype) * scale

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device)

    def size(self, full: int, tiny: int) -> int:
        return min(full, tiny) if self.tiny else full


def subset_law(whole: Callable[[], Any], part: Callable[[Tensor], Any], rows: int, device: torch.device) -> Callable[[], None]:
    """Row law in a hurry: one row, seven and (of many) 64 rows from all over the batch give the bytes that they have in it.

    A batch of fewer than 64 rows is also put, row for row, into one that repeats it up to 129 rows: never a call against itself.
    """

    def law() -> None:
        full = whole()
        for count in (1, 7, 64):
            if count < rows:
                index = torch.randperm(rows, generator=torch.Generator().manual_seed(count))[:count].to(device)
                assert_same_bytes(part(index), _taken(full, index), f"row law, {count} of {rows} rows")
        if rows < 64:
            index = (torch.arange(129) % rows).to(device)
            assert_same_bytes(part(index), _taken(full, index), f"row law, {rows} rows inside 129")

    return law


def _taken(value: Any, index: Tensor) -> Any:
    return tuple(_taken(v, index) for v in value) if isinstance(value, tuple) else value.index_select(0, index)
