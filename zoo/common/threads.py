"""How many CPU threads a model's work is worth. Bytes do not depend on it; time does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

LARGE = 100_000_000  # parameters; with fewer, operands are so small that several threads mostly wait for each other


def is_large(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) > LARGE


@contextmanager
def suited(model: nn.Module) -> Iterator[None]:
    """Inside, one thread for a small model on a CPU, which elsewhere takes 5 to 10 times the CPU time on a busy machine.

    The number that this thread had is there again behind it. A large model, and one on a GPU, keeps it throughout.
    """
    device = next(model.parameters()).device
    before = torch.get_num_threads()
    if before == 1 or device.type != "cpu" or is_large(model):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
