"""tail_rope on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from torch import Tensor


def tail_rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, inverse: bool) -> Tensor:
    """ValueError: there is no kernel yet."""
    raise ValueError("tail_rope has no kernel for a GPU yet: the model runs with device='cpu' alone")
