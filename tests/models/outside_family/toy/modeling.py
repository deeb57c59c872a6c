"""The toy in training and in serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from toy.model import ToyMemory
from toy.recall import TOKENS
from zoo.common.history import PackedDelta, TokenRows
from zoo.common.memory import CarrySlots, PagedRows, PagePart, Pages, SlotPart
from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.common.training import ForRL


class PackedSqueezed:
    """The rows of the tokens that complete one, one document's after another's."""

    def append(self, new: Sequence[Tensor], rows: Rows) -> tuple[TokenRows, ...]:
        complete_R = (rows.positions_R + 1) % TOKENS == 0
        return tuple(TokenRows(row_RC[complete_R]) for row_RC in new)


class ToyForRL(ForRL):
    def layer_memory(self, layer: int, rows: Rows) -> ToyMemory:
        return ToyMemory(PackedDelta(), PackedSqueezed())


class ToyForServing(ForServing):
    parts = ("squeezed", "carry")

    def page_parts(self, pages: int, page_size: int) -> list[PagePart]:
        c = self.config
        row = (self.program.torch_dtype, (c.channels,))
        return [PagePart("squeezed", c.layers, pages, page_size, {"squeezed": row}, self.device, TOKENS)]

    def slot_parts(self, slots: int) -> list[SlotPart]:
        return [CarrySlots(self.config.layers, slots, self.config.channels, self.program.torch_dtype, self.device)]

    def layer_views(self, pages: Sequence[Pages], slots: Sequence[SlotPart]) -> list[Any]:
        def view(layer: int) -> Any:
            return lambda pager, slot_N: ToyMemory(slots[0].layer(layer, slot_N), PagedRows(pages[0].layer(layer), pager, TOKENS))

        return [view(layer) for layer in range(self.config.layers)]
