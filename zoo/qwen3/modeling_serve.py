"""Qwen3 in serving: rows through paged keys and values."""

from __future__ import annotations

from torch import Tensor, nn

from zoo.common.memory import PagedMemory
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.qwen3.config import Qwen3Config
from zoo.qwen3.model import Qwen3Model, used_ops
from zoo.qwen3.weights import table

PAGE_SIZE = 128  # FlashAttention 4's key tile at head dim 128, its fastest page


class Qwen3ForServing(ForServing):
    """Token ids and pages in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    config_class = Qwen3Config
    memory_class = PagedMemory
    table = staticmethod(table)
    used_ops = staticmethod(used_ops)
    model: Qwen3Model

    def __init__(self, config: Qwen3Config, program: Program) -> None:
        nn.Module.__init__(self)
        self.config, self.program = config, program
        self.model = Qwen3Model(config, program)

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> PagedMemory:
        """Pages are all that a sequence holds: `slots` says nothing."""
        c = self.config
        device = self.model.embed.weight.device
        page = PAGE_SIZE if page_size is None else page_size
        return PagedMemory(c.layers, pages, page, c.kv_heads, c.head_dim, self.program.torch_dtype, device)

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: PagedMemory, page_table_NB: Tensor) -> Tensor:
        layers = memory.view(page_table_NB)
        residual_RD, branch_RD = self.model.embed(ids_R), None
        for layer, layer_memory in zip(self.model.layers, layers, strict=True):
            residual_RD, branch_RD = layer(residual_RD, branch_RD, rows, layer_memory, self.model.rotary)
        return self.model.norm(residual_RD, branch_RD)[0]
