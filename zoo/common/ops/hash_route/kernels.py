"""hash_route on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from torch import Tensor


def hash_route(logits_RX: Tensor, ids_R: Tensor, table_VK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """ValueError: there is no kernel yet."""
    raise ValueError("hash_route has no kernel for a GPU yet: the model runs with device='cpu' alone")
