"""Published tensors into a serving model, from a checkpoint's stream or an update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zoo.common.checkpoint import Places, WeightTable
from zoo.common.serving import ForServing

LOAD_BYTES = 1 << 30  # published tensors on the device at once while a checkpoint streams in


@torch.no_grad()
def load(zoo: ForServing, weights: Iterable[tuple[str, Tensor]], whole: bool) -> None:
    """Published names, whole tensors, in place; what a family carries but never uses (vision, MTP) passes by.

    A list that lies on the device is checked whole before its first write; a stream in pieces of LOAD_BYTES.
    ValueError if `whole` and a tensor of the geometry is missing, and for a tensor that comes twice or in two layouts.
    """
    device, table = next(zoo.parameters()).device, zoo.table_of()
    fp32 = {p.published for entry in table.entries if table.is_fp32(entry.ours) for layout in entry.layouts for p in layout}
    names: set[str] = set()
    places = Places(table)  # of the whole stream: `load_weights` sees one piece of it
    for piece in _pieces((name, tensor) for name, tensor in weights if not table.is_carried(name)):
        for name, _ in piece:
            places.find(name)
            names.add(name)
        zoo.load_weights([(n, _widened(t.to(device)) if n in fp32 else t.to(device)) for n, t in piece])
    absent = _absent(table, names) if whole else set()
    if absent:
        some = ", ".join(sorted(absent)[:4])
        raise ValueError(f"the checkpoint lacks {len(absent)} tensors of this geometry: {some}")


def _widened(tensor: Tensor) -> Tensor:
    """FP32 parameters may be published narrower: widening is exact."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _absent(table: WeightTable, names: set[str]) -> set[str]:
    """What lacks of the layout that lacks the least, of every parameter."""
    lacking = [[{p.published for p in layout} - names for layout in e.layouts] for e in table.entries if not e.optional_alias]
    return {name for layouts in lacking for name in min(layouts, key=len)}


def _pieces(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    piece: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        piece.append((name, tensor))
        size += 0 if tensor.is_cuda else tensor.nbytes
        if size >= LOAD_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
