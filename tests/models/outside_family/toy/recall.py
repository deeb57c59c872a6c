"""The toy's own op: a row times the newest squeezed row that its sequence has; zeros before there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.history import TokenRows
from zoo.common.ops.contract import PROGRAM, Cached, Contract, Provider, observed
from zoo.common.program import Program
from zoo.common.rows import Rows

TOKENS = 4  # of a squeezed row


def _cached(arguments: Any) -> dict[str, Cached]:
    return {"squeezed": Cached(arguments["history"].rows, TOKENS)}


class Functions(NamedTuple):
    """What a provider brings.

    forward  x_RC, history, rows, program
    """

    forward: Callable[..., Tensor]


def _reference() -> Functions:
    return Functions(recall)


CONTRACT = Contract(
    name="toy_recall",
    version=1,
    shapes="x_RC, squeezed rows [S, C] of the packed documents or pages of them -> [R, C]",
    reads={"x_RC": PROGRAM, "history.rows": PROGRAM},
    rounds="the product once",
    adds="nothing",
    laws=("row", "split", "place", "repeat"),
    backward="torch's own",
    launch="element by element",
    providers=(Provider("reference", "reference", "cpu", _reference, defining=True),),
    history="history",
    cached=_cached,
)


@observed(CONTRACT)
def recall(x_RC: Tensor, history: TokenRows, rows: Rows, *, program: Program) -> Tensor:
    """A packed history has the whole rows of one document after another's."""
    newest_R = (rows.positions_R + 1) // TOKENS - 1
    if history.page_table_NB is None:
        whole_N = rows.lengths_N.long() // TOKENS
        before_N = whole_N.cumsum(0) - whole_N
        place_R = before_N[rows.sequence_R] + newest_R
        squeezed = history.rows
    else:
        size = history.rows.shape[1]
        page_R = history.page_table_NB[rows.sequence_R, newest_R.clamp(min=0) // size].long()
        place_R = page_R * size + newest_R % size
        squeezed = history.rows.flatten(0, 1)
    there_R1 = (newest_R >= 0)[:, None]
    spare = squeezed.new_zeros(1, squeezed.shape[1])
    row_RC = torch.cat([spare, squeezed])[torch.where(newest_R >= 0, place_R + 1, 0)]
    return torch.where(there_R1, x_RC * row_RC, 0.0).to(x_RC.dtype)
