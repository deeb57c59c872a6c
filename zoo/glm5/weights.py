"""GLM-5's checkpoint names: one table, both directions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from zoo.common.quantisation import quantised
from zoo.common.recipe import Draw, usual_recipe
from zoo.common.weights import Cut, Entry, WeightTable, gated_mlp, separate_experts, single, stacked_rows
from zoo.glm5.config import GLMConfig

# that an FP8 checkpoint has in codes
MATRICES = (
    r"model\.layers\.\d+\.(self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj|kv_b_proj|o_proj|indexer\.(wq_b|wk))|"
    r"mlp\.((shared_experts|experts\.\d+)\.)?(gate|up|down)_proj)\.weight"
)


@functools.lru_cache(maxsize=2)  # with many experts it takes a second, and every update of weights asks for it
def table(config: GLMConfig) -> WeightTable:
    """Ours <- published, for every tensor of the geometry. Layers of multi-token prediction are carried."""
    hidden = config.hidden
    head = "model.embed.weight" if config.tied else "model.head.weight"
    entries = [
        single("model.embed.weight", "model.embed_tokens.weight", (config.vocabulary, hidden), cut=Cut()),
        single("model.norm.weight", "model.norm.weight", (hidden,)),
        single(head, "lm_head.weight", (config.vocabulary, hidden), optional_alias=config.tied, cut=Cut()),
    ]
    for i, (full, sparse) in enumerate(zip(config.full, config.sparse, strict=True)):
        layer = f"model.layers.{i}"  # ours and theirs
        entries += [
            single(f"{layer}.input_norm.weight", f"{layer}.input_layernorm.weight", (hidden,)),
            single(f"{layer}.post_norm.weight", f"{layer}.post_attention_layernorm.weight", (hidden,)),
            *_attention(config, layer),
            *(_indexer(config, layer) if full else ()),
            *(_mixture(config, layer) if sparse else gated_mlp(f"{layer}.mlp", f"{layer}.mlp", hidden, config.intermediate)),
        ]
    carried = tuple(rf"model\.layers\.{config.layers + i}\..*" for i in range(config.mtp_layers))
    return quantised(WeightTable(tuple(entries), carried=carried), config.quantised, MATRICES)


def _attention(config: GLMConfig, layer: str) -> list[Entry]:
    ours = f"{layer}.attention"
    theirs = f"{layer}.self_attn"
    heads = config.heads
    query = config.nope_dim + config.rope_dim  # rows of a head
    latent = config.nope_dim + config.value_dim
    down = [(f"{theirs}.q_a_proj.weight", config.query_rank, None), (f"{theirs}.kv_a_proj_with_mqa.weight", config.cached, None)]
    return [
        stacked_rows(f"{ours}.down.weight", config.hidden, down),
        single(f"{ours}.query_norm.weight", f"{theirs}.q_a_layernorm.weight", (config.query_rank,)),
        single(f"{ours}.latent_norm.weight", f"{theirs}.kv_a_layernorm.weight", (config.kv_rank,)),
        single(f"{ours}.query_up.weight", f"{theirs}.q_b_proj.weight", (heads * query, config.query_rank), cut=Cut(unit=query)),
        single(f"{ours}.latent_up", f"{theirs}.kv_b_proj.weight", (heads * latent, config.kv_rank), cut=Cut(unit=latent)),
        single(f"{ours}.out.weight", f"{theirs}.o_proj.weight", (config.hidden, heads * config.value_dim), cut=Cut(1, config.value_dim)),
    ]


def _indexer(config: GLMConfig, layer: str) -> list[Entry]:
    ours = f"{layer}.attention.indexer"
    theirs = f"{layer}.self_attn.indexer"
    key_weights = [(f"{theirs}.wk.weight", config.index_dim, None), (f"{theirs}.weights_proj.weight", config.index_heads, None)]
    entries = [
        single(f"{ours}.query.weight", f"{theirs}.wq_b.weight", (config.index_heads * config.index_dim, config.query_rank)),
        *_key_weights(config, f"{ours}.key_weights", key_weights),
        single(f"{ours}.norm.weight", f"{theirs}.k_norm.weight", (config.index_dim,)),
        single(f"{ours}.norm.bias", f"{theirs}.k_norm.bias", (config.index_dim,)),
    ]
    return [replace(entry, trainable=False) for entry in entries]  # the choice of tokens has no gradient, transformers trains none either


def _key_weights(config: GLMConfig, ours: str, parts: Sequence[tuple[str, int, Cut | None]]) -> list[Entry]:
    """Keys, then the heads' weights: one parameter, or one each."""
    if not config.keys_apart:
        return [stacked_rows(f"{ours}.weight", config.hidden, parts)]
    return [
        single(f"{ours}.{name}", published, (rows, config.hidden))
        for name, (published, rows, _) in zip(("key", "heads"), parts, strict=True)
    ]


def _mixture(config: GLMConfig, layer: str) -> list[Entry]:
    mlp = f"{layer}.mlp"
    count = config.experts
    hidden = config.hidden
    gate_up, down = separate_experts(f"{mlp}.experts", count, hidden, config.expert_intermediate)
    return [
        single(f"{mlp}.router.weight", f"{mlp}.gate.weight", (count, hidden)),
        # published without a gradient: the choice of experts has none
        single(f"{mlp}.route.bias", f"{mlp}.gate.e_score_correction_bias", (count,), dtype=torch.float32, trainable=False),
        Entry(f"{mlp}.experts.gate_up", (gate_up,)),
        Entry(f"{mlp}.experts.down", (down,)),
        *gated_mlp(f"{mlp}.shared", f"{mlp}.shared_experts", hidden, config.shared_intermediate),
    ]


def recipe(published: str, shape: tuple[int, ...], tied: bool) -> Draw:
    """Biases lie near 0: a large one would send every row to the same experts."""
    if published.endswith("e_score_correction_bias"):
        return Draw(0.1)
    if published.endswith(".bias"):
        return Draw(0.3)
    return usual_recipe(published, shape, tied)


def unused_tensors(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a tiny checkpoint's layer that predicts a second token, by published name."""
    layers = fields["num_hidden_layers"]
    return {f"model.layers.{layers}.{name}": shape for name, shape in _MTP.items()} if fields.get("num_nextn_predict_layers") else {}


_MTP: dict[str, tuple[int, ...]] = {
    "eh_proj.weight": (128, 256),
    "enorm.weight": (128,),
    "hnorm.weight": (128,),
    "shared_head.norm.weight": (128,),
    "self_attn.q_a_proj.weight": (96, 128),
    "mlp.gate.weight": (8, 128),
}
