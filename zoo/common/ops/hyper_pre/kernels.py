"""hyper_pre on CUDA: not there yet, so a GPU is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from zoo.common.ops.hyper_pre import Sinkhorn


def hyper_pre(streams_RSD: Tensor, fn_MK: Tensor, base_M: Tensor, scale_3: Tensor, how: Sinkhorn) -> tuple[Tensor, Tensor, Tensor]:
    """ValueError: there is no kernel yet."""
    raise ValueError("hyper_pre has no kernel for a GPU yet: the model runs with device='cpu' alone")
