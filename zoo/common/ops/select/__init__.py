"""select: which of the earlier tokens a row attends to, the best by a light score of all its heads together.

Source: the lightning indexer of DeepSeek Sparse Attention, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from zoo.common.history import TokenRows
from zoo.common.ops.contract import PROGRAM, Arguments, Cached, Contract, Provider, observed
from zoo.common.program import Program
from zoo.common.rows import Rows


def _cached(arguments: Arguments) -> dict[str, Cached]:
    return {"index": Cached(arguments["keys"].rows)}


class Functions(NamedTuple):
    """What a provider brings.

    forward  q_RHE, weights_RH, keys, page_table_NB, rows, top_k
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Rows, int], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.select import reference

    return Functions(reference.select)


def _triton() -> Functions:
    from zoo.common.ops.select import kernels

    return Functions(kernels.select)


CONTRACT = Contract(
    name="select",
    version=1,
    shapes="q_RHE, weights_RH, index keys packed [R, E] or paged [P, page, E] with a page table -> positions_RK (int32), ascending, -1 "
    "behind the last",
    reads={"q_RHE": PROGRAM, "weights_RH": PROGRAM, "keys.rows": PROGRAM},
    rounds="never: FP32 scores, which are not kept",
    adds="a head's score is q . k with the width ascending in one FP32 accumulator; relu; times the head's weight, rounded; heads by the "
    "adjacent-pair tree. No scale: a positive factor moves no choice. A row that sees at most top_k tokens takes all of them, unscored; "
    "else the top_k by descending score, the lower position first among equals, -0 as +0, NaN as -inf and "
    "the rows' flag set (`Rows.flag`, on the device): training asks behind the walk, the engine behind each push, both by "
    "`Rows.check_flags`, a ValueError",
    laws=("row", "split", "place", "repeat"),
    backward="none: integers have no gradient, and a published indexer is not trained",
    launch="training reads packed rows, serving reads pages; rows are scored in blocks, so no [R, R] scores are held; nothing is scored "
    "where no sequence can be longer than top_k",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
    history="keys",
    cached=_cached,
)


@observed(CONTRACT)
def select(q_RHE: Tensor, weights_RH: Tensor, keys: TokenRows, rows: Rows, top_k: int, *, program: Program) -> Tensor:
    """positions_RK: absolute positions of each row's own sequence, none beyond its own. ValueError if heads or widths differ."""
    if q_RHE.shape[:2] != weights_RH.shape:
        raise ValueError(f"select: queries have {tuple(q_RHE.shape[:2])} rows and heads, weights {tuple(weights_RH.shape)}")
    if q_RHE.shape[2] != keys.rows.shape[-1]:
        raise ValueError(f"select: queries of {q_RHE.shape[2]} columns, keys of {keys.rows.shape[-1]}")
    if top_k < 1:
        raise ValueError(f"select: top {top_k} of a row's tokens, it takes at least 1")
    function = CONTRACT.provider(program).functions.forward
    positions_RK: Tensor = function(q_RHE.detach(), weights_RH.detach(), keys.rows.detach(), keys.page_table_NB, rows, top_k)
    return positions_RK
