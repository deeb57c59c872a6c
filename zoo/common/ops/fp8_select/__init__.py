"""fp8_select: which of the earlier tokens a row attends to, by the light score of `select` on E4M3 codes.

The head weights carry the queries' scales, and an index key has one FP32 scale. The order of a score is that of DeepGEMM's two scorers
for Hopper, whose bytes are equal at every row count and page order: rows "scores" of benchmarks.library_classes.

Sources: the lightning indexer of DeepSeek Sparse Attention, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1, and the public DeepGEMM.
SGLang, which serves GLM-5 so, multiplies keys by the reciprocal of their scale where `fp8_quantise` divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from zoo.common.history import CodedRows
from zoo.common.ops.contract import FLOAT32, FP8, PROGRAM, Arguments, Cached, Contract, Provider, observed
from zoo.common.ops.fp8_quantise import GROUP
from zoo.common.program import Program
from zoo.common.rows import Rows


def _shape(arguments: Arguments) -> tuple[int, ...]:
    _, heads, width = arguments["q_RHE"].shape
    return heads, width


def _cached(arguments: Arguments) -> dict[str, Cached]:
    keys: CodedRows = arguments["keys"]
    return {"index_codes": Cached(keys.codes), "index_scales": Cached(keys.scales)}


def _scored_by_deepgemm(heads: int, width: int) -> bool:
    return heads in (32, 64) and width == 128


class Functions(NamedTuple):
    """What a provider brings.

    forward  q_RHE, weights_RH, keys, rows, top_k
    """

    forward: Callable[[Tensor, Tensor, CodedRows, Rows, int], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.fp8_select import reference

    return Functions(reference.select)


def _deepgemm() -> Functions:
    from zoo.common.ops.fp8_select import kernels

    return Functions(kernels.select_deepgemm)


def _triton() -> Functions:
    from zoo.common.ops.fp8_select import kernels

    return Functions(kernels.select_triton)


CONTRACT = Contract(
    name="fp8_select",
    version=1,
    shapes="q_RHE, weights_RH, index keys' codes float8_e4m3fn packed [R, E] or paged [P, page, E] and scales [R, 1] or [P, page, 1], "
    "with a page table -> positions_RK (int32), ascending, -1 behind the last; E at most 128",
    reads={"q_RHE": PROGRAM, "weights_RH": PROGRAM, "keys.codes": FP8, "keys.scales": FLOAT32},
    rounds="a query head to codes by fp8_quantise with scales that are powers of two; its weight twice, times H^-0.5 and times its scale "
    "and E^-0.5; a pair of partial sums times the key's scale once. FP32 scores, which are not kept",
    adds="a head's score is q . k of the codes with the width ascending (CUDA: the tensor core's own accumulator, narrower than FP32); "
    "below zero, and of a code that is NaN, it is 0. Head 8 g + 2 t + b goes to partial (t, b), g ascending: the first weighted score is "
    "rounded, each next one joins by an FMA. Partials (t, 0) and (t, 1) are added and multiplied by the key's scale; the four are added "
    "as (0 + 1) + (2 + 3). A row that sees at most top_k tokens takes all of them, unscored; else the top_k by descending score, the "
    "lower position first among equals, -0 as +0, NaN as -inf and the rows' flag set (`Rows.flag`), as in select. Class deepgemm_scores is "
    "DeepGEMM's compiled order, which is close to this one: of its scores 4 to 10 % differ from those of class lane_sums in a last bit",
    laws=("row", "split", "place", "repeat"),
    backward="none: integers have no gradient, and a published indexer is not trained",
    launch="training scores packed rows by DeepGEMM's packed kernel, a decode step by its paged one where pages of 64 tokens keep a page's "
    "codes before its scales; other pages are packed first. Rows are scored in blocks, so no [R, R] scores are held. Triton scores all "
    "other shapes, by the same rule and to other bytes: another class, which a program names by heads and width",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("deepgemm", "deepgemm_scores", "cuda", _deepgemm, needs=("deep_gemm",), serves=_scored_by_deepgemm, defining=True),
        Provider("triton", "lane_sums", "cuda", _triton, defining=True),
    ),
    shape=_shape,
    history="keys",
    cached=_cached,
)


@observed(CONTRACT)
def fp8_select(q_RHE: Tensor, weights_RH: Tensor, keys: CodedRows, rows: Rows, top_k: int, *, program: Program) -> Tensor:
    """positions_RK: absolute positions of each row's own sequence, none beyond its own.

    ValueError if heads or widths differ, if a head is wider than one group of the quantiser, and unless a key has one scale.
    """
    heads, width = q_RHE.shape[1:]
    if q_RHE.shape[:2] != weights_RH.shape:
        raise ValueError(f"fp8_select: queries have {tuple(q_RHE.shape[:2])} rows and heads, weights {tuple(weights_RH.shape)}")
    if width != keys.codes.shape[-1]:
        raise ValueError(f"fp8_select: queries of {width} columns, keys of {keys.codes.shape[-1]}")
    if width > GROUP:
        raise ValueError(f"fp8_select: heads of {width} columns, one scale serves at most {GROUP}")
    if keys.scales.shape != (*keys.codes.shape[:-1], 1):
        raise ValueError(f"fp8_select: keys {tuple(keys.codes.shape)} have scales {tuple(keys.scales.shape)}, not one each")
    if top_k < 1:
        raise ValueError(f"fp8_select: top {top_k} of a row's tokens, it takes at least 1")
    forward = CONTRACT.provider(program, (heads, width)).functions.forward
    given = CodedRows(keys.codes.detach(), keys.scales.detach(), keys.page_table_NB)
    return forward(q_RHE.detach(), weights_RH.detach(), given, rows, top_k)
