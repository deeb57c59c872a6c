"""compress on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.history import OpenWindows, WholeWindows
from zoo.common.ops.compress.windows import Window
from zoo.common.rows import Rows


def compress(
    rows_RC: Tensor, ape_WP: Tensor, history: OpenWindows | WholeWindows, rows: Rows, window: Window, dtype: torch.dtype
) -> Tensor:
    """ValueError: there is no kernel yet."""
    raise ValueError("compress has no kernel for a GPU yet: the model runs with device='cpu' alone")


def advance(rows_RC: Tensor, history: OpenWindows, rows: Rows, window: Window) -> None:
    """ValueError: there is no kernel yet."""
    raise ValueError("compress has no kernel for a GPU yet: the model runs with device='cpu' alone")
