"""hyper_head's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.hyper_pre.backward import dots, mix_backward


def hyper_head_backward(
    grad_RD: Tensor, streams_RSD: Tensor, fn_SK: Tensor, base_S: Tensor, scale_1: Tensor, eps: float, floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(d streams, d fn, d base, d scale)."""
    dot_RS, root_R1 = dots(streams_RSD, fn_SK, eps)
    mix_RS = dot_RS * root_R1
    gate_RS = 1 / (1 + torch.exp(-(mix_RS * scale_1 + base_S)))
    grad = grad_RD.to(fn_SK.dtype)
    d_logits = (streams_RSD.to(fn_SK.dtype) * grad[:, None]).sum(-1) * gate_RS * (1 - gate_RS)
    d_mixed, d_fn = mix_backward(d_logits * scale_1, streams_RSD, fn_SK, dot_RS, root_R1)
    d_streams = grad[:, None] * (gate_RS + floor)[..., None] + d_mixed
    return d_streams.to(streams_RSD.dtype), d_fn, d_logits.sum(0), (d_logits * mix_RS).sum()[None]
