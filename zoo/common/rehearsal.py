"""A rehearsal: the pushes that make a model compile all that it will launch, before anybody waits for an answer.

Kernels compile when a variant is first met: the number of rows picks tiles, the length of the longest sequence picks the attention's
passes, a filter picks the sampler's kernels. So the rehearsal pushes rows of every count that such a choice can hinge on through the
model's first layers, over a memory of its own that is dropped afterwards, and draws and scores with them. No weight and no served byte is
touched; what was compiled stays in the process and in the compilers' folders on disk, where the next start finds it. Where a push finds
something to compile, other processes go through the pushes behind it first, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from rich.progress import Progress

from zoo.common.compilations import Compilation, keep, watch
from zoo.common.pushes import Push, pushes, run
from zoo.common.rehearsing import processes_for, side_by_side
from zoo.common.serving import ForServing


def rehearse(
    model: ForServing,
    *,
    chunk_rows: int,
    max_batch: int,
    page_size: int | None = None,
    progress: bool = False,
    processes: int | None = None,
) -> int:
    """Runs the rehearsal and returns how many variants were compiled. Afterwards a compilation is one too many: `watch().after_ready`.

    chunk_rows  prompt rows of a push at most
    max_batch   sequences of a push at most
    page_size   tokens per page of the memory that will be served from, by default the model's
    progress    shows a bar
    processes   that compile side by side at most; by default one a core, at most 16, as far as the GPU has room

    It takes memory for one push of `chunk_rows` rows, or of `max_batch` sequences of two key segments, and gives it back.
    """
    keep()
    seen = watch()
    seen.unready()
    seen.look("before the rehearsal")
    before = len(seen.found)
    planned = list(pushes(chunk_rows, max_batch, model.captured_length or None, model.config.positions))
    short = type(model).first_layers_of(model, layers_of_every_kind(model))
    alone = False
    with torch.no_grad(), Progress() if progress else nullcontext() as bar:
        for place, push in enumerate(_told(planned, bar, "getting kernels")):
            run(short, push, page_size)
            fresh = seen.look(f"rehearsing {push.doing}")
            if not alone and _compiled(fresh):
                alone = True
                _with_others(short, planned[place + 1 :], page_size, bar, processes)
                seen.look("rehearsing side by side")
    seen.ready()
    return len(seen.found) - before


def _compiled(fresh: Sequence[Compilation]) -> bool:
    """Whether a compiler ran, and not only a cache on disk was read."""
    return any(one.compiler != "flash_attn" for one in fresh)


def _with_others(
    model: ForServing,
    planned: Sequence[Push],
    page_size: int | None,
    bar: Progress | None,
    processes: int | None,
) -> None:
    """The pushes in other processes, every one a share of them."""
    count = processes_for(model, len(planned))
    count = count if processes is None else min(count, processes)
    if count < 2:
        return
    # pushes side by side are alike, and share their kernels: whoever has one of them has all that it needs for the others
    cuts = [len(planned) * share // count for share in range(count + 1)]
    shares = [[(push.counts, push.contexts) for push in planned[first:end]] for first, end in pairwise(cuts)]
    task = bar.add_task(f"compiling in {count} processes", total=len(planned)) if bar else None
    for done in side_by_side(model, shares, page_size):
        if bar and task is not None:
            bar.advance(task, done)


def _told(planned: Sequence[Push], bar: Progress | None, what: str) -> Iterator[Push]:
    return iter(planned) if bar is None else iter(bar.track(planned, description=what))


def layers_of_every_kind(model: ForServing) -> int:
    """As few first layers as have a layer of every kind, by the shapes of their parameters and buffers."""
    seen = set()
    count = 0
    for place, layer in enumerate(model.model.layers):
        kind = tuple((name, tuple(held.shape), held.dtype) for name, held in (*layer.named_parameters(), *layer.named_buffers()))
        if kind not in seen:
            seen.add(kind)
            count = place + 1
    return count
