"""Qwen3 in serving: rows through paged keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.common.memory import KeyValueLayer, PagePart, Pages, SlotPart
from zoo.common.serving import ForServing


class Qwen3ForServing(ForServing):
    """Token ids and pages in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    parts = ("keys",)

    def page_parts(self, pages: int, page_size: int) -> list[PagePart]:
        c = self.config
        row = (self.program.torch_dtype, (self.config.kv_heads, self.config.head_dim))
        return [PagePart("keys", c.layers, pages, page_size, {"k": row, "v": row}, self.device)]

    def layer_views(self, pages: Sequence[Pages], slots: Sequence[SlotPart]) -> list[Any]:
        return [KeyValueLayer(pages[0], layer) for layer in range(self.config.layers)]
