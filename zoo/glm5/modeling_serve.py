"""GLM-5 in serving: rows through paged latent rows and index keys."""

from __future__ import annotations

from torch import Tensor, nn

from zoo.common.latent_memory import LatentMemory
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.glm5.config import GLMConfig
from zoo.glm5.model import GLMModel, used_ops
from zoo.glm5.modeling_train import CONTRIBUTORS, recipe
from zoo.glm5.weights import table

PAGE_SIZE = 64


class GLMForServing(ForServing):
    """Token ids and pages in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    config_class = GLMConfig
    memory_class = LatentMemory
    table = staticmethod(table)
    used_ops = staticmethod(used_ops)
    recipe = staticmethod(recipe)
    contributors = CONTRIBUTORS
    model: GLMModel

    def __init__(self, config: GLMConfig, program: Program) -> None:
        nn.Module.__init__(self)
        self.config, self.program = config, program
        self.model = GLMModel(config, program)

    @property
    def captured_length(self) -> int:
        """Tokens of a sequence in a captured prefill at most: as many as a row reads, so that there is nothing to choose."""
        return min(self.config.index_top_k, self.config.positions) if self.program.name == "aligned" else 0

    @property
    def takes_any_page(self) -> bool:
        return True

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> LatentMemory:
        """Pages are all that a sequence holds: `slots` says nothing."""
        c = self.config
        page = PAGE_SIZE if page_size is None else page_size
        return LatentMemory(c.full, pages, page, c.cached, c.index_dim, self.program.torch_dtype, self.model.embed.weight.device)

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: LatentMemory, page_table_NB: Tensor) -> Tensor:
        layers = memory.view(page_table_NB)
        residual_RD, branch_RD, selected_RK = self.model.embed(ids_R), None, None
        for layer, layer_memory in zip(self.model.layers, layers, strict=True):
            residual_RD, branch_RD, selected_RK = layer(residual_RD, branch_RD, selected_RK, rows, layer_memory, self.model.rotary)
        return self.model.norm(residual_RD, branch_RD)[0]
