"""DeepSeek-V4: the arithmetic of the layers, once, for every engine. Mixed residual streams, attention over a window and over compressed
rows, and a mixture of experts that a table or a router chooses.

R rows, S streams, D hidden, H heads, E columns of a head, C columns of other rows, K chosen rows or experts, X experts, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.codecs import BlockScaled
from zoo.common.history import OpenWindows, WholeWindows, WindowedRows
from zoo.common.layers import Embedding, Experts, GatedMLP, Linear, PackedExperts, RMSNorm, RotaryTable, hold_codes, logits
from zoo.common.masters import computed
from zoo.common.memory import CompressedMemory
from zoo.common.ops.compress.windows import first_positions
from zoo.common.program import Program, split_k
from zoo.common.rows import Rows
from zoo.common.values import has_values, hold_values, values
from zoo.common.walk import CausalModel
from zoo.deepseek_v4.config import SPARSE, WINDOW, DeepseekV4Config

NAMES = {SPARSE: "csa"}  # of compressed rows; the others are "hca"


def used_ops(config: DeepseekV4Config) -> tuple[str, ...]:
    """Names of the ops that the layers call, for fingerprints."""
    kinds = set(config.kinds_of_layers)
    compressed = ("compress",) if kinds - {WINDOW} else ()
    chosen = ("hadamard", "compressed_select") if SPARSE in kinds else ()
    routes = (*(("hash_route",) if any(config.hashed) else ()), *(("softplus_route",) if not all(config.hashed) else ()))
    streams = ("hyper_pre", "hyper_post", "hyper_head")
    attention = ("tail_rope", "code_round", "compressed_attention", "head_linear")
    return ("embed", "rms_norm", "linear", "swiglu", "experts", "combine", *streams, *attention, *compressed, *chosen, *routes)


class Rotations(nn.Module):
    """Two tables: of layers that read their window alone, and of layers with compressed rows."""

    def __init__(self, config: DeepseekV4Config, program: Program) -> None:
        super().__init__()
        width, theta, compressed_theta, yarn = config.rotation
        self.main = RotaryTable(config.positions, width, theta, program)
        self.compressed = RotaryTable(config.positions, width, compressed_theta, program, yarn)


class WideNorm(RMSNorm):
    """Its weight is FP32 in every program, hence a unit of its own under FSDP2."""

    def __init__(self, width: int, eps: float, program: Program) -> None:
        super().__init__(width, eps, program, dtype=torch.float32)


class HyperConnection(nn.Module):
    """fn [(2 + S) S, S D], base and scale in FP32: the streams collapse into a branch's input and are mixed behind the branch."""

    def __init__(self, streams: int, hidden: int, mixing: ops.Sinkhorn, program: Program) -> None:
        super().__init__()
        mixed = (2 + streams) * streams
        self.fn = nn.Parameter(torch.empty(mixed, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(mixed, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        self.mixing = mixing
        self.program = program

    def forward(self, streams_RSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_RD, post_RS, comb_RSS = ops.hyper_pre(streams_RSD, self.fn, self.base, self.scale, self.mixing, program=self.program)
        return x_RD, post_RS, comb_RSS


class HyperHead(nn.Module):
    """fn [S, S D], base and scale in FP32: the streams collapse into one behind the last layer."""

    def __init__(self, streams: int, hidden: int, mixing: ops.Sinkhorn, program: Program) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.empty(streams, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(streams, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.mixing = mixing
        self.program = program

    def forward(self, streams_RSD: Tensor) -> Tensor:
        how = (self.mixing.eps, self.mixing.floor)
        return ops.hyper_head(streams_RSD, self.fn, self.base, self.scale, *how, program=self.program)


class CachedRows(nn.Module):
    """Rows of keys and values as they are cached: the columns that don't turn as FP8 codes hold them, where the program has them so."""

    def __init__(self, width: int, turned: int, program: Program) -> None:
        super().__init__()
        self.still = width - turned
        self.coded = bool(program.ops_for("code_round")) and self.still > 0
        self.program = program

    def forward(self, x_RE: Tensor) -> Tensor:
        return ops.code_round(x_RE, self.still, ops.FP8_ROWS, program=self.program) if self.coded else x_RE


class IndexRows(nn.Module):
    """Queries and keys of an index: turned until all columns are alike, then as FP4 codes hold them, where the program has them so."""

    def __init__(self, width: int, program: Program) -> None:
        super().__init__()
        self.coded = bool(program.ops_for("hadamard"))
        if self.coded and width & (width - 1):
            raise ValueError(f"deepseek_v4: index_head_dim must be a power of two, it is {width}: its rows are turned by a Hadamard matrix")
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        if not self.coded:
            return x
        return ops.code_round(ops.hadamard(x, program=self.program), x.shape[-1], ops.FP4_INDEX, program=self.program)


class Pool(nn.Module):
    """ape [W, C] by the position in a window, FP32 in every program."""

    def __init__(self, tokens: int, columns: int, width: int, program: Program) -> None:
        super().__init__()
        self.ape = nn.Parameter(torch.empty(tokens, columns, dtype=torch.float32))
        self.width = width
        self.program = program

    def forward(self, rows_RC: Tensor, history: OpenWindows | WholeWindows, rows: Rows) -> Tensor:
        return ops.compress(rows_RC, self.ape, history, rows, self.width, program=self.program)


class Compressor(nn.Module):
    """One row for every few tokens: values and gates of each, pooled, normed, rotated as the window's first token would be, `kept`."""

    def __init__(
        self, hidden: int, tokens: int, width: int, overlaps: bool, eps: float, kept: CachedRows | IndexRows, program: Program
    ) -> None:
        super().__init__()
        columns = 2 * width if overlaps else width
        self.rows = Linear(hidden, 2 * columns, program, out_dtype=torch.float32)
        self.pool = Pool(tokens, columns, width, program)
        self.norm = WideNorm(width, eps, program)
        self.kept = kept
        self.tokens = tokens
        self.program = program

    def forward(self, x_RD: Tensor, rows: Rows, history: OpenWindows | WholeWindows, table: Tensor) -> Tensor:
        pooled_RE = self.norm(self.pool(self.rows(x_RD), history, rows))[0]
        first_R = first_positions(rows.positions_R, self.tokens)
        row_RE: Tensor = self.kept(ops.tail_rope(pooled_RE[:, None], table, first_R, program=self.program)[:, 0])
        return row_RE


class Indexer(nn.Module):
    """Chooses the compressed rows that a row attends to. Frozen, and it carries no gradient: a choice has none."""

    def __init__(self, c: DeepseekV4Config, program: Program) -> None:
        super().__init__()
        self.heads = c.index_heads
        self.width = c.index_dim
        self.top_k = c.index_top_k
        self.program = program
        self.query = Linear(c.query_rank, c.index_heads * c.index_dim, program)
        self.weights = Linear(c.hidden, c.index_heads, program, k_parts=split_k(c.index_heads, c.hidden))
        self.kept = IndexRows(c.index_dim, program)
        self.compressor = Compressor(c.hidden, c.rates.sparse, c.index_dim, True, c.mixing.eps, self.kept, program)

    @torch.no_grad()
    def forward(self, x_RD: Tensor, query_RC: Tensor, rows: Rows, memory: CompressedMemory, table: Tensor) -> Tensor:
        q_RHE = self.query(query_RC).unflatten(1, (self.heads, self.width))
        q_RHE = self.kept(ops.tail_rope(q_RHE, table, rows.positions_R, program=self.program))
        keys = memory.append_index(self.compressor(x_RD, rows, memory.open("index"), table), rows)
        return ops.compressed_select(q_RHE, self.weights(x_RD), keys, rows, self.top_k, program=self.program)


class Attend(nn.Module):
    """sinks [H], FP32 in every program."""

    def __init__(self, heads: int, width: int, window: int, program: Program) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.window = window
        self.scale = width**-0.5
        self.program = program

    def forward(self, q_RHE: Tensor, history: WindowedRows, chosen_RK: Tensor | None, rows: Rows) -> Tensor:
        how = (self.window, self.scale)
        return ops.compressed_attention(q_RHE, history, chosen_RK, self.sinks, rows, *how, program=self.program)


class Attention(nn.Module):
    """One row a token is key and value of all heads. Queries go through a narrow projection, outputs through one for each group of heads.

    grouped [groups x group rank, heads of a group x E]
    """

    def __init__(self, c: DeepseekV4Config, kind: str, program: Program) -> None:
        super().__init__()
        self.heads = c.heads
        self.width = c.head_dim
        self.query_rank = c.query_rank
        self.groups = c.groups
        self.eps = c.mixing.eps
        self.program = program
        self.name = "" if kind == WINDOW else NAMES.get(kind, "hca")
        self.down = Linear(c.hidden, c.query_rank + c.head_dim, program)
        self.query_norm = WideNorm(c.query_rank, c.mixing.eps, program)
        self.row_norm = WideNorm(c.head_dim, c.mixing.eps, program)
        self.kept = CachedRows(c.head_dim, c.rotation.width, program)
        self.query_up = Linear(c.query_rank, c.heads * c.head_dim, program)
        self.attend = Attend(c.heads, c.head_dim, c.window, program)
        group = c.heads // c.groups * c.head_dim
        self.grouped = nn.Parameter(torch.empty(c.groups * c.group_rank, group, dtype=program.torch_dtype))
        self.out = Linear(c.groups * c.group_rank, c.hidden, program)
        if kind != WINDOW:
            self.compressor = Compressor(c.hidden, c.rate(kind), c.head_dim, kind == SPARSE, c.mixing.eps, self.kept, program)
        if kind == SPARSE:
            self.indexer = Indexer(c, program)

    def take_codes(self, name: str, codec: BlockScaled, rule: ops.ScaleRule) -> None:
        """grouped is codes, which are computed with decoded: the released model multiplies its groups in BF16."""
        hold_codes(self, name, codec)
        hold_values(self, name, codec, self.program.torch_dtype)

    def forward(self, x_RD: Tensor, rows: Rows, memory: CompressedMemory, rotary: Rotations) -> Tensor:
        compresses = "compressor" in self._modules
        table = (rotary.compressed if compresses else rotary.main).on(x_RD.device)
        query_RC, row_RE = self.down(x_RD).split((self.query_rank, self.width), dim=1)
        query_RC = self.query_norm(query_RC)[0]
        q_RHE = self.query_up(query_RC).unflatten(1, (self.heads, self.width))
        plain_E = q_RHE.new_ones(self.width)  # heads of queries are normed without a weight
        q_RHE = ops.rms_norm(q_RHE, plain_E, self.eps, program=self.program)
        q_RHE = ops.tail_rope(q_RHE, table, rows.positions_R, program=self.program)
        row_RE = self.kept(ops.tail_rope(self.row_norm(row_RE)[0][:, None], table, rows.positions_R, program=self.program)[:, 0])
        pooled_RE = self.compressor(x_RD, rows, memory.open(self.name), table) if compresses else None
        chosen_RK = self.indexer(x_RD, query_RC, rows, memory, table) if "indexer" in self._modules else None
        history = memory.append(row_RE, pooled_RE, rows)
        o_RHE = self.attend(q_RHE, history, chosen_RK, rows)
        o_RHE = ops.tail_rope(o_RHE, table, rows.positions_R, program=self.program, inverse=True)
        grouped = values(self, "grouped") if has_values(self, "grouped") else computed(self, "grouped")
        group_RGK = o_RHE.flatten(1).unflatten(1, (self.groups, -1))
        group_RGC = ops.head_linear(group_RGK, grouped.unflatten(0, (self.groups, -1)), program=self.program)
        return self.out(group_RGC.flatten(1))


class SoftplusRoute(nn.Module):
    """bias [X] is added to the scores that choose a row's experts, and to no weight. FP32 in every program."""

    def __init__(self, c: DeepseekV4Config, program: Program) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(c.whole.experts, dtype=torch.float32))
        self.top_k = c.experts_per_token
        self.scale = c.route_scale
        self.program = program

    def forward(self, logits_RX: Tensor, ids_R: Tensor) -> tuple[Tensor, Tensor]:
        weights_RK, experts_RK = ops.softplus_route(logits_RX, self.bias, self.top_k, self.scale, program=self.program)
        return weights_RK, experts_RK


class HashRoute(nn.Module):
    """table [V, K] of int64 names the experts of each token."""

    def __init__(self, c: DeepseekV4Config, program: Program) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(c.whole.vocabulary, c.experts_per_token, dtype=torch.int64), requires_grad=False)
        self.scale = c.route_scale
        self.program = program

    def forward(self, logits_RX: Tensor, ids_R: Tensor) -> tuple[Tensor, Tensor]:
        weights_RK, experts_RK = ops.hash_route(logits_RX, ids_R, self.table, self.scale, program=self.program)
        return weights_RK, experts_RK


class MixtureOfExperts(nn.Module):
    """K of X experts, and a shared expert, the last leaf of the sum."""

    def __init__(self, c: DeepseekV4Config, hashed: bool, program: Program) -> None:
        super().__init__()
        self.router = logits(c.hidden, c.whole.experts, program)
        self.route = HashRoute(c, program) if hashed else SoftplusRoute(c, program)
        kind = PackedExperts if c.packed else Experts
        self.experts = kind(c.experts, c.hidden, c.expert_intermediate, program, c.limit)
        self.shared = GatedMLP(c.hidden, c.shared_intermediate, program, c.limit)

    def forward(self, x_RD: Tensor, ids_R: Tensor) -> Tensor:
        weights_RK, experts_RK = self.route(self.router(x_RD), ids_R)
        return self.experts(x_RD, weights_RK, experts_RK, self.shared(x_RD))


class Streams(NamedTuple):
    """What goes from layer to layer: the residual streams, and the tokens, which name experts."""

    streams_RSD: Tensor
    ids_R: Tensor


class DecoderLayer(nn.Module):
    """Two branches, each with mixed streams around it."""

    def __init__(self, c: DeepseekV4Config, kind: str, hashed: bool, program: Program) -> None:
        super().__init__()
        self.attention_streams = HyperConnection(c.streams, c.hidden, c.mixing, program)
        self.input_norm = WideNorm(c.hidden, c.mixing.eps, program)
        self.attention = Attention(c, kind, program)
        self.mlp_streams = HyperConnection(c.streams, c.hidden, c.mixing, program)
        self.post_norm = WideNorm(c.hidden, c.mixing.eps, program)
        self.mlp = MixtureOfExperts(c, hashed, program)
        self.program = program

    def forward(self, carry: Streams, rows: Rows, memory: CompressedMemory, rotary: Rotations) -> Streams:
        streams_RSD, ids_R = carry
        x_RD, post_RS, comb_RSS = self.attention_streams(streams_RSD)
        branch_RD = self.attention(self.input_norm(x_RD)[0], rows, memory, rotary)
        streams_RSD = ops.hyper_post(branch_RD, streams_RSD, post_RS, comb_RSS, program=self.program)
        x_RD, post_RS, comb_RSS = self.mlp_streams(streams_RSD)
        branch_RD = self.mlp(self.post_norm(x_RD)[0], ids_R)
        return Streams(ops.hyper_post(branch_RD, streams_RSD, post_RS, comb_RSS, program=self.program), ids_R)


class DeepseekV4Model(CausalModel):
    """Parameters of a whole model."""

    def __init__(self, config: DeepseekV4Config, program: Program) -> None:
        super().__init__()
        self.streams = config.streams
        self.embed = Embedding(config.vocabulary, config.hidden, program)
        kinds = zip(config.kinds_of_layers, config.hashed, strict=True)
        self.layers = nn.ModuleList(DecoderLayer(config, kind, hashed, program) for kind, hashed in kinds)
        self.collapse = HyperHead(config.streams, config.hidden, config.mixing, program)
        self.norm = WideNorm(config.hidden, config.mixing.eps, program)
        self.rotary = Rotations(config, program)
        self.head = Embedding(config.vocabulary, config.hidden, program)

    def enter(self, ids_R: Tensor) -> Streams:
        return Streams(self.embed(ids_R)[:, None].repeat(1, self.streams, 1), ids_R)

    def leave(self, carry: Streams) -> Tensor:
        return self.norm(self.collapse(carry.streams_RSD))[0]
