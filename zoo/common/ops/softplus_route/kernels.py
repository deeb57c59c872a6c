"""softplus_route on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from torch import Tensor


def softplus_route(logits_RX: Tensor, bias_X: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """ValueError: there is no kernel yet."""
    raise ValueError("softplus_route has no kernel for a GPU yet: the model runs with device='cpu' alone")
