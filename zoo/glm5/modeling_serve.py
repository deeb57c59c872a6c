"""GLM-5 in serving: rows through paged latent rows and index keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zoo.common.memory import Kept, LatentLayer, PagePart, Pages, SlotPart
from zoo.common.serving import ForServing
from zoo.glm5.model import coded_index


class GLMForServing(ForServing):
    """Token ids and pages in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    parts = ("latents", "index")

    @property
    def captured_length(self) -> int:
        """Tokens of a sequence in a captured prefill at most: as many as a row reads, so that there is nothing to choose."""
        return min(self.config.index_top_k, self.config.positions) if self.program.captures else 0

    @property
    def takes_any_page(self) -> bool:
        return True

    def page_parts(self, pages: int, page_size: int) -> list[PagePart]:
        """A layer without an index of its own reads the choice of the last layer below it that has one, so it holds no index keys."""
        c = self.config
        dtype = self.program.torch_dtype
        device = self.device
        latents = PagePart("latents", c.layers, pages, page_size, {"latent": (dtype, (c.cached,))}, device)
        coded = coded_index(self.program)
        kept: Kept = {"index": (dtype, (c.index_dim,))}
        if coded:
            kept = {"index_codes": (torch.float8_e4m3fn, (c.index_dim,)), "index_scales": (torch.float32, (1,))}
        return [latents, PagePart("index", sum(c.full), pages, page_size, kept, device, joined=coded)]

    def layer_views(self, pages: Sequence[Pages], slots: Sequence[SlotPart]) -> list[Any]:
        latents, keys = pages
        full = self.config.full
        return [LatentLayer(latents, layer, keys, sum(full[:layer]) if chooses else None) for layer, chooses in enumerate(full)]
