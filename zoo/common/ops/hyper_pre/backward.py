"""hyper_pre's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zoo.common.ops.hyper_pre import Sinkhorn


def hyper_pre_backward(
    grad_x_RD: Tensor,
    grad_post_RS: Tensor,
    grad_comb_RSS: Tensor,
    streams_RSD: Tensor,
    fn_MK: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    how: Sinkhorn,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(d streams, d fn, d base, d scale)."""
    streams = streams_RSD.shape[1]
    dot_RM, root_R1 = dots(streams_RSD, fn_MK, how.eps)
    mix_RM = dot_RM * root_R1
    scale_M = scale_3.repeat_interleave(torch.tensor([streams, streams, streams * streams], device=scale_3.device))
    logits_RM = mix_RM * scale_M + base_M
    gate_RM = 1 / (1 + torch.exp(-logits_RM[:, : 2 * streams]))
    wide_RSD = streams_RSD.to(fn_MK.dtype)
    grad_RD = grad_x_RD.to(fn_MK.dtype)
    d_gate = torch.cat([(wide_RSD * grad_RD[:, None]).sum(-1), 2 * grad_post_RS], 1) * gate_RM * (1 - gate_RM)
    d_comb = sinkhorn_backward(grad_comb_RSS, logits_RM[:, 2 * streams :].unflatten(1, (streams, streams)), how.floor, how.rounds)
    d_logits = torch.cat([d_gate, d_comb.flatten(1)], 1)
    d_scale = torch.stack([part.sum() for part in (d_logits * mix_RM).split((streams, streams, streams * streams), 1)])
    d_streams = grad_RD[:, None] * (gate_RM[:, :streams] + how.floor)[..., None]
    d_mixed, d_fn = mix_backward(d_logits * scale_M, streams_RSD, fn_MK, dot_RM, root_R1)
    return (d_streams + d_mixed).to(streams_RSD.dtype), d_fn, d_logits.sum(0), d_scale


def dots(streams_RSD: Tensor, fn_MK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The products with fn before the norm, and the norm's factor of each row."""
    x_RK = streams_RSD.flatten(1).to(fn_MK.dtype)
    return x_RK @ fn_MK.T, torch.rsqrt(x_RK.square().mean(-1, keepdim=True) + eps)


def mix_backward(d_mix_RM: Tensor, streams_RSD: Tensor, fn_MK: Tensor, dot_RM: Tensor, root_R1: Tensor) -> tuple[Tensor, Tensor]:
    """(d streams, d fn) of what `mix` gives, d streams not rounded."""
    x_RK = streams_RSD.flatten(1).to(fn_MK.dtype)
    d_dot = d_mix_RM * root_R1
    d_root = (d_mix_RM * dot_RM).sum(-1, keepdim=True)
    d_x = d_dot @ fn_MK - x_RK * (d_root * root_R1**3 / x_RK.shape[1])
    return d_x.view(streams_RSD.shape), d_dot.T @ x_RK


def sinkhorn_backward(grad_RSS: Tensor, logits_RSS: Tensor, floor: float, rounds: int) -> Tensor:
    """d logits, by the divisions that were made, the last first."""
    exponential = torch.exp(logits_RSS - logits_RSS.amax(-1, keepdim=True))
    soft = exponential / exponential.sum(-1, keepdim=True)
    steps: list[tuple[Tensor, Tensor, int]] = []  # what a division gave, by which sums, along which dim
    comb = soft + floor
    for dim in (-2, *(-1, -2) * (rounds - 1)):
        total = comb.sum(dim, keepdim=True) + floor
        comb = comb / total
        steps.append((comb, total, dim))
    grad = grad_RSS
    for made, total, dim in reversed(steps):
        grad = (grad - (grad * made).sum(dim, keepdim=True)) / total
    return soft * (grad - (grad * soft).sum(-1, keepdim=True))
