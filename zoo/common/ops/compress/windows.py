"""Which rows of a sequence a window pools, which of them a slot holds between two calls, and what training says that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Window(NamedTuple):
    """Windows of so many tokens; overlapping ones also pool the tokens of the window before."""

    tokens: int
    overlaps: bool

    @property
    def held(self) -> int:
        """Rows of a slot: position p lies at p % held."""
        return self.tokens * (2 if self.overlaps else 1)

    def first(self, length: int) -> int:
        """The first position that a sequence of `length` tokens still needs the row of."""
        open_window = length // self.tokens
        return max(open_window - self.overlaps, 0) * self.tokens

    def live(self, length: int) -> list[int]:
        """Where the rows lie in a slot that say something of a sequence of `length` tokens, the oldest first."""
        return [p % self.held for p in range(self.first(length), length)]


def first_positions(positions_R: Tensor, tokens: int) -> Tensor:
    """Of a token that completes a window, the position of the window's first; of others at least 0."""
    return (positions_R + 1 - tokens).clamp(min=0)


@dataclass(frozen=True)
class WindowWitness:
    """rows_RC: one document's rows, as training's call has them."""

    rows_RC: Tensor
    window: Window
    name: str

    def after(self, length: int) -> dict[str, Tensor]:
        return {self.name: self.rows_RC[self.window.first(length) : length]}
