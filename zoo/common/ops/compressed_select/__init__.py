"""compressed_select: which compressed rows a row attends to, the best by a light score of all its heads together.

Source: the lightning indexer of DeepSeek Sparse Attention, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1, over rows of several tokens as
transformers' `DeepseekV4Indexer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from zoo.common.history import CompressedRows
from zoo.common.ops.contract import PROGRAM, Arguments, Cached, Contract, Provider, observed
from zoo.common.program import Program
from zoo.common.rows import Rows


def _cached(arguments: Arguments) -> dict[str, Cached]:
    return {"index": complete_rows(arguments["keys"].rows, arguments["keys"].tokens, arguments["rows"])}


def complete_rows(rows_RE: Tensor, tokens: int, rows: Rows) -> Cached:
    """The packed rows that say something, as a server caches them: those of tokens that complete one."""
    return Cached(rows_RE[(rows.positions_R + 1) % tokens == 0], tokens)


class Functions(NamedTuple):
    """What a provider brings.

    forward   q_RHE, weights_RH, keys, rows, top_k
    """

    forward: Callable[[Tensor, Tensor, CompressedRows, Rows, int], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.compressed_select import reference

    return Functions(reference.compressed_select)


def _triton() -> Functions:
    from zoo.common.ops.compressed_select import kernels

    return Functions(kernels.compressed_select)


CONTRACT = Contract(
    name="compressed_select",
    version=1,
    shapes="q_RHE, weights_RH, index keys, one for every W tokens, packed [R, E] or paged [P, page / W, E] with a page table -> "
    "chosen_RK (int32): places among the sequence's compressed rows, ascending, -1 behind the last",
    reads={"q_RHE": PROGRAM, "weights_RH": PROGRAM, "keys.rows": PROGRAM},
    rounds="never: FP32 scores, which are not kept",
    adds="select's scores and select's choice, over the (position + 1) // W rows that are complete: the token that completes a row sees it",
    laws=("row", "split", "place", "repeat"),
    backward="none: integers have no gradient, and a published indexer is not trained",
    launch="training reads packed rows, serving reads pages; rows are scored in blocks, so no [R, R] scores are held; nothing is scored "
    "where no sequence can have more than top_k rows",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
    history="keys",
    cached=_cached,
)


@observed(CONTRACT)
def compressed_select(q_RHE: Tensor, weights_RH: Tensor, keys: CompressedRows, rows: Rows, top_k: int, *, program: Program) -> Tensor:
    """chosen_RK, of each row's own sequence. ValueError if heads or widths differ."""
    if q_RHE.shape[:2] != weights_RH.shape:
        raise ValueError(f"compressed_select: queries have {tuple(q_RHE.shape[:2])} rows and heads, weights {tuple(weights_RH.shape)}")
    if q_RHE.shape[2] != keys.rows.shape[-1]:
        raise ValueError(f"compressed_select: queries of {q_RHE.shape[2]} columns, keys of {keys.rows.shape[-1]}")
    if top_k < 1:
        raise ValueError(f"compressed_select: top {top_k} of a sequence's rows, it takes at least 1")
    function = CONTRACT.provider(program).functions.forward
    chosen_RK: Tensor = function(q_RHE.detach(), weights_RH.detach(), keys, rows, top_k)
    return chosen_RK
