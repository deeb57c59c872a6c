"""The pushes of a rehearsal: rows of every count that a choice of kernels can hinge on, and one of them through a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zoo.common.memory import Memory
from zoo.common.ops.sample import sample
from zoo.common.rollouts import SamplingParams
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows
from zoo.common.serving import ForServing

GRAIN = 64  # rows: the tiles of every product begin at multiples of it
FEW = (1, 2, 3, 4, 8, 9, 16, 17, 24, 32, 33, 48)  # rows of less than a tile, where kernels of narrow tiles change
BATCHES = (1, 2, 3, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 192, 256)
# one of each way to draw: greedy, plain, and every filter, which share their kernels
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=0),
    SamplingParams(top_k=40, seed=0),
    SamplingParams(min_p=0.05, seed=0),
)


@dataclass(frozen=True)
class Push:
    """`counts[n]` rows of sequence n after `contexts[n]` tokens; a decode step draws, a prefill is scored."""

    counts: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def decodes(self) -> bool:
        return set(self.counts) == {1}

    @property
    def doing(self) -> str:
        longest = max(a + b for a, b in zip(self.counts, self.contexts, strict=True))
        return f"{sum(self.counts)} rows of {len(self.counts)} sequences of up to {longest} tokens"


def pushes(chunk_rows: int, max_batch: int, segment: int | None, positions: int) -> Iterator[Push]:
    """What is pushed: prefills of one sequence and of several, decode steps, each within a key segment and beyond it.

    chunk_rows  of a push at most; max_batch: sequences at most; segment: keys of one pass of attention; positions: of the table
    """
    within = min(segment or positions, positions)
    beyond = within < positions
    for count in dict.fromkeys((*FEW, *range(GRAIN, chunk_rows + 1, GRAIN), chunk_rows)):
        if count <= min(chunk_rows, positions):
            yield Push((count,), (0,))
    for sequences in (2, 8, 32):
        each = min(chunk_rows // sequences, within)
        if sequences <= max_batch and each > 1:
            yield Push((each,) * sequences, (0,) * sequences)
            yield Push((2,) * sequences, (0,) * sequences)
    if beyond:
        for count in (2, GRAIN, min(chunk_rows, positions - within)):
            yield Push((min(count, positions - within),), (within,))
    for batch in dict.fromkeys((*(b for b in BATCHES if b <= max_batch), max_batch)):
        yield Push((1,) * batch, (min(16, positions - 1),) * batch)
        if beyond:
            yield Push((1,) * batch, (within,) * batch)


def run(model: ForServing, push: Push, page_size: int | None) -> None:
    """One push, and what is drawn from its last rows in every way, or the scores of its rows."""
    device = model.device
    rows = Rows.pushed(list(push.counts), list(push.contexts), device)
    memory, table_NB = _memory(model, push, page_size)
    ids_R = torch.zeros(rows.count, dtype=torch.int64, device=device)
    hidden_RD = model.prefill(ids_R, rows, memory, table_NB)
    logits_NV = model.logits(hidden_RD.index_select(0, rows.starts_N1[1:].long() - 1))
    if push.decodes:
        for params in KINDS:
            sample(logits_NV, RowSampling.of([params] * len(push.counts), rows.lengths_N.tolist(), device), model.program)
    else:
        model.log_prob(hidden_RD, torch.zeros(rows.count, dtype=torch.int64))


def _memory(model: ForServing, push: Push, page_size: int | None) -> tuple[Memory, torch.Tensor]:
    """A memory with a page for every `page_size` tokens of the first sequence; the others share its pages, since nobody reads them."""
    longest = max(a + b for a, b in zip(push.counts, push.contexts, strict=True))
    size = model.family.page_size(model.config) if page_size is None else page_size
    blocks = -(-longest // size)
    shared = len(push.counts) > 1 and max(push.counts) == 1
    owned = blocks if shared else blocks * len(push.counts)
    memory = model.make_memory(owned + 1, page_size, len(push.counts))
    held: Sequence[Sequence[int]] = [
        range(1, blocks + 1) if shared else range(1 + n * blocks, 1 + (n + 1) * blocks) for n in range(len(push.counts))
    ]
    return memory, memory.table([list(pages) for pages in held], list(range(1, len(push.counts) + 1)), blocks)
