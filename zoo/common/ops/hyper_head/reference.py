"""hyper_head in plain torch."""

from __future__ import annotations

from torch import Tensor

from zoo.common.ops.hyper_pre.reference import collapse, mix, sigmoid


def hyper_head(streams_RSD: Tensor, fn_SK: Tensor, base_S: Tensor, scale_1: Tensor, eps: float, floor: float) -> Tensor:
    return collapse(streams_RSD, sigmoid(mix(streams_RSD, fn_SK, eps) * scale_1 + base_S) + floor)
