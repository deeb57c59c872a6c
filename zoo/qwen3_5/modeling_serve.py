"""Qwen3.5 in serving: rows through paged keys and values, and states that live in slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.common.memory import CarrySlots, DeltaLayer, DeltaSlots, KeyValueLayer, PagePart, Pages, SlotPart
from zoo.common.serving import ForServing


class Qwen35ForServing(ForServing):
    """Token ids, pages and slots in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    parts = ("keys", "delta", "carry")

    def page_parts(self, pages: int, page_size: int) -> list[PagePart]:
        c = self.config
        row = (self.program.torch_dtype, (self.config.kv_heads, self.config.head_dim))
        return [PagePart("keys", sum(c.full), pages, page_size, {"k": row, "v": row}, self.device)]

    def slot_parts(self, slots: int) -> list[SlotPart]:
        c = self.config
        dtype = self.program.torch_dtype
        layers = c.layers - sum(c.full)
        states = DeltaSlots(layers, slots, c.key_heads, c.value_heads, c.key_dim, c.value_dim, dtype, self.device)
        return [states, CarrySlots(layers, slots, c.conv_channels, dtype, self.device)]

    def layer_views(self, pages: Sequence[Pages], slots: Sequence[SlotPart]) -> list[Any]:
        """Attention layers stand one after another in the pages, the others in the slots."""
        full = self.config.full
        states, carries = slots
        return [
            KeyValueLayer(pages[0], sum(full[:layer])) if attends else DeltaLayer(states, carries, layer - sum(full[:layer]))
            for layer, attends in enumerate(full)
        ]
