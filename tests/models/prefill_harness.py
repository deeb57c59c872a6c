"""What the tests of captured prefills share: sequences behind scattered pages in memory full of NaN, and a capture without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.glm5 import SIZES as LATENT_SIZES
from zoo.glm5 import GLMForServing
from zoo.qwen3 import MOE_SIZES, SIZES, Qwen3ForServing
from zoo.qwen3_5 import MOE_SIZES as HYBRID_MOE_SIZES
from zoo.qwen3_5 import SIZES as HYBRID_SIZES
from zoo.qwen3_5 import Qwen35ForServing

HYBRID: dict[str, Any] = {"layers": 2, "full": (False, True)}
MODELS: dict[str, tuple[type[ForServing], Any]] = {
    "qwen3": (Qwen3ForServing, SIZES["tiny"]),
    "qwen3_moe": (Qwen3ForServing, MOE_SIZES["tiny"]),
    "qwen3_5": (Qwen35ForServing, replace(HYBRID_SIZES["tiny"], **HYBRID)),
    "qwen3_5_moe": (Qwen35ForServing, replace(HYBRID_MOE_SIZES["tiny"], **HYBRID)),
    "glm5": (GLMForServing, replace(LATENT_SIZES["tiny"].first_layers(2), index_top_k=256)),
}
# heads of 256 have pages of 80 and key segments of 2080
WIDE = (Qwen35ForServing, replace(HYBRID_SIZES["tiny"], **HYBRID, head_dim=256, rope_dim=64))


def made(kind: str, device: str) -> ForServing:
    model, config = WIDE if kind == "wide" else MODELS[kind]
    if kind == "glm5" and device == "cuda":
        config = replace(config, index_top_k=2048)
    return model.from_config(config, seed=1, device=device)


class Sequences:
    """Sequences of these final lengths over one memory. What is neither theirs nor padding's holds NaN."""

    def __init__(self, model: ForServing, lengths: list[int], page_size: int | None = None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        size = model.make_memory(2, page_size, 1).page_size
        needed = [-(-n // size) for n in lengths]
        total = 1 + sum(needed) + 3
        self.memory: Any = model.make_memory(total, page_size, len(lengths) + 2)
        for pool in pools(self.memory):
            pool[:, 1:] = torch.nan
        draw = random.Random(sum(lengths))
        free = draw.sample(range(1, total), total - 1)
        self.pages = [[free.pop() for _ in range(count)] for count in needed]
        slots = draw.sample(range(1, len(lengths) + 3), len(lengths))
        self.slots = slots if self.memory.slots else [0] * len(lengths)
        self.memory.clear([page for pages in self.pages for page in pages], slots if self.memory.slots else ())
        ids = torch.Generator().manual_seed(len(lengths))
        self.ids = [torch.randint(3, model.config.vocabulary, (n,), generator=ids).to(self.device) for n in lengths]
        self.done = [0] * len(lengths)

    def batch(self, counts: dict[int, int]) -> tuple[Tensor, Rows, Tensor]:
        """(ids, rows, table) of the next `counts[n]` rows of each sequence n, which count as pushed."""
        before = [self.done[n] for n in counts]
        for n, count in counts.items():
            self.done[n] += count
            assert self.done[n] <= len(self.ids[n])
        ids = torch.cat([self.ids[n][b : b + c] for (n, c), b in zip(counts.items(), before, strict=True)])
        held = [self.pages[n][: self.memory.pages_for(self.done[n])] for n in counts]
        table = self.memory.table(held, [self.slots[n] for n in counts], max(map(len, held)))
        return ids, Rows.pushed(list(counts.values()), before, self.device), table

    def alive(self) -> list[Tensor]:
        """Every byte of memory that is not padding's: pages and slots from 1 on."""
        return [pool[:, 1:].clone() for pool in pools(self.memory)]


def pools(memory: Any) -> list[Tensor]:
    """The buffers of a memory, [layers, pages or slots, ...] each."""
    return list(memory.tensors().values())


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Rerun:
    """Stands for a captured graph: the same code over the same static tensors, run again."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run
        self.result = run()

    def replay(self) -> None:
        self.result.copy_(self.run())


def rerun(run: Callable[[], Tensor], pool: Any) -> tuple[Rerun, Tensor]:
    """In place of `serving.captured`."""
    graph = Rerun(run)
    return graph, graph.result
