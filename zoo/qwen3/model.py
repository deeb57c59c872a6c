"""Qwen3 and Qwen3-MoE: the arithmetic of the layers, once, for every engine.

R rows, D hidden, H query heads, G key heads, E head dim, F intermediate width, X experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.layers import Embedding, Experts, GatedMLP, HeadNormRope, Linear, RMSNorm, RotaryTable
from zoo.common.memory import KeyValueMemory
from zoo.common.program import Program, split_k
from zoo.common.rows import Rows
from zoo.common.walk import Branched, CausalModel
from zoo.qwen3.config import Qwen3Config


def used_ops(config: Qwen3Config) -> tuple[str, ...]:
    """Names of the ops that the layers call, for fingerprints."""
    mlp = ("route", "experts", "combine") if config.experts else ("swiglu",)
    return ("embed", "rms_norm", "linear", "norm_rope", "attention", *mlp)


class Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head before the rotation."""

    def __init__(self, config: Qwen3Config, program: Program) -> None:
        super().__init__()
        heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
        self.scale, self.program = width**-0.5, program
        self.qkv = Linear(config.hidden, (heads + 2 * kv_heads) * width, program)
        self.norm = HeadNormRope(heads, kv_heads, width, config.eps, program)
        self.out = Linear(heads * width, config.hidden, program)

    def forward(self, x_RD: Tensor, rows: Rows, memory: KeyValueMemory, rotary: RotaryTable) -> Tensor:
        q_RHE, k_RGE, v_RGE = self.norm(self.qkv(x_RD), rotary, rows.positions_R)
        history = memory.append(k_RGE, v_RGE, rows)
        return self.out(ops.attention(q_RHE, history, rows, self.scale, program=self.program).flatten(1))


class MixtureOfExperts(nn.Module):
    """The top K of X experts, weighted by their renormalised probabilities."""

    def __init__(self, config: Qwen3Config, program: Program) -> None:
        super().__init__()
        self.router = Linear(
            config.hidden, config.experts, program, out_dtype=torch.float32, k_parts=split_k(config.experts, config.hidden)
        )
        self.experts = Experts(config.experts, config.hidden, config.expert_intermediate, program)
        self.top_k, self.renormalise, self.program = config.experts_per_token, config.renormalise, program

    def forward(self, x_RD: Tensor) -> Tensor:
        weights_RK, experts_RK = ops.route(self.router(x_RD), self.top_k, self.renormalise, program=self.program)
        return self.experts(x_RD, weights_RK, experts_RK)


class DecoderLayer(nn.Module):
    """Pre-norm block. Its first norm adds the last branch to the residual stream."""

    def __init__(self, config: Qwen3Config, program: Program) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden, config.eps, program)
        self.attention = Attention(config, program)
        self.post_norm = RMSNorm(config.hidden, config.eps, program)
        self.mlp = MixtureOfExperts(config, program) if config.experts else GatedMLP(config.hidden, config.intermediate, program)

    def forward(self, carry: Branched, rows: Rows, memory: KeyValueMemory, rotary: RotaryTable) -> Branched:
        x_RD, residual_RD = self.input_norm(carry.residual_RD, carry.branch_RD)
        x_RD, residual_RD = self.post_norm(residual_RD, self.attention(x_RD, rows, memory, rotary))
        return Branched(residual_RD, self.mlp(x_RD))


class Qwen3Model(CausalModel):
    """Parameters of a whole model."""

    def __init__(self, config: Qwen3Config, program: Program) -> None:
        super().__init__()
        self.embed = Embedding(config.vocabulary, config.hidden, program)
        self.layers = nn.ModuleList(DecoderLayer(config, program) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps, program)
        self.rotary = RotaryTable(config.positions, config.head_dim, config.theta, program)
        if not config.tied:
            self.head = Embedding(config.vocabulary, config.hidden, program)
