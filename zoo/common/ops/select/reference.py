"""select in plain torch: linear's panels for the products, a stable sort for the choice."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.history import TokenRows
from zoo.common.ops.linear.reference import panels
from zoo.common.ops.trees import pair_tree
from zoo.common.rows import Rows

QUERY_ROWS = 16
NAN_SCORE = (
    "select: an earlier token's score is NaN, so a row's query, its heads' weights or an index key holds a NaN or an infinity, "
    "and which tokens the row attends to says nothing"
)


def select(q_RHE: Tensor, weights_RH: Tensor, keys: Tensor, page_table_NB: Tensor | None, rows: Rows, top_k: int) -> Tensor:
    out = torch.full((q_RHE.shape[0], top_k), -1, dtype=torch.int32)
    history = TokenRows(keys, page_table_NB)
    starts = rows.starts_N1.tolist()
    for n, length in enumerate(rows.lengths_N.tolist()):
        begin, end = starts[n : n + 2]
        before = length - (end - begin)
        mine = history.of(n, begin, end, length)
        for first in range(begin, end, QUERY_ROWS):
            block = slice(first, min(first + QUERY_ROWS, end))
            seen = [before + r - begin + 1 for r in range(block.start, block.stop)]
            # what lies beyond the block's last row is not read
            scores = index_scores(q_RHE[block], weights_RH[block], mine[: seen[-1]]) if seen[-1] > top_k else None
            for i, count in enumerate(seen):
                if count <= top_k or scores is None:
                    out[first + i, :count] = torch.arange(count)
                else:
                    if scores[i, :count].isnan().any():
                        rows.flag(NAN_SCORE).fill_(1)
                    out[first + i] = best(scores[i, :count], top_k)
    return out


def index_scores(q_RHE: Tensor, weights_RH: Tensor, keys_TE: Tensor) -> Tensor:
    """FP32 scores [R, T], never -0."""
    accumulate = torch.promote_types(q_RHE.dtype, torch.float32)
    dots_RHT = panels(q_RHE.flatten(0, 1).to(accumulate), keys_TE.to(accumulate)).unflatten(0, q_RHE.shape[:2])
    terms_RHT = torch.clamp(dots_RHT, min=0.0) * weights_RH.to(accumulate)[..., None]
    return pair_tree(terms_RHT.transpose(1, 2)) + 0.0


def best(scores_T: Tensor, top_k: int) -> Tensor:
    """The places of the `top_k` largest, ascending, NaN as -inf; a stable sort keeps equal scores in order."""
    ordered_T = torch.where(scores_T.isnan(), -torch.inf, scores_T)
    return torch.sort(ordered_T, descending=True, stable=True).indices[:top_k].sort().values.to(torch.int32)
