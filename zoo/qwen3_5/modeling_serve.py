"""Qwen3.5 in serving: rows through paged keys and values, and states that live in slots."""

from __future__ import annotations

from zoo.common.delta_memory import DeltaMemory
from zoo.common.hybrid_memory import HybridMemory
from zoo.common.memory import PagedMemory
from zoo.common.serving import ForServing

SEQUENCES = 64  # slots of a memory by default


class Qwen35ForServing(ForServing):
    """Token ids, pages and slots in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    memory_class = HybridMemory

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> HybridMemory:
        """`slots` sequences may run at once, SEQUENCES by default."""
        c, dtype = self.config, self.program.torch_dtype
        device = self.model.embed.weight.device
        page = self.family.page_size(c) if page_size is None else page_size
        paged = PagedMemory(sum(c.full), pages, page, c.kv_heads, c.head_dim, dtype, device)
        return HybridMemory(c.full, paged, self.recurrent_memory((SEQUENCES if slots is None else slots) + 1))

    def recurrent_memory(self, slots: int) -> DeltaMemory:
        """Slots of the recurrent layers alone, slot 0 for padding."""
        c, device = self.config, self.model.embed.weight.device
        return DeltaMemory(
            c.layers - sum(c.full), slots, c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.conv_channels,
            self.program.torch_dtype, device,
        )  # fmt: skip
