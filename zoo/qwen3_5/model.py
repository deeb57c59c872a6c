"""Qwen3.5 and 3.6: the arithmetic of the layers, once, for every engine. Three Gated DeltaNet layers, then one of full attention.

R rows, D hidden, H query heads, G key heads, E head dim; in Gated DeltaNet H key heads of K, V value heads of E; C channels;
F intermediate width, X experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.layers import Embedding, Experts, GatedMLP, HeadNormRope, Linear, RMSNorm, RotaryTable, logits
from zoo.common.masters import computed
from zoo.common.memory import DeltaMemory, KeyValueMemory
from zoo.common.program import Program
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

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float, program: Program) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.program = program
        self.qkv = Linear(hidden, 2 * (heads + kv_heads) * head_dim, program)
        self.norm = HeadNormRope(heads, kv_heads, head_dim, eps, program, query_width=2 * head_dim, zero_centred=True)
        self.out = Linear(heads * head_dim, hidden, program)

    def forward(self, x_RD: Tensor, rows: Rows, memory: KeyValueMemory, rotary: RotaryTable) -> Tensor:
        qkv_RC = self.qkv(x_RD)
        q_RHE, k_RGE, v_RGE = self.norm(qkv_RC, rotary, rows.positions_R)
        gate_RHE = qkv_RC[:, : 2 * self.heads * self.head_dim].unflatten(1, (self.heads, -1))[..., self.head_dim :]
        history = memory.append(k_RGE, v_RGE, rows)
        o_RHE = ops.attention(q_RHE, history, rows, self.scale, program=self.program)
        return self.out(ops.output_gate(o_RHE, gate_RHE, program=self.program).flatten(1))


class DeltaGate(nn.Module):
    """Decay and strength of each row's update. a_log [V] and dt_bias [V] are FP32 in every program: published so, or widened at load."""

    def __init__(self, value_heads: int, program: Program) -> None:
        super().__init__()
        self.a_log = nn.Parameter(torch.empty(value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(value_heads, dtype=torch.float32))
        self.program = program

    def forward(self, a_RV: Tensor, b_RV: Tensor) -> tuple[Tensor, Tensor]:
        return ops.delta_gate(a_RV, b_RV, self.a_log, self.dt_bias, program=self.program)


class GatedRMSNorm(nn.Module):
    """The norm of each value head, times silu of its gate. weight [E] is FP32, as DeltaGate's."""

    def __init__(self, value_dim: int, eps: float, program: Program) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(value_dim, dtype=torch.float32))
        self.eps = eps
        self.program = program

    def forward(self, o_RVE: Tensor, z_RVE: Tensor) -> Tensor:
        return ops.gated_rms_norm(o_RVE, z_RVE, self.weight, self.eps, program=self.program)


class GatedDeltaNet(nn.Module):
    """A recurrent layer: a state per value head, decayed and corrected by each row.

    One projection makes queries, keys and values, output gates, strengths and decays; `gates_apart`: another makes the last two.
    """

    def __init__(
        self,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        eps: float,
        program: Program,
        *,
        gates_apart: bool = False,
    ) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.value_heads = value_heads
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.program = program
        values = value_heads * value_dim
        channels = 2 * key_heads * key_dim + values
        self.widths = (channels, values, value_heads, value_heads)
        if gates_apart:
            self.qkvz = Linear(hidden, channels + values, program)
            self.ba = Linear(hidden, 2 * value_heads, program)
        else:
            self.qkvzba = Linear(hidden, sum(self.widths), program)
        self.gates_apart = gates_apart
        self.conv = nn.Parameter(torch.empty(channels, 1, CONV_WIDTH, dtype=program.torch_dtype))
        self.gate = DeltaGate(value_heads, program)
        self.norm = GatedRMSNorm(value_dim, eps, program)
        self.out = Linear(values, hidden, program)

    def forward(self, x_RD: Tensor, rows: Rows, memory: DeltaMemory, rotary: RotaryTable) -> Tensor:
        qkv_RC, z_RC, b_RV, a_RV = self._projected(x_RD)
        mixed_RC = ops.causal_conv(qkv_RC, computed(self, "conv").squeeze(1), memory.carry, rows, program=self.program)
        keys = 2 * self.key_heads * self.key_dim
        qk_RHK = ops.l2_norm(mixed_RC[:, :keys].unflatten(1, (2 * self.key_heads, self.key_dim)), program=self.program)
        q_RHK, k_RHK = qk_RHK.split(self.key_heads, dim=1)
        v_RVE = mixed_RC[:, keys:].unflatten(1, (self.value_heads, self.value_dim))
        log_decay_RV, beta_RV = self.gate(a_RV, b_RV)
        o_RVE = ops.gated_delta(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, memory.state, rows, program=self.program)
        z_RVE = z_RC.unflatten(1, (self.value_heads, self.value_dim))
        return self.out(self.norm(o_RVE, z_RVE).flatten(1))

    def _projected(self, x_RD: Tensor) -> tuple[Tensor, ...]:
        if not self.gates_apart:
            return self.qkvzba(x_RD).split(self.widths, dim=1)
        return (*self.qkvz(x_RD).split(self.widths[:2], dim=1), *self.ba(x_RD).split(self.widths[2:], dim=1))


class MixtureOfExperts(nn.Module):
    """The top K of X experts, `held` of them this rank's, and a shared expert with a gate of its own, the last leaf of the sum."""

    def __init__(
        self, hidden: int, experts: int, held: int, top_k: int, intermediate: int, shared_intermediate: int, program: Program
    ) -> None:
        super().__init__()
        self.router = logits(hidden, experts, program)
        self.experts = Experts(held, hidden, intermediate, program)
        self.shared = GatedMLP(hidden, shared_intermediate, program)
        self.shared_gate = logits(hidden, 1, program)
        self.top_k = top_k
        self.program = program

    def forward(self, x_RD: Tensor) -> Tensor:
        weights_RK, experts_RK = ops.route(self.router(x_RD), self.top_k, True, program=self.program)
        shared_RD = ops.output_gate(self.shared(x_RD), self.shared_gate(x_RD), program=self.program)
        return self.experts(x_RD, weights_RK, experts_RK, shared_RD)


class DecoderLayer(nn.Module):
    """Pre-norm block. Its first norm adds the last branch to the residual stream."""

    def __init__(
        self, hidden: int, eps: float, mixer: Attention | GatedDeltaNet, mlp: MixtureOfExperts | GatedMLP, program: Program
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden, eps, program, zero_centred=True)
        self.mixer = mixer
        self.post_norm = RMSNorm(hidden, eps, program, zero_centred=True)
        self.mlp = mlp

    def forward(self, carry: Branched, rows: Rows, memory: KeyValueMemory | DeltaMemory, rotary: RotaryTable) -> Branched:
        x_RD, residual_RD = self.input_norm(carry.residual_RD, carry.branch_RD)
        x_RD, residual_RD = self.post_norm(residual_RD, self.mixer(x_RD, rows, memory, rotary))
        return Branched(residual_RD, self.mlp(x_RD))


def _layer(c: Qwen35Config, program: Program, full: bool) -> DecoderLayer:
    mixer: Attention | GatedDeltaNet
    if full:
        mixer = Attention(c.hidden, c.heads, c.kv_heads, c.head_dim, c.eps, program)
    else:
        mixer = GatedDeltaNet(c.hidden, c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.eps, program, gates_apart=c.gates_apart)
    mlp: MixtureOfExperts | GatedMLP
    if c.experts:
        mlp = MixtureOfExperts(
            c.hidden, c.whole.experts, c.experts, c.experts_per_token, c.expert_intermediate, c.shared_intermediate, program
        )
    else:
        mlp = GatedMLP(c.hidden, c.intermediate, program)
    return DecoderLayer(c.hidden, c.eps, mixer, mlp, program)


class Qwen35Model(CausalModel):
    """Parameters of a whole model."""

    def __init__(self, config: Qwen35Config, program: Program) -> None:
        super().__init__()
        self.embed = Embedding(config.vocabulary, config.hidden, program)
        self.layers = nn.ModuleList(_layer(config, program, full) for full in config.full)
        self.norm = RMSNorm(config.hidden, config.eps, program, zero_centred=True)
        self.rotary = RotaryTable(config.positions, config.rope_dim, config.theta, program)
        if not config.tied:
            self.head = Embedding(config.vocabulary, config.hidden, program)
