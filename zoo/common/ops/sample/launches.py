"""Any number of rows, at any stride, through kernels that have a grid's second side for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# of one launch: CUDA takes 65535 on the second side, and a multiple of 16 keeps a part's rows aligned as the whole's.
# Adjacent programs, along the first side, share a row
GRID_ROWS = 65520


def in_launches(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of rows (every tensor that it takes or gives has them first) for more of them than one launch takes."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        rows = args[0].shape[0]
        if rows <= GRID_ROWS:
            return function(*args, **options)
        spans = [slice(first, first + GRID_ROWS) for first in range(0, rows, GRID_ROWS)]
        parts = [function(*(a[span] if isinstance(a, Tensor) else a for a in args), **options) for span in spans]
        return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(torch.cat(part) for part in zip(*parts, strict=True))

    return call


def columns_side_by_side(x_RV: Tensor) -> Tensor:
    """Rows may be strided, columns may not."""
    return x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()
