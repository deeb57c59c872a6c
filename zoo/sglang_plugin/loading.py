"""Published tensors into a serving model, from a checkpoint's stream or an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from zoo.common.serving import ForServing
from zoo.common.weights import Places, WeightTable

LOAD_BYTES = 1 << 30  # published tensors on the device at once while a checkpoint streams in


@torch.no_grad()
def load(zoo: ForServing, weights: Iterable[tuple[str, Tensor]], wrote: Callable[[set[str]], None]) -> None:
    """Published names, whole tensors, in place; what a family carries but never uses (vision, MTP) passes by.

    A list is checked whole before its first write; a stream in pieces of LOAD_BYTES, so `check` it first where that matters.
    wrote  called after each piece with its names
    ValueError in one sentence for an unknown name, one given twice, two layouts of a parameter, another shape or dtype, NaN or infinity.
    """
    pieces: Iterable[Callable[[], list[tuple[str, Tensor]]]] = _pieces(zoo, weights)
    if isinstance(weights, list | tuple):
        pieces = held = list(pieces)
        for piece in held if len(held) > 1 else ():
            zoo.check_weights(piece())
    for piece in pieces:
        moved = piece()
        zoo.load_weights(moved)
        wrote({name for name, _ in moved})


@torch.no_grad()
def check(zoo: ForServing, weights: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError where `load` would raise it; nothing is written."""
    for piece in _pieces(zoo, weights):
        zoo.check_weights(piece())


def absent(table: WeightTable, names: set[str]) -> set[str]:
    """What lacks of the layout that lacks the least, of every parameter."""
    lacking = [[{p.published for p in layout} - names for layout in e.layouts] for e in table.entries if not e.optional_alias]
    return {name for layouts in lacking for name in min(layouts, key=len)}


def _widened(tensor: Tensor) -> Tensor:
    """FP32 parameters may be published narrower: widening is exact."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _pieces(zoo: ForServing, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Callable[[], list[tuple[str, Tensor]]]]:
    """Pieces of at most LOAD_BYTES to come, each brought to the device when called; what is there already is one piece.

    A tied parameter and its alias come last, together: one is compared with the other.
    """
    device = next(zoo.parameters()).device
    table = zoo.table_of()
    wide = [entry for entry in table.entries if entry.stored(torch.bfloat16) is torch.float32]
    fp32 = {p.published for entry in wide for layout in entry.layouts for p in layout}
    together = {p.published for entry in table.entries if entry.ours in table.tied for layout in entry.layouts for p in layout}

    def of(piece: list[tuple[str, Tensor]]) -> Callable[[], list[tuple[str, Tensor]]]:
        return lambda: [(n, _widened(t.to(device)) if n in fp32 else t.to(device)) for n, t in piece]

    places = Places(table)  # of the whole stream: `load_weights` sees one piece of it
    last: list[tuple[str, Tensor]] = []
    piece: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if table.is_carried(name):
            continue
        places.find(name)
        if name in together:
            last.append((name, tensor))
            continue
        piece.append((name, tensor))
        size += 0 if tensor.is_cuda else tensor.nbytes
        if size >= LOAD_BYTES:
            yield of(piece)
            piece = []
            size = 0
    if piece or last:
        yield of(piece + last)
