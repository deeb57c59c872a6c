"""route in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.trees import pair_tree


def route(logits_RX: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    # a stable sort keeps equal logits in id order; -0 is made +0 so that the two zeros are equal
    order = torch.sort(logits_RX + 0.0, dim=-1, descending=True, stable=True).indices[:, :top_k]
    exponential = torch.exp(logits_RX - logits_RX.amax(-1, keepdim=True))
    chosen = exponential.gather(1, order) / pair_tree(exponential)[:, None]
    if renormalise:
        total = chosen[:, 0]
        for slot in range(1, top_k):
            total = total + chosen[:, slot]
        chosen = chosen / total[:, None]
    return chosen, order
