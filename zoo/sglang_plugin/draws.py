"""The draw inside a decode graph: its rows' static parameters, and what the sampler takes of a replay.

C captured rows, of which the first R are live.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.ops.sample import Drawn
from zoo.common.program import Program
from zoo.common.row_sampling import RowSampling


class GraphDraws:
    """What decode graphs of up to `largest` rows draw with: static columns, written only when a batch's rows are others.

    A batch with filters is left to the sampler. So is one that was never bound, since `taken` asks whose columns they are.

    bound  the rows that the columns hold; None where the columns may hold anything, as after memory came back
    drawn  rows that the sampler took from replays
    """

    def __init__(self, largest: int, program: Program, device: torch.device | str) -> None:
        self.columns = dataclasses.replace(RowSampling.buffer(largest, device), filters=False)
        self.program = program
        self.bound: RowSampling | None = None
        self.drawn = 0

    def bind(self, rows: RowSampling | None) -> None:
        """Before a replay, on its stream. The rows are kept, so no others can come to be at their place."""
        if rows is None or rows is self.bound or rows.filters:
            return
        self.columns.copy_(rows)
        self.bound = rows

    def draw(self, logits_CV: Tensor, positions_C: Tensor) -> CapturedDraw:
        """While a graph is captured, from its FP32 logits and static positions. Rows of padding draw what nobody reads.

        Nothing may change the logits between this and the sampler; what does so in SGLang (`requests.NEUTRAL`) is refused.
        """
        rows = dataclasses.replace(self.columns[: len(logits_CV)], position_R=positions_C.long() + 1)
        drawn = ops.sample(logits_CV, rows, self.program)
        return CapturedDraw(self, torch.cat([drawn.token_R.view(torch.int32), drawn.log_prob_R.view(torch.int32)]))


class CapturedDraw(NamedTuple):
    """One object over all replays of a graph, each of which overwrites `packed`.

    packed  int32 [3 C], the bits of C int64 tokens, then of C FP32 log-probabilities
    """

    draws: GraphDraws
    packed: Tensor


def taken(found: CapturedDraw | None, rows: RowSampling, count: int) -> Drawn | None:
    """What the last replay drew for its first `count` rows; None if there was no replay, or it drew with others' parameters.

    A clone, one for both columns: SGLang copies them to the host on a stream that the next replay does not wait for.
    """
    if found is None or found.draws.bound is not rows:
        return None
    found.draws.drawn += count
    mine = found.packed.clone()
    first = len(mine) // 3 * 2
    log_prob_R = mine[first : first + count].view(torch.float32)
    return Drawn(mine[: 2 * count].view(torch.int64), log_prob_R, log_prob_R)
