"""Qwen3.5 in serving: rows through paged keys and values, and states that live in slots."""

from __future__ import annotations

from torch import Tensor, nn

from zoo.common.delta_memory import DeltaMemory
from zoo.common.hybrid_memory import HybridMemory
from zoo.common.memory import PagedMemory
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.qwen3_5.config import Qwen35Config
from zoo.qwen3_5.model import Qwen35Model, used_ops
from zoo.qwen3_5.modeling_train import recipe
from zoo.qwen3_5.weights import table

SEQUENCES = 64  # slots of a memory by default


class Qwen35ForServing(ForServing):
    """Token ids, pages and slots in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    config_class = Qwen35Config
    memory_class = HybridMemory
    table = staticmethod(table)
    used_ops = staticmethod(used_ops)
    recipe = staticmethod(recipe)
    model: Qwen35Model

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        nn.Module.__init__(self)
        self.config, self.program = config, program
        self.model = Qwen35Model(config, program)

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> HybridMemory:
        """A page of 80 at head dim 256 is FlashAttention 4's key tile there, the only one that it pages."""
        c, dtype = self.config, self.program.torch_dtype
        device = self.model.embed.weight.device
        page = (80 if c.head_dim > 128 else 128) if page_size is None else page_size
        paged = PagedMemory(sum(c.full), pages, page, c.kv_heads, c.head_dim, dtype, device)
        return HybridMemory(c.full, paged, self.recurrent_memory((SEQUENCES if slots is None else slots) + 1))

    def recurrent_memory(self, slots: int) -> DeltaMemory:
        """Slots of the recurrent layers alone, slot 0 for padding."""
        c, device = self.config, self.model.embed.weight.device
        return DeltaMemory(
            c.layers - sum(c.full), slots, c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.conv_channels,
            self.program.torch_dtype, device,
        )  # fmt: skip

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: HybridMemory, page_table_NB: Tensor) -> Tensor:
        layers = memory.view(page_table_NB)
        residual_RD, branch_RD = self.model.embed(ids_R), None
        for layer, layer_memory in zip(self.model.layers, layers, strict=True):
            residual_RD, branch_RD = layer(residual_RD, branch_RD, rows, layer_memory, self.model.rotary)
        return self.model.norm(residual_RD, branch_RD)[0]
