"""hyper_post's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

from torch import Tensor


def hyper_post_backward(
    grad_RSD: Tensor, branch_RD: Tensor, streams_RSD: Tensor, post_RS: Tensor, comb_RSS: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(d branch, d streams, d post, d comb)."""
    grad = grad_RSD.to(post_RS.dtype)
    branch = branch_RD.to(post_RS.dtype)
    streams = streams_RSD.to(post_RS.dtype)
    d_branch = (grad * post_RS[..., None]).sum(1)
    return (
        d_branch.to(branch_RD.dtype),
        (comb_RSS @ grad).to(streams_RSD.dtype),
        (grad * branch[:, None]).sum(-1),
        streams @ grad.transpose(1, 2),
    )
