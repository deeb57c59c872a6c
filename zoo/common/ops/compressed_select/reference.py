"""compressed_select in plain torch: select's scores and choice."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.history import CompressedRows
from zoo.common.ops.select.reference import QUERY_ROWS, best, index_scores
from zoo.common.rows import Rows

NAN_SCORE = (
    "compressed_select: a compressed row's score is NaN, so a row's query, its heads' weights or an index key holds a NaN or an infinity, "
    "and which rows it attends to says nothing"
)


def compressed_select(q_RHE: Tensor, weights_RH: Tensor, keys: CompressedRows, rows: Rows, top_k: int) -> Tensor:
    out = torch.full((q_RHE.shape[0], top_k), -1, dtype=torch.int32)
    starts = rows.starts_N1.tolist()
    for n, length in enumerate(rows.lengths_N.tolist()):
        begin, end = starts[n : n + 2]
        before = length - (end - begin)
        mine = keys.of(n, begin, end, length).detach()
        for first in range(begin, end, QUERY_ROWS):
            block = slice(first, min(first + QUERY_ROWS, end))
            seen = [(before + r - begin + 1) // keys.tokens for r in range(block.start, block.stop)]
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
