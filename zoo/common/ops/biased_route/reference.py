"""biased_route in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zoo.common.ops.biased_route import Choice


def biased_route(logits_RX: Tensor, bias_X: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    score = 1.0 / (1.0 + torch.exp(-logits_RX))  # torch's own sigmoid changes bytes with the row count
    biased = score + bias_X
    if choice.groups > 1:
        best = torch.sort(biased.unflatten(1, (choice.groups, -1)), dim=-1, descending=True).values
        worth = best[..., 0] + best[..., 1]
        shut = _descending(worth)[:, choice.open_groups :]
        closed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, shut, True)
        biased = torch.where(closed.repeat_interleave(best.shape[-1], 1), -torch.inf, biased)
    order = _descending(biased)[:, : choice.top_k]
    chosen = score.gather(1, order)
    if choice.renormalise:
        total = chosen[:, 0]
        for slot in range(1, choice.top_k):
            total = total + chosen[:, slot]
        chosen = chosen / (total + 1e-20)[:, None]
    return chosen * choice.scale, order


def _descending(x: Tensor) -> Tensor:
    """Places in a row, the lower first among equals; -0 is made +0 so that the two zeros are equal."""
    return torch.sort(x + 0.0, dim=-1, descending=True, stable=True).indices
