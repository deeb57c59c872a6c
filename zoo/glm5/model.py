"""GLM-5: the arithmetic of the layers, once, for every engine. Latent attention over selected tokens, and a mixture of experts.

R rows, D hidden, H heads, C columns of a latent row, V columns of its values, E index width, K selected tokens or experts, X experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.codecs import BlockScaled
from zoo.common.layers import Embedding, Experts, GatedMLP, Linear, RMSNorm, RotaryTable, hold_codes, logits
from zoo.common.masters import computed
from zoo.common.memory import LatentMemory
from zoo.common.ops.biased_route import Choice
from zoo.common.program import Program, split_k
from zoo.common.rows import Rows
from zoo.common.values import has_values, hold_values, values
from zoo.common.walk import CausalModel
from zoo.glm5.config import LATENT_EPS, GLMConfig


def used_ops(config: GLMConfig) -> tuple[str, ...]:
    """Names of the ops that the layers call, for fingerprints."""
    attention = ("rope", "layer_norm", "select", "head_linear", "sparse_attention")
    mixture = ("biased_route", "experts", "combine") if any(config.sparse) else ()
    return ("embed", "rms_norm", "linear", "swiglu", *attention, *mixture)


class LayerNorm(nn.Module):
    """weight and bias [E]."""

    def __init__(self, width: int, program: Program) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=program.torch_dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=program.torch_dtype))
        self.program = program

    def forward(self, x_RE: Tensor) -> Tensor:
        return ops.layer_norm(x_RE, computed(self), computed(self, "bias"), LATENT_EPS, program=self.program)


class KeyWeights(nn.Module):
    """key [E, D] and heads [H, D]: the selector's keys and its heads' weights, one product. Codes of `key` are computed with decoded."""

    def __init__(self, hidden: int, width: int, heads: int, program: Program) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(width, hidden, dtype=program.torch_dtype))
        self.heads = nn.Parameter(torch.empty(heads, hidden, dtype=program.torch_dtype))
        self.k_parts = split_k(width + heads, hidden)
        self.program = program

    def take_codes(self, name: str, codec: BlockScaled, rule: ops.ScaleRule) -> None:
        """The key's weight is codes with scales beside them; rows stay what they are."""
        hold_codes(self, name, codec)
        hold_values(self, name, codec, self.program.torch_dtype)

    def forward(self, x_RD: Tensor) -> Tensor:
        key = values(self, "key") if has_values(self, "key") else computed(self, "key")
        return ops.linear(x_RD, torch.cat([key, computed(self, "heads")]), program=self.program, k_parts=self.k_parts)


class Indexer(nn.Module):
    """Chooses the tokens that a row attends to. Frozen, and it carries no gradient: a choice has none."""

    def __init__(
        self,
        hidden: int,
        query_rank: int,
        heads: int,
        width: int,
        top_k: int,
        program: Program,
        *,
        keys_apart: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.width = width
        self.top_k = top_k
        self.program = program
        self.query = Linear(query_rank, heads * width, program)
        # keys, then the heads' weights: two narrow projections of one input
        self.key_weights: KeyWeights | Linear
        if keys_apart:
            self.key_weights = KeyWeights(hidden, width, heads, program)
        else:
            self.key_weights = Linear(hidden, width + heads, program, k_parts=split_k(width + heads, hidden))
        self.norm = LayerNorm(width, program)

    @torch.no_grad()
    def forward(self, x_RD: Tensor, query_RC: Tensor, rows: Rows, memory: LatentMemory, rotary: RotaryTable) -> Tensor:
        table = rotary.on(x_RD.device)
        q_RHE = self.query(query_RC).unflatten(1, (self.heads, self.width))
        q_RHE = ops.rope(q_RHE, table, rows.positions_R, program=self.program, neighbours=True)
        key_RE, weights_RH = self.key_weights(x_RD).split((self.width, self.heads), dim=1)
        key_RE = ops.rope(self.norm(key_RE)[:, None], table, rows.positions_R, program=self.program, neighbours=True)[:, 0]
        return self.choose(q_RHE, weights_RH, key_RE, rows, memory)

    def choose(self, q_RHE: Tensor, weights_RH: Tensor, key_RE: Tensor, rows: Rows, memory: LatentMemory) -> Tensor:
        keys = memory.append_index(key_RE, rows)
        return ops.select(q_RHE, weights_RH, keys, rows, self.top_k, program=self.program)


class CodedIndexer(Indexer):
    """Index keys are cached as codes with a scale each, and scored as such."""

    def choose(self, q_RHE: Tensor, weights_RH: Tensor, key_RE: Tensor, rows: Rows, memory: LatentMemory) -> Tensor:
        codes_RE, scales_R1 = ops.fp8_quantise(key_RE, ops.FP32_SCALES, program=self.program)
        keys = memory.append_codes(codes_RE, scales_R1, rows)
        return ops.fp8_select(q_RHE, weights_RH, keys, rows, self.top_k, program=self.program)


def coded_index(program: Program) -> bool:
    """Whether the program's selector has codes."""
    return "fp8_select" in program.ops_for("select")


class LatentAttention(nn.Module):
    """Multi-head latent attention in its absorbed form: queries go to the latent rows, which are cached, and not the rows to heads.

    latent_up [H (nope_dim + value_dim), kv_rank]: each head's key rows, then its value rows.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        query_rank: int,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        indexer: Indexer | None,
        program: Program,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query_rank = query_rank
        self.kv_rank = kv_rank
        self.nope_dim = nope_dim
        self.rope_dim = rope_dim
        self.value_dim = value_dim
        self.program = program
        self.scale = (nope_dim + rope_dim) ** -0.5
        self.down = Linear(hidden, query_rank + kv_rank + rope_dim, program)
        self.query_norm = RMSNorm(query_rank, LATENT_EPS, program)
        self.latent_norm = RMSNorm(kv_rank, LATENT_EPS, program)
        self.query_up = Linear(query_rank, heads * (nope_dim + rope_dim), program)
        self.latent_up = nn.Parameter(torch.empty(heads * (nope_dim + value_dim), kv_rank, dtype=program.torch_dtype))
        self.out = Linear(heads * value_dim, hidden, program)
        if indexer is not None:
            self.indexer = indexer

    def take_codes(self, name: str, codec: BlockScaled, rule: ops.ScaleRule) -> None:
        """latent_up is codes, which are computed with decoded: blocks of 128 rows lie across heads."""
        hold_codes(self, name, codec)
        hold_values(self, name, codec, self.program.torch_dtype)

    def forward(
        self, x_RD: Tensor, selected_RK: Tensor | None, rows: Rows, memory: LatentMemory, rotary: RotaryTable
    ) -> tuple[Tensor, Tensor]:
        """(branch rows, the tokens that were read): its own choice, or `selected_RK` where a layer below made it."""
        table = rotary.on(x_RD.device)
        query_RC, latent_RC, rope_RC = self.down(x_RD).split((self.query_rank, self.kv_rank, self.rope_dim), dim=1)
        query_RC = self.query_norm(query_RC)[0]
        latent_RC = self.latent_norm(latent_RC)[0]
        if "indexer" in self._modules:
            selected_RK = self.indexer(x_RD, query_RC, rows, memory, rotary)
        assert selected_RK is not None, "the first layer chooses"
        key_rope_R1C = ops.rope(rope_RC[:, None], table, rows.positions_R, program=self.program, neighbours=True)
        latents = memory.append(torch.cat([latent_RC, key_rope_R1C[:, 0]], 1), rows)
        q_RHE = self.query_up(query_RC).unflatten(1, (self.heads, self.nope_dim + self.rope_dim))
        nope_RHE, rope_RHE = q_RHE.split((self.nope_dim, self.rope_dim), dim=2)
        up = values(self, "latent_up") if has_values(self, "latent_up") else computed(self, "latent_up")
        up_HEC = up.unflatten(0, (self.heads, self.nope_dim + self.value_dim))
        key_up, value_up = up_HEC.split((self.nope_dim, self.value_dim), dim=1)
        absorbed_RHC = ops.head_linear(nope_RHE, key_up.transpose(1, 2), program=self.program)
        turned_RHE = ops.rope(rope_RHE, table, rows.positions_R, program=self.program, neighbours=True)
        q_RHC = torch.cat([absorbed_RHC, turned_RHE], 2)
        o_RHV = ops.sparse_attention(q_RHC, latents, selected_RK, rows, self.kv_rank, self.scale, program=self.program)
        return self.out(ops.head_linear(o_RHV, value_up, program=self.program).flatten(1)), selected_RK


class BiasedRoute(nn.Module):
    """bias [X] is added to the scores that choose a row's experts, and to no weight.

    It is FP32 in every program, hence a unit of its own under FSDP2.
    """

    def __init__(self, experts: int, choice: Choice, program: Program) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(experts, dtype=torch.float32))
        self.choice = choice
        self.program = program

    def forward(self, logits_RX: Tensor) -> tuple[Tensor, Tensor]:
        return ops.biased_route(logits_RX, self.bias, self.choice, program=self.program)


class MixtureOfExperts(nn.Module):
    """The top K of X experts by biased scores, `held` of them this rank's, and a shared expert, the last leaf of the sum."""

    def __init__(
        self, hidden: int, experts: int, held: int, choice: Choice, intermediate: int, shared_intermediate: int, program: Program
    ) -> None:
        super().__init__()
        self.router = logits(hidden, experts, program)
        self.route = BiasedRoute(experts, choice, program)
        self.experts = Experts(held, hidden, intermediate, program)
        self.shared = GatedMLP(hidden, shared_intermediate, program)

    def forward(self, x_RD: Tensor) -> Tensor:
        weights_RK, experts_RK = self.route(self.router(x_RD))
        return self.experts(x_RD, weights_RK, experts_RK, self.shared(x_RD))


class Selected(NamedTuple):
    """What goes from layer to layer: the residual stream, the branch that the next norm adds to it, and the tokens last chosen."""

    residual_RD: Tensor
    branch_RD: Tensor | None
    selected_RK: Tensor | None


class DecoderLayer(nn.Module):
    """Pre-norm block. Its first norm adds the last branch to the residual stream."""

    def __init__(self, hidden: int, eps: float, attention: LatentAttention, mlp: MixtureOfExperts | GatedMLP, program: Program) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden, eps, program)
        self.attention = attention
        self.post_norm = RMSNorm(hidden, eps, program)
        self.mlp = mlp

    def forward(self, carry: Selected, rows: Rows, memory: LatentMemory, rotary: RotaryTable) -> Selected:
        x_RD, residual_RD = self.input_norm(carry.residual_RD, carry.branch_RD)
        branch_RD, selected_RK = self.attention(x_RD, carry.selected_RK, rows, memory, rotary)
        x_RD, residual_RD = self.post_norm(residual_RD, branch_RD)
        return Selected(residual_RD, self.mlp(x_RD), selected_RK)


def _layer(c: GLMConfig, program: Program, full: bool, sparse: bool) -> DecoderLayer:
    chosen_by = CodedIndexer if coded_index(program) else Indexer
    indexer = (
        chosen_by(c.hidden, c.query_rank, c.index_heads, c.index_dim, c.index_top_k, program, keys_apart=c.keys_apart) if full else None
    )
    attention = LatentAttention(c.hidden, c.heads, c.query_rank, c.kv_rank, c.nope_dim, c.rope_dim, c.value_dim, indexer, program)
    mlp: MixtureOfExperts | GatedMLP
    if sparse:
        mlp = MixtureOfExperts(c.hidden, c.whole.experts, c.experts, c.choice, c.expert_intermediate, c.shared_intermediate, program)
    else:
        mlp = GatedMLP(c.hidden, c.intermediate, program)
    return DecoderLayer(c.hidden, c.eps, attention, mlp, program)


class GLMModel(CausalModel):
    """Parameters of a whole model."""

    def __init__(self, config: GLMConfig, program: Program) -> None:
        super().__init__()
        self.embed = Embedding(config.vocabulary, config.hidden, program)
        kinds = zip(config.full, config.sparse, strict=True)
        self.layers = nn.ModuleList(_layer(config, program, full, sparse) for full, sparse in kinds)
        self.norm = RMSNorm(config.hidden, config.eps, program)
        self.rotary = RotaryTable(config.positions, config.rope_dim, config.theta, program)
        if not config.tied:
            self.head = Embedding(config.vocabulary, config.hidden, program)

    def enter(self, ids_R: Tensor) -> Selected:
        return Selected(self.embed(ids_R), None, None)
