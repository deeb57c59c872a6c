"""GLM-5 in serving: rows through paged latent rows and index keys."""

from __future__ import annotations

from zoo.common.latent_memory import LatentMemory
from zoo.common.serving import ForServing


class GLMForServing(ForServing):
    """Token ids and pages in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    memory_class = LatentMemory

    @property
    def captured_length(self) -> int:
        """Tokens of a sequence in a captured prefill at most: as many as a row reads, so that there is nothing to choose."""
        return min(self.config.index_top_k, self.config.positions) if self.program.name == "aligned" else 0

    @property
    def takes_any_page(self) -> bool:
        return True

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> LatentMemory:
        """Pages are all that a sequence holds: `slots` says nothing."""
        c = self.config
        page = self.family.page_size(c) if page_size is None else page_size
        return LatentMemory(c.full, pages, page, c.cached, c.index_dim, self.program.torch_dtype, self.model.embed.weight.device)
