"""Qwen3.5 and 3.6: the arithmetic of the layers, once, for every engine. Three Gated DeltaNet layers, then one of full attention.

R rows, D hidden, H query heads, G key heads, E head dim; in Gated DeltaNet H key heads of K, V value heads of E; C channels;
F intermediate width, X experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.layers import Embedding, Experts, GatedMLP, HeadNormRope, Linear, RMSNorm, RotaryTable
from zoo.common.memory import DeltaMemory, KeyValueMemory
from zoo.common.program import Program, split_k
from zoo.common.rows import Rows
from zoo.common.walk import Branched, CausalModel
from zoo.qwen3_5.config import CONV_WIDTH, Qwen35Config


def used_ops(config: Qwen35Config) -> tuple[str, ...]:
    """Names of the ops that the layers call, for fingerprints."""
    attention = ("norm_rope", "attention", "output_gate")
    delta = ("causal_conv", "l2_norm", "delta_gate", "gated_delta", "gated_rms_norm")
    mixture = ("route", "experts", "combine") if config.experts else ()
    return ("embed", "rms_norm", "linear", "swiglu", *attention, *delta, *mixture)


class Attention(nn.Module):
    """Grouped-query attention; a query head's row holds [query | gate], part of each head is rotated, the output is gated."""

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        super().__init__()
        heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
        self.scale, self.program, self.heads, self.width = width**-0.5, program, heads, width
        self.qkv = Linear(config.hidden, 2 * (heads + kv_heads) * width, program)
        self.norm = HeadNormRope(heads, kv_heads, width, config.eps, program, query_width=2 * width, zero_centred=True)
        self.out = Linear(heads * width, config.hidden, program)

    def forward(self, x_RD: Tensor, rows: Rows, memory: KeyValueMemory, rotary: RotaryTable) -> Tensor:
        qkv_RC = self.qkv(x_RD)
        q_RHE, k_RGE, v_RGE = self.norm(qkv_RC, rotary, rows.positions_R)
        gate_RHE = qkv_RC[:, : 2 * self.heads * self.width].unflatten(1, (self.heads, -1))[..., self.width :]
        history = memory.append(k_RGE, v_RGE, rows)
        o_RHE = ops.attention(q_RHE, history, rows, self.scale, program=self.program)
        return self.out(ops.output_gate(o_RHE, gate_RHE, program=self.program).flatten(1))


class DeltaGate(nn.Module):
    """Decay and strength of each row's update. a_log [V] and dt_bias [V] are FP32 in every program: published so, or widened at load."""

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        super().__init__()
        self.a_log = nn.Parameter(torch.empty(config.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads, dtype=torch.float32))
        self.program = program

    def forward(self, a_RV: Tensor, b_RV: Tensor) -> tuple[Tensor, Tensor]:
        return ops.delta_gate(a_RV, b_RV, self.a_log, self.dt_bias, program=self.program)


class GatedRMSNorm(nn.Module):
    """The norm of each value head, times silu of its gate. weight [E] is FP32, as DeltaGate's."""

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.value_dim, dtype=torch.float32))
        self.eps, self.program = config.eps, program

    def forward(self, o_RVE: Tensor, z_RVE: Tensor) -> Tensor:
        return ops.gated_rms_norm(o_RVE, z_RVE, self.weight, self.eps, program=self.program)


class GatedDeltaNet(nn.Module):
    """A recurrent layer: a state per value head, decayed and corrected by each row."""

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        super().__init__()
        self.key_heads, self.key_dim = config.key_heads, config.key_dim
        self.value_heads, self.value_dim = config.value_heads, config.value_dim
        self.program = program
        values = config.value_heads * config.value_dim
        self.widths = (config.conv_channels, values, config.value_heads, config.value_heads)
        self.qkvzba = Linear(config.hidden, sum(self.widths), program)
        self.conv = nn.Parameter(torch.empty(config.conv_channels, 1, CONV_WIDTH, dtype=program.torch_dtype))
        self.gate, self.norm = DeltaGate(config, program), GatedRMSNorm(config, program)
        self.out = Linear(values, config.hidden, program)

    def forward(self, x_RD: Tensor, rows: Rows, memory: DeltaMemory, rotary: RotaryTable) -> Tensor:
        qkv_RC, z_RC, b_RV, a_RV = self.qkvzba(x_RD).split(self.widths, dim=1)
        mixed_RC = ops.causal_conv(qkv_RC, self.conv.squeeze(1), memory.carry, rows, program=self.program)
        keys = 2 * self.key_heads * self.key_dim
        qk_RHK = ops.l2_norm(mixed_RC[:, :keys].unflatten(1, (2 * self.key_heads, self.key_dim)), program=self.program)
        q_RHK, k_RHK = qk_RHK.split(self.key_heads, dim=1)
        v_RVE = mixed_RC[:, keys:].unflatten(1, (self.value_heads, self.value_dim))
        log_decay_RV, beta_RV = self.gate(a_RV, b_RV)
        o_RVE = ops.gated_delta(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, memory.state, rows, program=self.program)
        z_RVE = z_RC.unflatten(1, (self.value_heads, self.value_dim))
        return self.out(self.norm(o_RVE, z_RVE).flatten(1))


class MixtureOfExperts(nn.Module):
    """The top K of X experts, and a shared expert with a gate of its own, the last leaf of the sum."""

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        super().__init__()
        hidden = config.hidden
        self.router = Linear(hidden, config.experts, program, out_dtype=torch.float32, k_parts=split_k(config.experts, hidden))
        self.experts = Experts(config.experts, hidden, config.expert_intermediate, program)
        self.shared = GatedMLP(hidden, config.shared_intermediate, program)
        self.shared_gate = Linear(hidden, 1, program, out_dtype=torch.float32, k_parts=split_k(1, hidden))
        self.top_k, self.program = config.experts_per_token, program

    def forward(self, x_RD: Tensor) -> Tensor:
        weights_RK, experts_RK = ops.route(self.router(x_RD), self.top_k, True, program=self.program)
        shared_RD = ops.output_gate(self.shared(x_RD), self.shared_gate(x_RD), program=self.program)
        return self.experts(x_RD, weights_RK, experts_RK, shared_RD)


class DecoderLayer(nn.Module):
    """Pre-norm block. Its first norm adds the last branch to the residual stream."""

    def __init__(self, config: Qwen35Config, program: Program, full: bool) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden, config.eps, program, zero_centred=True)
        self.mixer = Attention(config, program) if full else GatedDeltaNet(config, program)
        self.post_norm = RMSNorm(config.hidden, config.eps, program, zero_centred=True)
        self.mlp = MixtureOfExperts(config, program) if config.experts else GatedMLP(config.hidden, config.intermediate, program)

    def forward(self, carry: Branched, rows: Rows, memory: KeyValueMemory | DeltaMemory, rotary: RotaryTable) -> Branched:
        x_RD, residual_RD = self.input_norm(carry.residual_RD, carry.branch_RD)
        x_RD, residual_RD = self.post_norm(residual_RD, self.mixer(x_RD, rows, memory, rotary))
        return Branched(residual_RD, self.mlp(x_RD))


class Qwen35Model(CausalModel):
    """Parameters of a whole model."""

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        super().__init__()
        self.embed = Embedding(config.vocabulary, config.hidden, program)
        self.layers = nn.ModuleList(DecoderLayer(config, program, full) for full in config.full)
        self.norm = RMSNorm(config.hidden, config.eps, program, zero_centred=True)
        self.rotary = RotaryTable(config.positions, config.rope_dim, config.theta, program)
        if not config.tied:
            self.head = Embedding(config.vocabulary, config.hidden, program)
