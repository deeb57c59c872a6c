"""The explicit adjacent-pair tree, in plain torch: the one order in which references add a row."""

from __future__ import annotations

import torch
from torch import Tensor


def padded_width(width: int) -> int:
    """The power of two that a row of `width` is padded to with zeros: the tree's shape depends on the width alone."""
    return 1 << max(width - 1, 0).bit_length()


def pair_tree(x: Tensor) -> Tensor:
    """Sum over the last dim: pad to a power of two with +0, then add adjacent pairs until one value is left."""
    width = x.shape[-1]
    full = padded_width(width)
    if full != width:
        x = torch.cat([x, x.new_zeros(*x.shape[:-1], full - width)], dim=-1)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
