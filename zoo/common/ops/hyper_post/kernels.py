"""hyper_post on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from torch import Tensor


def hyper_post(branch_RD: Tensor, streams_RSD: Tensor, post_RS: Tensor, comb_RSS: Tensor) -> Tensor:
    """ValueError: there is no kernel yet."""
    raise ValueError("hyper_post has no kernel for a GPU yet: the model runs with device='cpu' alone")
