"""sample: which tokens may be drawn, the draw, and its log-probability; the trainer replays the last from hidden rows.

Sources: top-k, Fan, Lewis and Dauphin 2018 (arXiv 1805.04833), section 5.4; top-p, Holtzman et al. 2019 (arXiv 1904.09751);
min-p, Nguyen et al. 2024 (arXiv 2407.01082); the draw by Gumbel noise, Maddison, Tarlow and Minka 2014 (arXiv 1411.0030); the
noise's bits, Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.common.ops.contract import INTEGERS, PROGRAM, WIDE, Contract, Provider, observed
from zoo.common.ops.log_prob import TokenScores, log_prob
from zoo.common.ops.sample.replay import ScoreFiltered, find_cut, log_sum_exp, restrict, scale_logits, score_of
from zoo.common.program import Program
from zoo.common.row_sampling import RowSampling

__all__ = ["CONTRACT", "Drawn", "sample", "score_filtered", "support"]


class Functions(NamedTuple):
    """What a provider brings.

    forward   logits_RV, seed_R, position_R, greedy_R
    backward  logits_RC, lse_R, mean_R, local_R, grad_R, grad_lse_R, grad_entropy_R, inverse_temperature_R, dtype
    cut       logits_RV, lse_R, top_k_R, mass_limit_R, min_p_R
    restrict  logits_RC, logit_R, last_R, first, fill
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    cut: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    restrict: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.log_prob.reference import logit_grad
    from zoo.common.ops.sample import reference

    return Functions(reference.draw, logit_grad, reference.cut, reference.restrict)


def _triton() -> Functions:
    from zoo.common.ops.log_prob.kernels import logit_grad
    from zoo.common.ops.sample import kernels

    return Functions(kernels.draw, logit_grad, kernels.cut, kernels.restrict)


CONTRACT = Contract(
    name="sample",
    version=1,
    shapes="FP32 logits_RV, one set of parameters per row (RowSampling) -> token_R int64, FP32 log-probabilities [R] before and "
    "after the filters, at most 0; -inf outside the support",
    reads={"logits_RV": WIDE, "hidden_RD": PROGRAM, "weight_VD": PROGRAM, "targets_R": INTEGERS},
    rounds="x = logit * FP32 1/temperature; p = exp(x - lse); noise -log(-log(u)), u an odd 24-bit integer over 2^24; all FP32",
    adds="mass as int64, p * 2^60 truncated, so every order gives one cut; ranks by descending x, lower id first (-0 is +0, NaN "
    "ranks as -inf); stays: rank < k and mass before it <= floor(top_p * 2^60) and not behind the last token with p >= min_p * "
    "max p; both log-sum-exps by log_prob's tree, over x with -inf outside the support; token = argmax of x + noise, lower id "
    "first among equals; noise: Philox4x32-10, key seed, counter (id without bits 10, 11; position low; position high; 0), these "
    "two bits choose the word",
    laws=("row", "place", "fusion", "repeat"),
    backward="log_prob's on the kept tokens; the support is a constant; a target outside it gives no gradient",
    launch="filters and temperature are skipped where the host knows that no row has them; more programs share a row where there are few "
    "rows (CUDA); the replay holds 128 rows' logits",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "fixed_point", "cuda", _triton, defining=True),
    ),
)


class Drawn(NamedTuple):
    """token_R int64; FP32 [R] log-probability of it after the temperature only, and after the filters too (equal without any)."""

    token_R: Tensor
    log_prob_R: Tensor
    filtered_log_prob_R: Tensor


def support(scaled_RV: Tensor, lse_R: Tensor, rows: RowSampling, program: Program) -> Tensor:
    """Bool [R, V]: the tokens that stay. `scaled_RV` are logits after the temperature, `lse_R` log_prob's log-sum-exp of them.

    A NaN logit stays, so that the row's log-probability shows it.
    """
    marked = restrict(scaled_RV, find_cut(scaled_RV, lse_R, rows, program), program, fill=torch.nan)
    return ~marked.isnan() | scaled_RV.isnan()


@observed(CONTRACT)
def sample(logits_RV: Tensor, rows: RowSampling, program: Program) -> Drawn:
    """Draws one token per row from FP32 logits (of `logits`, before any temperature). No host synchronisation, fixed shapes.

    A row with a NaN logit reports NaN log-probabilities. ValueError if a row that is not greedy has no seed.
    """
    if not rows.seeded:
        raise ValueError("a token is drawn with its request's seed, and SamplingParams(seed=None) of one of the rows has none")
    scaled = kept = scale_logits(logits_RV, rows)
    lse = kept_lse = log_sum_exp(scaled, program)
    if rows.filters:
        kept = restrict(scaled, find_cut(scaled, lse, rows, program), program)
        kept_lse = log_sum_exp(kept, program)
    token = CONTRACT.provider(program).functions.forward(kept, rows.seed_R, rows.position_R, rows.greedy_R)
    scored = score_of(scaled, lse, token)
    return Drawn(token, scored, score_of(kept, kept_lse, token) if rows.filters else scored)


@observed(CONTRACT)
def score_filtered(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, rows: RowSampling, program: Program) -> TokenScores:
    """Log-probabilities of `targets_R` after temperature and filters: the bytes that `sample` reported for these rows.

    -inf where a target is outside the support. lse_R and entropy_R are of the distribution before the filters, as `log_prob` has
    them, from the same logits. Differentiable in hidden and weight, with the support held constant.
    ValueError if the counts of rows differ.
    """
    if not hidden_RD.shape[0] == targets_R.shape[0] == rows.count:
        raise ValueError(f"score_filtered: {hidden_RD.shape[0]} hidden rows, {targets_R.shape[0]} targets, {rows.count} parameters")
    if not rows.filters or rows.count == 0:
        scale = rows.inverse_temperature_or_none()
        return log_prob(hidden_RD, weight_VD, targets_R, program=program, inverse_temperature_R=scale)
    return TokenScores(*ScoreFiltered.run(hidden_RD, weight_VD, targets_R, rows, program))
