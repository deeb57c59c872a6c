"""Two checkpoints, tensor by tensor, by bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from weights_tools.inspect import wide_console
from zoo.common.checkpoint import Checkpoint

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """`elements` of `count` differ in their bytes; max_ulp is the largest distance in representable numbers (floats only)."""

    name: str
    reason: str
    elements: int = 0
    count: int = 0
    max_ulp: int | None = None


def differences(a: str, b: str) -> list[Difference]:
    """Every tensor that is not the same bytes in both. ValueError for a checkpoint that can't be opened."""
    left, right = Checkpoint.open(a).tensors, Checkpoint.open(b).tensors
    out = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            out.append(Difference(name, "only in B" if name in right else "only in A"))
            continue
        x, y = left[name], right[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            out.append(Difference(name, f"{x.dtype} {list(x.shape)} against {y.dtype} {list(y.shape)}"))
            continue
        found = _between(name, x.read(), y.read())
        out += [found] if found else []
    return out


def show(a: str, b: str, console: Console | None = None) -> bool:
    """Prints the report; True when all bytes are equal."""
    console = console or wide_console()
    found = differences(a, b)
    if not found:
        console.print("all tensors have the same bytes")
        return True
    table = Table("tensor", "difference", "elements", "of", "max ulp", title=f"{len(found)} tensors differ")
    for line in found:
        table.add_row(line.name, line.reason, str(line.elements), str(line.count), "" if line.max_ulp is None else str(line.max_ulp))
    console.print(table)
    return False


def _between(name: str, x: Tensor, y: Tensor) -> Difference | None:
    bits_x, bits_y = (t.view(_INTEGERS[t.element_size()]) for t in (x, y))
    elements = int((bits_x != bits_y).sum())
    if not elements:
        return None
    ulp = None
    if x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        ulp = int((_ordered(bits_x) - _ordered(bits_y)).abs().max())
    return Difference(name, "bytes", elements, x.numel(), ulp)


def _ordered(bits: Tensor) -> Tensor:
    """Sign and magnitude as an integer that counts representable numbers from zero."""
    magnitude = bits.to(torch.int64) & torch.iinfo(bits.dtype).max
    return torch.where(bits < 0, -magnitude, magnitude)
