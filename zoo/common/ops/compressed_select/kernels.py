"""compressed_select on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from torch import Tensor

from zoo.common.history import CompressedRows
from zoo.common.rows import Rows


def compressed_select(q_RHE: Tensor, weights_RH: Tensor, keys: CompressedRows, rows: Rows, top_k: int) -> Tensor:
    """ValueError: there is no kernel yet."""
    raise ValueError("compressed_select has no kernel for a GPU yet: the model runs with device='cpu' alone")
