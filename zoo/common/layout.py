"""How the ranks of a job share a model: data alone, of which a geometry makes the sizes that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis; 1 everywhere is a whole model on one rank.

    tp  tensor parallel: heads, MLP columns and the vocabulary are divided
    ep  expert parallel: the routed experts are divided
    cp  context parallel: a sequence's tokens are divided
    pp  pipeline parallel: the layers are divided
    dp  data parallel: the sequences are divided

    ValueError for what is no whole number of ranks.
    """

    tp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            ranks = getattr(self, axis.name)
            if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
                raise ValueError(f"layout: {axis.name} must be an integer of at least 1, it is {ranks!r:.40}")

    def check_ranks(self, ranks: Mapping[str, int]) -> None:
        """ValueError unless `ranks` names axes of the layout, and of each one of its ranks."""
        known = {axis.name: getattr(self, axis.name) for axis in fields(self)}
        for axis, rank in ranks.items():
            if axis not in known:
                raise ValueError(f"layout: there is no axis {axis!r:.40}, there are {', '.join(known)}")
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < known[axis]:
                raise ValueError(f"layout: there is no rank {rank!r:.40} of {axis} {known[axis]}")

    def share(self, what: str, size: int, axis: str) -> int:
        """What one rank holds of `size` that are divided along an axis. ValueError, with both numbers, where they do not divide."""
        ranks: int = getattr(self, axis)
        if size % ranks:
            raise ValueError(f"layout: {what} {size} do not divide among {axis} {ranks}")
        return size // ranks


WHOLE = Layout()
