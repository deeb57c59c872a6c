"""Qwen3 in training: packed rows, live keys and values, gradients."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.common.memory import PackedMemory
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.training import ForRL
from zoo.qwen3.config import Qwen3Config
from zoo.qwen3.model import Qwen3Model, used_ops
from zoo.qwen3.weights import table


class Qwen3ForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    config_class = Qwen3Config
    table = staticmethod(table)
    used_ops = staticmethod(used_ops)
    model: Qwen3Model

    def __init__(self, config: Qwen3Config, program: Program) -> None:
        nn.Module.__init__(self)
        self.config, self.program = config, program
        self.model = Qwen3Model(config, program)

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: PackedMemory) -> Tensor:
        recompute = self.gradient_checkpointing and self.training
        residual_RD, branch_RD = self.model.embed(ids_R), None
        for i, layer in enumerate(self.model.layers):
            arguments = (residual_RD, branch_RD, rows, memory[i], self.model.rotary)
            residual_RD, branch_RD = checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)
        return self.model.norm(residual_RD, branch_RD)[0]
