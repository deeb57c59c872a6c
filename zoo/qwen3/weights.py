"""Qwen3's checkpoint names: one table, both directions."""

from __future__ import annotations

from zoo.common.checkpoint import Entry, Piece, WeightTable
from zoo.qwen3.config import Qwen3Config


def table(config: Qwen3Config) -> WeightTable:
    """Ours <- published, for every tensor of the geometry."""
    hidden, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    entries = [
        _one("model.embed.weight", "model.embed_tokens.weight", (config.vocabulary, hidden)),
        _one("model.norm.weight", "model.norm.weight", (hidden,)),
    ]
    head = "model.embed.weight" if config.tied else "model.head.weight"
    entries.append(Entry(head, ((Piece("lm_head.weight", (config.vocabulary, hidden)),),), optional_alias=config.tied))
    for i in range(config.layers):
        ours, theirs = f"model.layers.{i}", f"model.layers.{i}"
        entries += [
            _one(f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight", (hidden,)),
            _one(f"{ours}.post_norm.weight", f"{theirs}.post_attention_layernorm.weight", (hidden,)),
            _one(f"{ours}.attention.norm.q", f"{theirs}.self_attn.q_norm.weight", (config.head_dim,)),
            _one(f"{ours}.attention.norm.k", f"{theirs}.self_attn.k_norm.weight", (config.head_dim,)),
            _rows(f"{ours}.attention.qkv.weight", hidden, [(f"{theirs}.self_attn.{n}_proj.weight", r) for n, r in zip("qkv", (q, kv, kv), strict=True)]),
            _one(f"{ours}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight", (hidden, q)),
        ]  # fmt: skip
        if config.experts:
            entries += _experts(config, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            entries += [
                _rows(f"{ours}.mlp.gate_up.weight", hidden, [(f"{theirs}.mlp.{n}_proj.weight", config.inner) for n in ("gate", "up")]),
                _one(f"{ours}.mlp.down.weight", f"{theirs}.mlp.down_proj.weight", (hidden, config.inner)),
            ]
    return WeightTable(tuple(entries), carried=())


def _one(ours: str, published: str, shape: tuple[int, ...]) -> Entry:
    return Entry(ours, ((Piece(published, shape),),))


def _rows(ours: str, columns: int, parts: list[tuple[str, int]]) -> Entry:
    """Published projections of one input, stacked by rows in the order given."""
    pieces, start = [], 0
    for published, rows in parts:
        pieces.append(Piece(published, (rows, columns), start=start))
        start += rows
    return Entry(ours, (tuple(pieces),))


def _experts(config: Qwen3Config, ours: str, theirs: str) -> list[Entry]:
    inner, hidden = config.expert_inner, config.hidden
    gate_up = tuple(
        Piece(f"{theirs}.experts.{e}.{name}_proj.weight", (inner, hidden), expert=e, start=start)
        for e in range(config.experts)
        for name, start in (("gate", 0), ("up", inner))
    )
    down = tuple(Piece(f"{theirs}.experts.{e}.down_proj.weight", (hidden, inner), expert=e) for e in range(config.experts))
    return [
        _one(f"{ours}.router.weight", f"{theirs}.gate.weight", (config.experts, hidden)),
        Entry(f"{ours}.experts.gate_up", (gate_up,)),
        Entry(f"{ours}.experts.down", (down,)),
    ]
