"""Qwen3 and Qwen3-MoE: the arithmetic of the layers, once, for every engine.

R rows, D hidden, H query heads, G key heads, E head dim, F intermediate width, X experts, K experts per token.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.common import ops
from zoo.common.layers import Embedding, Experts, GatedMLP, HeadNormRope, Linear, RMSNorm, RotaryTable, logits
from zoo.common.memory import KeyValueMemory
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.walk import Branched, CausalModel
from zoo.qwen3.config import Qwen3Config


def used_ops(config: Qwen3Config) -> tuple[str, ...]:
    """Names of the ops that the layers call, for fingerprints."""
    mlp = ("route", "experts", "combine") if config.experts else ("swiglu",)
    return ("embed", "rms_norm", "linear", "norm_rope", "attention", *mlp)


class Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head before the rotation."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float, program: Program) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        self.program = program
        self.qkv = Linear(hidden, (heads + 2 * kv_heads) * head_dim, program)
        self.norm = HeadNormRope(heads, kv_heads, head_dim, eps, program)
        self.out = Linear(heads * head_dim, hidden, program)

    def forward(self, x_RD: Tensor, rows: Rows, memory: KeyValueMemory, rotary: RotaryTable) -> Tensor:
        q_RHE, k_RGE, v_RGE = self.norm(self.qkv(x_RD), rotary, rows.positions_R)
        history = memory.append(k_RGE, v_RGE, rows)
        return self.out(ops.attention(q_RHE, history, rows, self.scale, program=self.program).flatten(1))


class MixtureOfExperts(nn.Module):
    """The top K of X experts, weighted by their renormalised probabilities. `held` of the X are this rank's."""

    def __init__(self, hidden: int, experts: int, held: int, top_k: int, intermediate: int, renormalise: bool, program: Program) -> None:
        super().__init__()
        self.router = logits(hidden, experts, program)
        self.experts = Experts(held, hidden, intermediate, program)
        self.top_k = top_k
        self.renormalise = renormalise
        self.program = program

    def forward(self, x_RD: Tensor) -> Tensor:
        weights_RK, experts_RK = ops.route(self.router(x_RD), self.top_k, self.renormalise, program=self.program)
        return self.experts(x_RD, weights_RK, experts_RK)


class DecoderLayer(nn.Module):
    """Pre-norm block. Its first norm adds the last branch to the residual stream."""

    def __init__(self, hidden: int, eps: float, attention: Attention, mlp: MixtureOfExperts | GatedMLP, program: Program) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden, eps, program)
        self.attention = attention
        self.post_norm = RMSNorm(hidden, eps, program)
        self.mlp = mlp

    def forward(self, carry: Branched, rows: Rows, memory: KeyValueMemory, rotary: RotaryTable) -> Branched:
        x_RD, residual_RD = self.input_norm(carry.residual_RD, carry.branch_RD)
        x_RD, residual_RD = self.post_norm(residual_RD, self.attention(x_RD, rows, memory, rotary))
        return Branched(residual_RD, self.mlp(x_RD))


def _layer(c: Qwen3Config, program: Program) -> DecoderLayer:
    attention = Attention(c.hidden, c.heads, c.kv_heads, c.head_dim, c.eps, program)
    mlp: MixtureOfExperts | GatedMLP
    if c.experts:
        mlp = MixtureOfExperts(c.hidden, c.whole.experts, c.experts, c.experts_per_token, c.expert_intermediate, c.renormalise, program)
    else:
        mlp = GatedMLP(c.hidden, c.intermediate, program)
    return DecoderLayer(c.hidden, c.eps, attention, mlp, program)


class Qwen3Model(CausalModel):
    """Parameters of a whole model."""

    def __init__(self, config: Qwen3Config, program: Program) -> None:
        super().__init__()
        self.embed = Embedding(config.vocabulary, config.hidden, program)
        self.layers = nn.ModuleList(_layer(config, program) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps, program)
        self.rotary = RotaryTable(config.positions, config.head_dim, config.theta, program)
        if not config.tied:
            self.head = Embedding(config.vocabulary, config.hidden, program)
