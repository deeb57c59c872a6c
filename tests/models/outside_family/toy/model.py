"""The toy's layers: a convolution over carried rows, its output squeezed to one row in four, and a product with block-scaled weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toy.config import ToyConfig
from toy.recall import recall
from toy.weights import BLOCKS
from zoo.common import ops
from zoo.common.layers import Embedding, Linear, RMSNorm, RotaryTable
from zoo.common.masters import computed
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.walk import Branched, CausalModel


def used_ops(config: ToyConfig) -> tuple[str, ...]:
    return ("embed", "rms_norm", "linear", "causal_conv")


class ToyMemory(NamedTuple):
    """What a layer carries in a slot, and its squeezed rows."""

    carry: Any
    squeezed: Any


class BlockLinear(nn.Module):
    """weight [N, K] in FP8 codes with a scale a block; it computes with what they decode to, rounded to the program's dtype."""

    def __init__(self, inputs: int, outputs: int, program: Program) -> None:
        super().__init__()
        scales = BLOCKS.scales((outputs, inputs))
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=BLOCKS.held), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.empty(scales, dtype=torch.float32), requires_grad=False)
        self.program = program

    def forward(self, x_RK: Tensor) -> Tensor:
        weight_NK = BLOCKS.decode(self.weight, self.weight_scale_inv).to(self.program.torch_dtype)
        return ops.linear(x_RK, weight_NK, program=self.program)


class ToyLayer(nn.Module):
    def __init__(self, config: ToyConfig, program: Program) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden, config.eps, program)
        self.inward = Linear(config.hidden, config.channels, program)
        self.conv = nn.Parameter(torch.empty(config.channels, 4, dtype=program.torch_dtype))
        self.outward = BlockLinear(config.channels, config.hidden, program)
        self.program = program

    def forward(self, carry: Branched, rows: Rows, memory: ToyMemory, rotary: RotaryTable) -> Branched:
        x_RD, residual_RD = self.norm(carry.residual_RD, carry.branch_RD)
        mixed_RC = ops.causal_conv(self.inward(x_RD), computed(self, "conv"), memory.carry, rows, program=self.program)
        (history,) = memory.squeezed.append((mixed_RC,), rows)
        return Branched(residual_RD, self.outward(recall(mixed_RC, history, rows, program=self.program)))


class ToyModel(CausalModel):
    def __init__(self, config: ToyConfig, program: Program) -> None:
        super().__init__()
        self.embed = Embedding(config.vocabulary, config.hidden, program)
        self.layers = nn.ModuleList(ToyLayer(config, program) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps, program)
        self.rotary = RotaryTable(config.positions, config.head_dim, 1e4, program)
        self.head = Embedding(config.vocabulary, config.hidden, program)
