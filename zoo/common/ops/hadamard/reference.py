"""hadamard in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x_RE: Tensor) -> Tensor:
    accumulate = torch.promote_types(x_RE.dtype, torch.float32)
    turned = x_RE.to(accumulate)
    width = x_RE.shape[1]
    apart = 1
    while apart < width:
        a, b = turned.unflatten(1, (-1, 2, apart)).unbind(2)
        turned = torch.stack((a + b, a - b), 2).flatten(1)
        apart *= 2
    return (turned * width**-0.5).to(x_RE.dtype)
