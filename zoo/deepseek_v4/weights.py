"""DeepSeek-V4's checkpoint names: one table, both directions, under the published names and under those that transformers saves."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import torch

from zoo.common.quantisation import quantised
from zoo.common.recipe import Draw, usual_recipe
from zoo.common.weights import Cut, Entry, Piece, WeightTable, packed_experts, single, stacked_rows
from zoo.deepseek_v4.config import SPARSE, WINDOW, DeepseekV4Config

# that an FP8 checkpoint has in codes; experts may be packed instead
MATRICES = r"layers\.\d+\.(attn\.(w[qo]_[ab]|wkv|indexer\.wq_b)|ffn\.(shared_experts|experts\.\d+)\.w[123])\.weight"
CARRIED = (r"mtp\..*",)  # a drafter's
SAVED = "model."  # what transformers puts before names, the head's left out
# other names that it saves, behind that: published -> saved
RENAMED = (
    (r"embed\.weight", "embed_tokens.weight"),
    (r"hc_head_(\w+)", r"hc_head.hc_\1"),
    (r"(.*\.attn)\.kv_norm\.weight", r"\1.norm.weight"),
)


@functools.lru_cache(maxsize=2)  # with many experts it takes a second, and every update of weights asks for it
def table(config: DeepseekV4Config) -> WeightTable:
    """Ours <- published, for every tensor of the geometry. A drafter's layers are carried."""
    published = quantised(WeightTable(tuple(_entries(config)), carried=CARRIED), config.quantised, MATRICES)
    entries = [
        replace(entry, layouts=(*entry.layouts, tuple(replace(piece, published=saved(piece.published)) for piece in entry.layouts[0])))
        if saved(entry.layouts[0][0].published) != entry.layouts[0][0].published
        else entry
        for entry in published.entries
    ]
    return replace(published, entries=tuple(entries))


def saved(published: str) -> str:
    """The name under which transformers saves a published tensor."""
    for pattern, name in RENAMED:
        if re.fullmatch(pattern, published):
            return SAVED + re.sub(pattern, name, published)
    return published if published == "head.weight" else SAVED + published


def _wide(ours: str, published: str, shape: tuple[int, ...], *, trainable: bool = True, cut: Cut | None = None) -> Entry:
    """FP32 in every program."""
    return single(ours, published, shape, dtype=torch.float32, trainable=trainable, cut=cut)


def _entries(config: DeepseekV4Config) -> list[Entry]:
    hidden = config.hidden
    streams = config.streams
    entries = [
        single("model.embed.weight", "embed.weight", (config.vocabulary, hidden), cut=Cut()),
        _wide("model.norm.weight", "norm.weight", (hidden,)),
        single("model.head.weight", "head.weight", (config.vocabulary, hidden), cut=Cut()),
        _wide("model.collapse.fn", "hc_head_fn", (streams, streams * hidden)),
        _wide("model.collapse.base", "hc_head_base", (streams,)),
        _wide("model.collapse.scale", "hc_head_scale", (1,)),
    ]
    for i, (kind, hashed) in enumerate(zip(config.kinds_of_layers, config.hashed, strict=True)):
        ours = f"model.layers.{i}"
        theirs = f"layers.{i}"
        entries += [
            _wide(f"{ours}.input_norm.weight", f"{theirs}.attn_norm.weight", (hidden,)),
            _wide(f"{ours}.post_norm.weight", f"{theirs}.ffn_norm.weight", (hidden,)),
            *_streams(config, f"{ours}.attention_streams", f"{theirs}.hc_attn"),
            *_streams(config, f"{ours}.mlp_streams", f"{theirs}.hc_ffn"),
            *_attention(config, kind, f"{ours}.attention", f"{theirs}.attn"),
            *_mixture(config, hashed, f"{ours}.mlp", f"{theirs}.ffn"),
        ]
    return entries


def _streams(config: DeepseekV4Config, ours: str, theirs: str) -> list[Entry]:
    mixed = (2 + config.streams) * config.streams
    return [
        _wide(f"{ours}.fn", f"{theirs}_fn", (mixed, config.streams * config.hidden)),
        _wide(f"{ours}.base", f"{theirs}_base", (mixed,)),
        _wide(f"{ours}.scale", f"{theirs}_scale", (3,)),
    ]


def _attention(config: DeepseekV4Config, kind: str, ours: str, theirs: str) -> list[Entry]:
    hidden = config.hidden
    width = config.head_dim
    down = [(f"{theirs}.wq_a.weight", config.query_rank, None), (f"{theirs}.wkv.weight", width, None)]
    group = config.heads // config.groups * width
    entries = [
        stacked_rows(f"{ours}.down.weight", hidden, down),
        _wide(f"{ours}.query_norm.weight", f"{theirs}.q_norm.weight", (config.query_rank,)),
        _wide(f"{ours}.row_norm.weight", f"{theirs}.kv_norm.weight", (width,)),
        single(f"{ours}.query_up.weight", f"{theirs}.wq_b.weight", (config.heads * width, config.query_rank), cut=Cut(unit=width)),
        _wide(f"{ours}.attend.sinks", f"{theirs}.attn_sink", (config.heads,), cut=Cut()),
        single(f"{ours}.grouped", f"{theirs}.wo_a.weight", (config.groups * config.group_rank, group), cut=Cut(unit=config.group_rank)),
        single(f"{ours}.out.weight", f"{theirs}.wo_b.weight", (hidden, config.groups * config.group_rank), cut=Cut(1, config.group_rank)),
    ]
    if kind != WINDOW:
        entries += _compressor(config, kind, width, f"{ours}.compressor", f"{theirs}.compressor")
    if kind == SPARSE:
        entries += _indexer(config, f"{ours}.indexer", f"{theirs}.indexer")
    return entries


def _compressor(config: DeepseekV4Config, kind: str, width: int, ours: str, theirs: str) -> list[Entry]:
    columns = 2 * width if kind == SPARSE else width
    parts = [(f"{theirs}.wkv.weight", columns, None), (f"{theirs}.wgate.weight", columns, None)]
    return [
        stacked_rows(f"{ours}.rows.weight", config.hidden, parts),
        _wide(f"{ours}.pool.ape", f"{theirs}.ape", (config.rate(kind), columns)),
        _wide(f"{ours}.norm.weight", f"{theirs}.norm.weight", (width,)),
    ]


def _indexer(config: DeepseekV4Config, ours: str, theirs: str) -> list[Entry]:
    entries = [
        single(f"{ours}.query.weight", f"{theirs}.wq_b.weight", (config.index_heads * config.index_dim, config.query_rank)),
        single(f"{ours}.weights.weight", f"{theirs}.weights_proj.weight", (config.index_heads, config.hidden)),
        *_compressor(config, SPARSE, config.index_dim, f"{ours}.compressor", f"{theirs}.compressor"),
    ]
    return [replace(entry, trainable=False) for entry in entries]  # the choice of rows has no gradient, transformers trains none either


def _mixture(config: DeepseekV4Config, hashed: bool, ours: str, theirs: str) -> list[Entry]:
    count = config.experts
    hidden = config.hidden
    width = config.expert_intermediate
    shared = f"{theirs}.shared_experts"
    if hashed:
        shape = (config.vocabulary, config.experts_per_token)
        names = single(f"{ours}.route.table", f"{theirs}.gate.tid2eid", shape, dtype=torch.int64, trainable=False)
        route = replace(names, below=count)
    else:  # published without a gradient: it is in no weight, only in the choice
        route = _wide(f"{ours}.route.bias", f"{theirs}.gate.bias", (count,), trainable=False)
    return [
        single(f"{ours}.router.weight", f"{theirs}.gate.weight", (count, hidden)),
        route,
        *_experts(config, f"{ours}.experts", f"{theirs}.experts"),
        stacked_rows(f"{ours}.shared.gate_up.weight", hidden, [(f"{shared}.{name}.weight", width, Cut()) for name in ("w1", "w3")]),
        single(f"{ours}.shared.down.weight", f"{shared}.w2.weight", (hidden, width), cut=Cut(1)),
    ]


def _experts(config: DeepseekV4Config, ours: str, theirs: str) -> list[Entry]:
    count = config.experts
    hidden = config.hidden
    width = config.expert_intermediate
    if config.packed:
        return packed_experts(ours, (theirs,), count, hidden, width)
    gate_up = tuple(
        Piece(f"{theirs}.{e}.{name}.weight", (width, hidden), expert=e, start=start)
        for e in range(count)
        for name, start in (("w1", 0), ("w3", width))
    )
    down = tuple(Piece(f"{theirs}.{e}.w2.weight", (hidden, width), expert=e) for e in range(count))
    return [Entry(f"{ours}.gate_up", (gate_up,)), Entry(f"{ours}.down", (down,))]


def recipe(published: str, shape: tuple[int, ...], tied: bool) -> Draw:
    """Scales lie near 1, biases near 0: a large one would send every row to the same experts."""
    if published.endswith("_scale"):
        return Draw(0.2, 1.0)
    if published.endswith("gate.bias"):
        return Draw(0.1)
    if published.endswith((".ape", "_base", "attn_sink")):
        return Draw(0.3)
    return usual_recipe(published, shape, tied)


def unused_tensors(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a tiny checkpoint's drafter, by published name."""
    return dict(_MTP) if fields.get("num_nextn_predict_layers") else {}


_MTP: dict[str, tuple[int, ...]] = {
    "mtp.0.e_proj.weight": (64, 64),
    "mtp.0.enorm.weight": (64,),
    "mtp.0.attn.wq_a.weight": (48, 64),
    "mtp.0.ffn.gate.weight": (8, 64),
}
