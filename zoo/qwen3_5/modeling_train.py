"""Qwen3.5 in training: packed rows, live keys and values, states from zero, gradients."""

from __future__ import annotations

import re

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.common.delta_memory import DeltaLayer, PackedDelta
from zoo.common.memory import PackedMemory
from zoo.common.pretrained import Draw
from zoo.common.pretrained import recipe as usual
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.training import ForRL
from zoo.qwen3_5.config import Qwen35Config
from zoo.qwen3_5.model import Qwen35Model, used_ops
from zoo.qwen3_5.weights import table


def recipe(published: str, shape: tuple[int, ...], tied: bool) -> Draw:
    """Zero-centred norms lie near 0; decays spread from about 0.7 to 0.99 a row."""
    if published.endswith("A_log"):
        return Draw(0.7, 0.5)
    if published.endswith("dt_bias"):
        return Draw(1.0, -3.0)
    if re.search(r"norm", published) and "linear_attn" not in published:
        return Draw(0.1, 0.0)
    return usual(published, shape, tied)


class Qwen35ForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    config_class = Qwen35Config
    table = staticmethod(table)
    used_ops = staticmethod(used_ops)
    recipe = staticmethod(recipe)
    model: Qwen35Model

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        nn.Module.__init__(self)
        self.config, self.program = config, program
        self.model = Qwen35Model(config, program)

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: PackedMemory) -> Tensor:
        recompute = self.gradient_checkpointing and self.training
        fresh = DeltaLayer(PackedDelta(), PackedDelta())
        residual_RD, branch_RD = self.model.embed(ids_R), None
        for i, (layer, full) in enumerate(zip(self.model.layers, self.config.full, strict=True)):
            arguments = (residual_RD, branch_RD, rows, memory[i] if full else fresh, self.model.rotary)
            residual_RD, branch_RD = checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)
        return self.model.norm(residual_RD, branch_RD)[0]
