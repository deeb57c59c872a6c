"""How two providers of one byte class are compared at a shape: what they are both given.

An op of which a provider must be admitted before it runs has a function `comparison() -> Comparison` in its `cases.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.common.hashing import key64, normal_
from zoo.common.program import Program

KINDS = ("normal", "cancel", "wide", "subnormal")  # the first two take one weight
ROWS = (1, 2, 7, 16, 17, 64, 65, 128, 300, 4096)
DRAWN = 1000  # rows really drawn; not a divisor of any tile
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """The calls of a provider's `forward` that decide.

    calls  (shape, part, rows, program) -> (kind of its numbers, arguments of `forward`), each kind for several numbers of rows up to `rows`
    parts  what is compared apart, since each part compiles kernels of its own: "" or the output's dtype where it is not the program's
    """

    calls: Callable[[Shape, str, int, Program], Iterator[tuple[str, list[Any]]]]
    parts: tuple[str, ...] = ("",)


def comparison_of(op: str) -> Comparison:
    """ValueError for an op that has none."""
    module = importlib.import_module(f"zoo.common.ops.{op}.cases")
    if "comparison" not in vars(module):
        raise ValueError(f"op {op!r} has no comparison of providers: write `comparison()` in its cases.py")
    found: Comparison = module.comparison()
    return found


def numbers(shape: Shape, kind: str, name: str, program: Program, scale: float = 1.0) -> Tensor:
    """Random numbers of a kind (see `Draw.floats`), made on the device: drawing them on the CPU takes longer than comparing."""
    x, spread = (torch.empty(shape, dtype=torch.float32, device=program.device) for _ in range(2))
    normal_(x, key64("qualification", name), scale)
    if kind == "wide":
        x *= torch.exp2(normal_(spread, key64("spread", name), 12.0).round().clamp(-24, 24))
    elif kind == "cancel":
        even = x[..., : x.shape[-1] // 2 * 2 : 2]
        near = normal_(spread, key64("spread", name), 0.5).abs().clamp(max=1)[..., : even.shape[-1]]
        x[..., 1::2] = -even * (1 + 2.0**-7 * near)
    elif kind == "subnormal":
        x *= 2.0**-129
    return x.to(program.torch_dtype)


def row_counts(rows: int) -> tuple[int, ...]:
    """Numbers of rows up to `rows`, at edges of tiles and beside them."""
    return (*[r for r in ROWS if r < rows], rows)


def repeated(x: Tensor, count: int) -> Tensor:
    """`count` rows, those of x over and over."""
    return x if x.shape[0] == count else x[torch.arange(count, device=x.device) % x.shape[0]]
