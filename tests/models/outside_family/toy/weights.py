"""The toy's checkpoint names."""

from __future__ import annotations

from toy.config import ToyConfig
from zoo.common.codecs import BlockScaled
from zoo.common.weights import Cut, Entry, WeightTable, block_scaled, single

BLOCKS = BlockScaled(16, 32)


def table(config: ToyConfig) -> WeightTable:
    hidden = config.hidden
    channels = config.channels
    entries: list[Entry] = [
        single("model.embed.weight", "model.embed_tokens.weight", (config.vocabulary, hidden), cut=Cut()),
        single("model.norm.weight", "model.norm.weight", (hidden,)),
        single("model.head.weight", "lm_head.weight", (config.vocabulary, hidden), cut=Cut()),
    ]
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        entries += [
            single(f"{layer}.norm.weight", f"{layer}.norm.weight", (hidden,)),
            single(f"{layer}.inward.weight", f"{layer}.in_proj.weight", (channels, hidden)),
            single(f"{layer}.conv", f"{layer}.conv.weight", (channels, 4)),
            *block_scaled(f"{layer}.outward.weight", f"{layer}.out_proj.weight", (hidden, channels), BLOCKS, cut=Cut()),
        ]
    return WeightTable(tuple(entries), carried=())
