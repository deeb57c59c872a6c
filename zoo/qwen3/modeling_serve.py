"""Qwen3 in serving: rows through paged keys and values."""

from __future__ import annotations

from zoo.common.memory import PagedMemory
from zoo.common.serving import ForServing


class Qwen3ForServing(ForServing):
    """Token ids and pages in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    memory_class = PagedMemory

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> PagedMemory:
        """Pages are all that a sequence holds: `slots` says nothing."""
        c = self.config
        device = self.model.embed.weight.device
        page = self.family.page_size(c) if page_size is None else page_size
        return PagedMemory(c.layers, pages, page, c.kv_heads, c.head_dim, self.program.torch_dtype, device)
