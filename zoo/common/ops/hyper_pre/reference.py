"""hyper_pre in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.common.ops.linear.reference import linear
from zoo.common.ops.trees import pair_tree
from zoo.common.program import split_k

if TYPE_CHECKING:
    from zoo.common.ops.hyper_pre import Sinkhorn


def hyper_pre(streams_RSD: Tensor, fn_MK: Tensor, base_M: Tensor, scale_3: Tensor, how: Sinkhorn) -> tuple[Tensor, Tensor, Tensor]:
    streams = streams_RSD.shape[1]
    mix_RM = mix(streams_RSD, fn_MK, how.eps)
    pre_RS = sigmoid(mix_RM[:, :streams] * scale_3[0] + base_M[:streams]) + how.floor
    post_RS = 2 * sigmoid(mix_RM[:, streams : 2 * streams] * scale_3[1] + base_M[streams : 2 * streams])
    logits_RM = mix_RM[:, 2 * streams :] * scale_3[2] + base_M[2 * streams :]
    return collapse(streams_RSD, pre_RS), post_RS, sinkhorn(logits_RM.unflatten(1, (streams, streams)), how.floor, how.rounds)


def mix(streams_RSD: Tensor, fn_MK: Tensor, eps: float) -> Tensor:
    """FP32 [R, M]: the streams side by side times fn, over their root mean square."""
    x_RK = streams_RSD.flatten(1).to(fn_MK.dtype)
    dot_RM = linear(x_RK, fn_MK, fn_MK.dtype, split_k(*fn_MK.shape))
    return dot_RM * inverse_root(x_RK, eps)[:, None]


def inverse_root(x_RK: Tensor, eps: float) -> Tensor:
    """One over the root of a row's mean square plus eps."""
    inverse_width = torch.tensor(1.0 / x_RK.shape[1], dtype=x_RK.dtype)
    return torch.rsqrt(pair_tree(x_RK * x_RK) * inverse_width + eps)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))  # torch's own changes bytes with the row count


def collapse(streams_RSD: Tensor, weight_RS: Tensor) -> Tensor:
    """The streams' weighted sum, rounded once."""
    return pair_tree((streams_RSD.to(weight_RS.dtype) * weight_RS[..., None]).transpose(1, 2)).to(streams_RSD.dtype)


def sinkhorn(logits_RSS: Tensor, floor: float, rounds: int) -> Tensor:
    """Rows and columns that add up to nearly 1 each, columns divided last."""
    exponential = torch.exp(logits_RSS - logits_RSS.amax(-1, keepdim=True))
    comb = exponential / pair_tree(exponential)[..., None] + floor
    comb = comb / (pair_tree(comb.transpose(1, 2))[:, None] + floor)
    for _ in range(rounds - 1):
        comb = comb / (pair_tree(comb)[..., None] + floor)
        comb = comb / (pair_tree(comb.transpose(1, 2))[:, None] + floor)
    return comb
