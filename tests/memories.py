"""Memories of chosen sizes, without a model around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.common.memory import KeyValueLayer, LatentLayer, Memory, PagePart


def keys_memory(
    layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Memory:
    """Keys and values alone, as Qwen3's."""
    row = (dtype, (kv_heads, head_dim))
    keys = PagePart("keys", layers, pages, page_size, {"k": row, "v": row}, device)
    return Memory([keys], [], [KeyValueLayer(keys, layer) for layer in range(layers)])


def latent_memory(
    full: Sequence[bool],
    pages: int,
    page_size: int,
    latent_width: int,
    index_width: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Memory:
    """Latent rows, and index keys where `full`, as GLM-5's."""
    latents = PagePart("latents", len(full), pages, page_size, {"latent": (dtype, (latent_width,))}, device)
    keys = PagePart("index", sum(full), pages, page_size, {"index": (dtype, (index_width,))}, device)
    return Memory(
        [latents, keys], [], [LatentLayer(latents, i, keys, sum(full[:i]) if chooses else None) for i, chooses in enumerate(full)]
    )
