"""log_prob's reductions and the gradient of its logits in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.trees import pair_tree


def group_stats(logits_RV: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per group of columns: the maximum, the sum of exp(x - max), the sum of exp(x - max) * x, [R, groups] each.

    A ragged last group is padded with -inf. A group that is all -inf has max -inf and sums of +0.
    """
    rows, width = logits_RV.shape
    pad = -width % group
    if pad:
        logits_RV = torch.cat([logits_RV, logits_RV.new_full((rows, pad), -torch.inf)], 1)
    x = logits_RV.unflatten(1, (-1, group))
    peak = x.amax(-1)
    safe = torch.where(peak == -torch.inf, 0.0, peak)
    weight = torch.exp(x - safe[..., None])
    return peak, pair_tree(weight), pair_tree(weight * torch.where(x == -torch.inf, 0.0, x))


def chunk_stats(
    logits_RC: Tensor, first: int, targets_R: Tensor, group: int, stats: tuple[Tensor, Tensor, Tensor], selected_R: Tensor
) -> None:
    """Writes `group_stats` of columns `first` .. into their places in `stats`, and the targets' logits among them into `selected_R`.

    `first` is a multiple of the group; a target in another chunk leaves `selected_R` as it is.
    """
    assert first % group == 0, f"column {first} starts no group of {group}"
    for whole, part in zip(stats, group_stats(logits_RC, group), strict=True):
        whole[:, first // group : first // group + part.shape[1]] = part
    local = targets_R - first
    inside = (local >= 0) & (local < logits_RC.shape[1])
    picked = logits_RC.gather(1, local.clamp(0, logits_RC.shape[1] - 1)[:, None])[:, 0]
    selected_R.copy_(torch.where(inside, picked, selected_R))


def merge_groups(peak_RG: Tensor, mass_RG: Tensor, mean_RG: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp, expected logit) of rows from their groups' (max, sum of exp, sum of exp * logit)."""
    peak = peak_RG.amax(1, keepdim=True)
    scale = torch.exp(peak_RG - peak)
    mass = pair_tree(mass_RG * scale)
    return peak[:, 0] + torch.log(mass), pair_tree(mean_RG * scale) / mass


def logit_grad(
    logits_RC: Tensor,
    lse_R: Tensor,
    mean_R: Tensor,
    local_R: Tensor,
    grad_R: Tensor,
    grad_lse_R: Tensor,
    grad_entropy_R: Tensor,
    inverse_temperature_R: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """d logits of one vocabulary chunk; `local_R` is the target's column in the chunk (outside it: no one-hot term).

    log-probability x_t - lse, lse, and entropy lse - E[x]: dH/dx_j = -p_j (x_j - E[x]).
    """
    p = torch.exp(logits_RC - lse_R[:, None])
    out = p * (grad_lse_R - grad_R)[:, None] - p * (logits_RC - mean_R[:, None]) * grad_entropy_R[:, None]
    inside = (local_R >= 0) & (local_R < logits_RC.shape[1])
    column = local_R.clamp(0, logits_RC.shape[1] - 1)[:, None]
    out.scatter_add_(1, column, torch.where(inside, grad_R, 0.0)[:, None].to(out.dtype))
    if inverse_temperature_R is not None:
        out = out * inverse_temperature_R[:, None]
    return out.to(dtype)
