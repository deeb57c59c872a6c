"""compressed_attention on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from torch import Tensor

from zoo.common.history import WindowedRows
from zoo.common.rows import Rows


def compressed_attention(
    q_RHE: Tensor, history: WindowedRows, chosen_RK: Tensor | None, sinks_H: Tensor, rows: Rows, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """ValueError: there is no kernel yet."""
    raise ValueError("compressed_attention has no kernel for a GPU yet: the model runs with device='cpu' alone")
