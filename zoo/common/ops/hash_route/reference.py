"""hash_route in plain torch."""

from __future__ import annotations

from torch import Tensor

from zoo.common.ops.softplus_route.reference import weights


def hash_route(logits_RX: Tensor, ids_R: Tensor, table_VK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    experts_RK = table_VK[ids_R].long()
    return weights(logits_RX, experts_RK, scale), experts_RK
