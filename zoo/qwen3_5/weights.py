"""Qwen3.5's checkpoint names: one table, both directions."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import torch

from zoo.common.quantisation import quantised
from zoo.common.recipe import Draw, usual_recipe
from zoo.common.weights import Cut, Entry, Piece, WeightTable, gated_mlp, separate_experts, single, stacked_rows
from zoo.qwen3_5.config import CONV_WIDTH, Qwen35Config

# vision and multi-token-prediction weights are published with the text model; they are carried, never used
CARRIED = (r"model\.visual\..*", r"mtp\..*")
# that an FP8 checkpoint has in codes; the delta rule's decay and strength, in_proj_a and in_proj_b, stay as they are
MATRICES = (
    r"model\.(language_model\.)?layers\.\d+\.(self_attn\.[qkvo]_proj\.weight|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight|"
    r"mlp\.((shared_expert|experts\.\d+)\.)?(gate|up|down)_proj\.weight|mlp\.experts\.(gate_up|down)_proj)"
)
WRAPPED = "model.language_model"
ALONE = "model"


@functools.lru_cache(maxsize=2)  # with many experts it takes a second, and every update of weights asks for it
def table(config: Qwen35Config) -> WeightTable:
    """Ours <- published, for every tensor of the geometry, with either prefix: transformers saves the text part of a
    vision-language model under the text model's config with the other's names. The config's own prefix comes first."""
    first, second = (WRAPPED, ALONE) if config.wrapped else (ALONE, WRAPPED)
    entries = tuple(
        entry if entry == other else replace(entry, layouts=entry.layouts + other.layouts)
        for entry, other in zip(_entries(config, first), _entries(config, second), strict=True)
    )
    whole = WeightTable(entries, carried=CARRIED, prefix=(f"{WRAPPED}.", f"{ALONE}."))
    return quantised(whole, config.quantised, MATRICES)


def _entries(config: Qwen35Config, root: str) -> list[Entry]:
    head = "model.embed.weight" if config.tied else "model.head.weight"
    entries = [
        single("model.embed.weight", f"{root}.embed_tokens.weight", (config.vocabulary, config.hidden), cut=Cut()),
        single("model.norm.weight", f"{root}.norm.weight", (config.hidden,)),
        single(head, "lm_head.weight", (config.vocabulary, config.hidden), optional_alias=config.tied, cut=Cut()),
    ]
    for i, full in enumerate(config.full):
        ours = f"model.layers.{i}"
        theirs = f"{root}.layers.{i}"
        entries += [
            single(f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight", (config.hidden,)),
            single(f"{ours}.post_norm.weight", f"{theirs}.post_attention_layernorm.weight", (config.hidden,)),
        ]
        entries += (_attention if full else _delta)(config, f"{ours}.mixer", theirs)
        entries += (
            _experts(config, f"{ours}.mlp", f"{theirs}.mlp")
            if config.experts
            else gated_mlp(f"{ours}.mlp", f"{theirs}.mlp", config.hidden, config.intermediate)
        )
    return entries


def _attention(config: Qwen35Config, ours: str, layer: str) -> list[Entry]:
    theirs = f"{layer}.self_attn"
    kv = config.kv_heads * config.head_dim
    width = config.head_dim
    queries = 2 * config.heads * width  # each head's query rows, then its gate rows
    return [
        stacked_rows(
            f"{ours}.qkv.weight",
            config.hidden,
            [
                (f"{theirs}.{n}_proj.weight", rows, Cut(unit=unit))
                for n, rows, unit in (("q", queries, 2 * width), ("k", kv, width), ("v", kv, width))
            ],
        ),
        single(f"{ours}.norm.q", f"{theirs}.q_norm.weight", (config.head_dim,)),
        single(f"{ours}.norm.k", f"{theirs}.k_norm.weight", (config.head_dim,)),
        single(f"{ours}.out.weight", f"{theirs}.o_proj.weight", (config.hidden, config.heads * width), cut=Cut(1, width)),
    ]


def _delta(config: Qwen35Config, ours: str, layer: str) -> list[Entry]:
    theirs = f"{layer}.linear_attn"
    values = config.value_heads * config.value_dim
    heads = config.value_heads
    keys = (config.key_heads * config.key_dim, config.key_dim)
    mixed = Cut(sections=(keys, keys, (values, config.value_dim)))  # queries, keys and values
    parts = [("qkv", config.conv_channels, mixed), ("z", values, Cut(unit=config.value_dim)), ("b", heads, Cut()), ("a", heads, Cut())]
    published = [(f"{theirs}.in_proj_{n}.weight", r, cut) for n, r, cut in parts]
    fused = {"qkvz": published[:2], "ba": published[2:]} if config.gates_apart else {"qkvzba": published}
    return [
        *(stacked_rows(f"{ours}.{name}.weight", config.hidden, some) for name, some in fused.items()),
        single(f"{ours}.conv", f"{theirs}.conv1d.weight", (config.conv_channels, 1, CONV_WIDTH), cut=mixed),
        single(f"{ours}.gate.a_log", f"{theirs}.A_log", (heads,), dtype=torch.float32, cut=Cut()),
        single(f"{ours}.gate.dt_bias", f"{theirs}.dt_bias", (heads,), dtype=torch.float32, cut=Cut()),
        single(f"{ours}.norm.weight", f"{theirs}.norm.weight", (config.value_dim,), dtype=torch.float32),
        single(f"{ours}.out.weight", f"{theirs}.out_proj.weight", (config.hidden, values), cut=Cut(1, config.value_dim)),
    ]


def _experts(config: Qwen35Config, ours: str, theirs: str) -> list[Entry]:
    """Routed experts as published (stacked), or one by one as transformers saves those that it did not load."""
    count = config.experts
    intermediate = config.expert_intermediate
    hidden = config.hidden
    gate_up, down = separate_experts(f"{theirs}.experts", count, hidden, intermediate)
    stacked = (
        Piece(f"{theirs}.experts.gate_up_proj", (count, 2 * intermediate, hidden), cut=Cut(along="ep")),
        Piece(f"{theirs}.experts.down_proj", (count, hidden, intermediate), cut=Cut(along="ep")),
    )
    return [
        single(f"{ours}.router.weight", f"{theirs}.gate.weight", (count, hidden)),
        Entry(f"{ours}.experts.gate_up", ((stacked[0],), gate_up)),
        Entry(f"{ours}.experts.down", ((stacked[1],), down)),
        *gated_mlp(f"{ours}.shared", f"{theirs}.shared_expert", hidden, config.shared_intermediate),
        single(f"{ours}.shared_gate.weight", f"{theirs}.shared_expert_gate.weight", (1, hidden)),
    ]


def recipe(published: str, shape: tuple[int, ...], tied: bool) -> Draw:
    """Zero-centred norms lie near 0; decays spread from about 0.7 to 0.99 a row."""
    if published.endswith("A_log"):
        return Draw(0.7, 0.5)
    if published.endswith("dt_bias"):
        return Draw(1.0, -3.0)
    if re.search(r"norm", published) and "linear_attn" not in published:
        return Draw(0.1, 0.0)
    return usual_recipe(published, shape, tied)


def unused_tensors(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a tiny vision-language checkpoint that the text model does not use, by published name."""
    return dict(_UNUSED) if "text_config" in fields else {}


_UNUSED: dict[str, tuple[int, ...]] = {
    "model.visual.patch_embed.proj.weight": (32, 3, 2, 2, 2),
    "model.visual.blocks.0.norm1.bias": (32,),
    "model.visual.blocks.0.attn.qkv.weight": (96, 32),
    "mtp.fc.weight": (64, 128),
    "mtp.layers.0.self_attn.q_norm.weight": (64,),
}
