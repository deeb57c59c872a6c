"""fp8_select in plain torch: linear's panels for the products of codes, partial sums in DeepGEMM's order, a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.history import CodedRows
from zoo.common.ops.fp8_quantise import POWERS_OF_TWO
from zoo.common.ops.fp8_quantise.reference import fp8_quantise
from zoo.common.ops.linear.reference import panels
from zoo.common.ops.select.reference import best
from zoo.common.ops.trees import pair_tree
from zoo.common.rows import Rows

QUERY_RULE = POWERS_OF_TWO  # so that folding a query's scale into the head's weight rounds nothing
QUERY_ROWS = 16
LANES = 8  # partial sums of a score: head 8 g + j joins the j-th
NAN_SCORE = (
    "fp8_select: an earlier token's score is NaN, so a row's query, its heads' weights or an index key holds a NaN or an infinity, "
    "and which tokens the row attends to says nothing"
)


def select(q_RHE: Tensor, weights_RH: Tensor, keys: CodedRows, rows: Rows, top_k: int) -> Tensor:
    out = torch.full((q_RHE.shape[0], top_k), -1, dtype=torch.int32)
    codes_RHE, folded_RH = queries(q_RHE, weights_RH)
    starts = rows.starts_N1.tolist()
    for n, length in enumerate(rows.lengths_N.tolist()):
        begin, end = starts[n : n + 2]
        before = length - (end - begin)
        codes_TE, scales_T = keys.of(n, begin, end, length)
        for first in range(begin, end, QUERY_ROWS):
            block = slice(first, min(first + QUERY_ROWS, end))
            seen = [before + r - begin + 1 for r in range(block.start, block.stop)]
            last = seen[-1]
            # what lies beyond the block's last row is not read
            scores = index_scores(codes_RHE[block], folded_RH[block], codes_TE[:last], scales_T[:last]) if last > top_k else None
            for i, count in enumerate(seen):
                if count <= top_k or scores is None:
                    out[first + i, :count] = torch.arange(count)
                else:
                    if scores[i, :count].isnan().any():
                        rows.flag(NAN_SCORE).fill_(1)
                    out[first + i] = best(scores[i, :count], top_k)
    return out


def queries(q_RHE: Tensor, weights_RH: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [R, H, E], FP32 weights [R, H] with the queries' scales; float64 weights in a float64 program)."""
    _, heads, width = q_RHE.shape
    codes, scales = fp8_quantise(q_RHE.flatten(0, 1), QUERY_RULE.floor, QUERY_RULE.power_of_two)
    wide = weights_RH.to(torch.promote_types(weights_RH.dtype, torch.float32))
    return codes.view(q_RHE.shape), wide * heads**-0.5 * scales.view(weights_RH.shape) * width**-0.5


def index_scores(q_codes_RHE: Tensor, weights_RH: Tensor, codes_TE: Tensor, scales_T: Tensor) -> Tensor:
    """Scores [R, T] in the weights' dtype, never -0."""
    dots_RHT = panels(q_codes_RHE.flatten(0, 1).float(), codes_TE.float()).unflatten(0, q_codes_RHE.shape[:2])
    # what is not above zero counts nothing, a NaN too
    dots_RHT = torch.where(dots_RHT > 0.0, dots_RHT, 0.0)
    missing = -weights_RH.shape[1] % LANES
    dots_RGJT = torch.nn.functional.pad(dots_RHT, (0, 0, 0, missing)).unflatten(1, (-1, LANES))
    weights_RGJ = torch.nn.functional.pad(weights_RH, (0, missing)).unflatten(1, (-1, LANES))
    partial_RJT = weights_RH.new_zeros(())
    for group in range(dots_RGJT.shape[1]):
        # an FMA: the product is exact in FP64
        product_RJT = dots_RGJT[:, group].double() * weights_RGJ[:, group, :, None].double()
        partial_RJT = (product_RJT + partial_RJT.double()).to(weights_RH.dtype)
    pairs_RTJ = (partial_RJT[:, 0::2] + partial_RJT[:, 1::2]).transpose(1, 2)
    return pair_tree(pairs_RTJ * scales_T[:, None]) + 0.0
