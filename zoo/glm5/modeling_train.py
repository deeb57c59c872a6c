"""GLM-5 in training: packed rows, live latent rows, gradients."""

from __future__ import annotations

import re

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.common.latent_memory import PackedLatents
from zoo.common.memory import PackedMemory
from zoo.common.pretrained import Draw
from zoo.common.pretrained import recipe as usual
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.training import ForRL
from zoo.glm5.config import GLMConfig
from zoo.glm5.model import GLMModel, used_ops
from zoo.glm5.weights import table

CONTRIBUTORS = 16


def recipe(published: str, shape: tuple[int, ...], tied: bool) -> Draw:
    """Biases lie near 0: a large one would send every row to the same experts."""
    if re.search(r"e_score_correction_bias$", published):
        return Draw(0.1)
    if published.endswith(".bias"):
        return Draw(0.3)
    return usual(published, shape, tied)


class GLMForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    config_class = GLMConfig
    table = staticmethod(table)
    used_ops = staticmethod(used_ops)
    recipe = staticmethod(recipe)
    contributors = CONTRIBUTORS
    model: GLMModel

    def __init__(self, config: GLMConfig, program: Program) -> None:
        nn.Module.__init__(self)
        self.config, self.program = config, program
        self.model = GLMModel(config, program)

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: PackedMemory) -> Tensor:
        recompute = self.gradient_checkpointing and self.training
        residual_RD, branch_RD, selected_RK = self.model.embed(ids_R), None, None
        for layer in self.model.layers:
            arguments = (residual_RD, branch_RD, selected_RK, rows, PackedLatents(), self.model.rotary)
            residual_RD, branch_RD, selected_RK = checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)
        return self.model.norm(residual_RD, branch_RD)[0]
