"""hyper_head on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from torch import Tensor


def hyper_head(streams_RSD: Tensor, fn_SK: Tensor, base_S: Tensor, scale_1: Tensor, eps: float, floor: float) -> Tensor:
    """ValueError: there is no kernel yet."""
    raise ValueError("hyper_head has no kernel for a GPU yet: the model runs with device='cpu' alone")
