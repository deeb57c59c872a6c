"""How much memory an engine takes where nobody says it: pages, and requests that hold memory at once."""

from __future__ import annotations

import torch

from zoo.common.reading import shown
from zoo.common.rows import is_whole
from zoo.common.serving import ForServing

PERCENT = 80  # of the memory that is free when the engine starts; the rest is for activations and graphs
CPU_BYTES = 2 << 30
MAX_BATCH = 64


def check_size(name: str, value: object) -> None:
    """ValueError for what is no integer of at least 1."""
    if not is_whole(value):
        raise ValueError(f"{name} must be an integer, not {shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {shown(value)}")


def default_sizes(model: ForServing, page_size: int | None, max_batch: int) -> tuple[int, int]:
    """Pages, and how many of `max_batch` requests may hold memory, by default.

    Sizes are taken from memories of a page or a slot more than the least, which is held against the room first.
    """
    device = next(model.parameters()).device
    room = CPU_BYTES
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = (torch.cuda.mem_get_info(device)[0] + cached) * PERCENT // 100
    try:
        probe = model.make_memory(2, page_size, 1)
    except torch.OutOfMemoryError as full:
        raise ValueError(f"the memory of one request of one page does not fit, there is room for {room:,} bytes") from full
    least = probe.nbytes
    longest = probe.pages_for(model.config.positions)
    del probe
    if least > room:
        raise ValueError(f"the memory of one request of one page takes {least:,} bytes, there is room for {room:,}")
    page = model.make_memory(3, page_size, 1).nbytes - least
    batch = 1
    slot = 0
    beside = least - 2 * page  # slot 0 and the first request's, which takes no less
    if room - least >= beside:  # else half of it is no second request's, and may not hold one to be measured
        slot = model.make_memory(2, page_size, 2).nbytes - least
        batch = min(max_batch, 1 + (room - least) // 2 // slot) if slot else max_batch
    return min(batch * longest + 1, (room - beside - (batch - 1) * slot) // page), batch
