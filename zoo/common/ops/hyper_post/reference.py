"""hyper_post in plain torch."""

from __future__ import annotations

from torch import Tensor

from zoo.common.ops.trees import pair_tree


def hyper_post(branch_RD: Tensor, streams_RSD: Tensor, post_RS: Tensor, comb_RSS: Tensor) -> Tensor:
    wide_RDS = streams_RSD.to(post_RS.dtype).transpose(1, 2)
    mixed = [pair_tree(wide_RDS * comb_RSS[:, None, :, k]) for k in range(streams_RSD.shape[1])]
    branch = branch_RD.to(post_RS.dtype)
    out = streams_RSD.new_empty(streams_RSD.shape)
    for k, sum_RD in enumerate(mixed):
        out[:, k] = (sum_RD + branch * post_RS[:, k, None]).to(streams_RSD.dtype)
    return out
