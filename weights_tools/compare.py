"""Two checkpoints, tensor by tensor, by bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from weights_tools.inspect import WIDE, content_hash_of, table_of
from zoo.common.checkpoint import Checkpoint
from zoo.common.terminal import Terminal
from zoo.testing import as_integers, ulp_distance

ONLY_A = "only in A"
ONLY_B = "only in B"
EXPONENTS = {"U8", "F8_E8M0"}  # two dtypes of the same scales
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Difference:
    """`elements` of `count` differ in their bytes; max_ulp is the largest distance of finite floats in representable numbers."""

    name: str
    reason: str
    elements: int = 0
    count: int = 0
    max_ulp: int | None = None


def revisions(a: str, b: str, revision: str | None, revision_b: str | None) -> tuple[str | None, str | None]:
    """The revisions that A and B are opened at: `revision` is of the hub ids among them, where both are folders of A, which refuses it."""
    local_a, local_b = (Path(side).expanduser().is_dir() for side in (a, b))
    return None if local_a and not local_b else revision, revision_b or (None if local_b else revision)


def differences(a: str, b: str, revision_a: str | None = None, revision_b: str | None = None) -> list[Difference]:
    """Every tensor that is not the same bytes in both. ValueError for a checkpoint that can't be opened."""
    return _differences(Checkpoint.open(a, revision_a), Checkpoint.open(b, revision_b))


def _differences(a: Checkpoint, b: Checkpoint) -> list[Difference]:
    left = a.tensors
    right = b.tensors
    out = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            out.append(Difference(name, ONLY_B if name in right else ONLY_A))
            continue
        x = left[name]
        y = right[name]
        if x.shape == y.shape and {x.dtype, y.dtype} == EXPONENTS:
            same = torch.equal(x.read().view(torch.uint8), y.read().view(torch.uint8))
            out.append(Difference(name, f"{x.dtype} against {y.dtype}, {'the same' if same else 'other'} bytes"))
            continue
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            out.append(Difference(name, f"{x.dtype} {list(x.shape)} against {y.dtype} {list(y.shape)}"))
            continue
        found = _between(name, x.read(), y.read())
        out += [found] if found else []
    return out


def show(a: str, b: str, revision_a: str | None = None, revision_b: str | None = None) -> bool:
    """Prints the report; True when all bytes are equal.

    Where names differ, it says first whether the weights do. Where they don't, names that only one form has are counted, and a
    table lists what else differs: of carried tensors the content hash says nothing.
    """
    console = Terminal(WIDE)
    sides = {ONLY_A: Checkpoint.open(a, revision_a), ONLY_B: Checkpoint.open(b, revision_b)}
    found = _differences(*sides.values())
    if not found:
        console.print("all tensors have the same bytes")
        return True
    listed = found
    title = f"{len(found)} tensors differ"
    if {ONLY_A, ONLY_B} & {line.reason for line in found}:
        mine, theirs = map(content_hash_of, sides.values())
        if mine == theirs and not mine.startswith("none"):
            carried = {reason: table_of(source).is_carried for reason, source in sides.items()}
            listed = [line for line in found if line.reason not in carried or carried[line.reason](line.name)]
            only = ", ".join(f"{sum(d.reason == r for d in found) - sum(d.reason == r for d in listed)} names {r}" for r in sides)
            said = f"the same weights in two forms, of one content hash: {mine} ({only})"
            title = f"{len(listed)} tensors beside them differ"
        else:
            said = f"content hash of A: {mine}; of B: {theirs}"
        console.print(said, soft_wrap=True)
    if listed:
        table = Table("tensor", "difference", "elements", "of", "max ulp", title=title)
        for line in listed:
            table.add_row(line.name, line.reason, str(line.elements), str(line.count), "" if line.max_ulp is None else str(line.max_ulp))
        console.print(table)
    return False


def _between(name: str, x: Tensor, y: Tensor) -> Difference | None:
    differing = as_integers(x) != as_integers(y)
    elements = int(differing.sum())
    if not elements:
        return None
    ulp = int(ulp_distance(x[differing], y[differing]).max()) if x.dtype in _FLOATS else -1
    return Difference(name, "bytes", elements, x.numel(), None if ulp < 0 else ulp)
