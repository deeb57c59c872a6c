"""Qwen3's checkpoint names: one table, both directions."""

from __future__ import annotations

from zoo.common.quantisation import quantised
from zoo.common.weights import Cut, Entry, WeightTable, gated_mlp, separate_experts, single, stacked_rows
from zoo.qwen3.config import Qwen3Config

MATRICES = r"model\.layers\.\d+\.(self_attn|mlp)\.(experts\.\d+\.)?[a-z]+_proj\.weight"  # that an FP8 checkpoint has in codes


def table(config: Qwen3Config) -> WeightTable:
    """Ours <- published, for every tensor of the geometry."""
    hidden = config.hidden
    q = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    head = "model.embed.weight" if config.tied else "model.head.weight"
    entries = [
        single("model.embed.weight", "model.embed_tokens.weight", (config.vocabulary, hidden), cut=Cut()),
        single("model.norm.weight", "model.norm.weight", (hidden,)),
        single(head, "lm_head.weight", (config.vocabulary, hidden), optional_alias=config.tied, cut=Cut()),
    ]
    for i in range(config.layers):
        layer = f"model.layers.{i}"  # ours and theirs
        projections = [(f"{layer}.self_attn.{n}_proj.weight", r, Cut(unit=config.head_dim)) for n, r in (("q", q), ("k", kv), ("v", kv))]
        entries += [
            single(f"{layer}.input_norm.weight", f"{layer}.input_layernorm.weight", (hidden,)),
            single(f"{layer}.post_norm.weight", f"{layer}.post_attention_layernorm.weight", (hidden,)),
            single(f"{layer}.attention.norm.q", f"{layer}.self_attn.q_norm.weight", (config.head_dim,)),
            single(f"{layer}.attention.norm.k", f"{layer}.self_attn.k_norm.weight", (config.head_dim,)),
            stacked_rows(f"{layer}.attention.qkv.weight", hidden, projections),
            single(f"{layer}.attention.out.weight", f"{layer}.self_attn.o_proj.weight", (hidden, q), cut=Cut(1, config.head_dim)),
        ]
        if config.experts:
            entries += _experts(config, f"{layer}.mlp")
        else:
            entries += gated_mlp(f"{layer}.mlp", f"{layer}.mlp", hidden, config.intermediate)
    return quantised(WeightTable(tuple(entries), carried=()), config.quantised, MATRICES)


def _experts(config: Qwen3Config, mlp: str) -> list[Entry]:
    gate_up, down = separate_experts(f"{mlp}.experts", config.experts, config.hidden, config.expert_intermediate)
    return [
        single(f"{mlp}.router.weight", f"{mlp}.gate.weight", (config.experts, config.hidden)),
        Entry(f"{mlp}.experts.gate_up", (gate_up,)),
        Entry(f"{mlp}.experts.down", (down,)),
    ]
