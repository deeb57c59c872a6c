"""sample: which tokens may be drawn, the draw, and its log-probability; the trainer replays the last from hidden rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.ops.contract import Contract, Provider, observed
from zoo.common.ops.log_prob import ROW_CHUNK, VOCABULARY_CHUNK, log_prob, log_prob_of_logits, logits
from zoo.common.ops.sample.reference import MASS_ONE, NO_CUT
from zoo.common.program import Program

if TYPE_CHECKING:
    from zoo.common.sampling import RowSampling

__all__ = ["CONTRACT", "MASS_ONE", "NO_CUT", "Drawn", "sample", "score_filtered", "support"]

# rows whose whole logits the replay holds at once
ROW_BLOCK = 128
# stands for a masked logit in the gradient: its probability is 0, and 0 times it is 0 (0 times -inf is not)
FAR = -1e30

_GRAD = "zoo.common.ops.log_prob.{}:logit_grad"

CONTRACT = Contract(
    name="sample",
    version=1,
    shapes="FP32 logits_RV, one set of parameters per row (RowSampling) -> token_R int64, FP32 log-probabilities [R] before and "
    "after the filters, at most 0; -inf outside the support",
    rounds="x = logit * FP32 1/temperature; p = exp(x - lse); noise -log(-log(u)), u an odd 24-bit integer over 2^24; all FP32",
    adds="mass as int64, p * 2^60 truncated, so every order gives one cut; ranks by descending x, lower id first (-0 is +0, NaN "
    "ranks as -inf); stays: rank < k and mass before it <= floor(top_p * 2^60) and not behind the last token with p >= min_p * "
    "max p; both log-sum-exps by log_prob's tree, over x with -inf outside the support; token = argmax of x + noise, lower id "
    "first among equals; noise: Philox4x32-10, key seed, counter (id without bits 10, 11; position low; position high; 0), these "
    "two bits choose the word",
    laws=("row", "place", "fusion", "repeat"),
    backward="log_prob's on the kept tokens; the support is a constant; a target outside it gives no gradient",
    launch="filters and temperature are skipped where the host knows that no row has them; the replay holds 128 rows' logits",
    providers=(
        Provider("reference", "reference", "cpu", f"{__name__}.reference:draw", _GRAD.format("reference"), defining=True),
        Provider("triton", "fixed_point", "cuda", f"{__name__}.kernels:draw", _GRAD.format("kernels"), defining=True),
    ),
)  # fmt: skip


class Drawn(NamedTuple):
    """token_R int64; FP32 [R] log-probability of it after the temperature only, and after the filters too (equal without any)."""

    token_R: Tensor
    log_prob_R: Tensor
    filtered_log_prob_R: Tensor


def _scaled(logits_RV: Tensor, rows: RowSampling) -> Tensor:
    """The same product as log_prob's; by 1.0 it changes no byte, so skipping it where all are 1.0 changes none either."""
    return logits_RV * rows.inverse_temperature_R[:, None] if rows.scales else logits_RV


def _cut(scaled_RV: Tensor, lse_R: Tensor, rows: RowSampling, program: Program) -> tuple[Tensor, Tensor]:
    return CONTRACT.provider(program).function("cut")(scaled_RV, lse_R, rows.top_k_R, rows.mass_limit_R, rows.min_p_R)


def _restrict(
    scaled_RC: Tensor, cut: tuple[Tensor, Tensor], program: Program, first: int = 0, fill: float = -torch.inf
) -> Tensor:
    return CONTRACT.provider(program).function("restrict")(scaled_RC, *cut, first, fill)


def _lse(scaled_RV: Tensor, program: Program) -> Tensor:
    return log_prob_of_logits(scaled_RV, torch.zeros_like(scaled_RV[:, 0], dtype=torch.int64), program=program).lse_R


def _score(logits_RV: Tensor, lse_R: Tensor, token_R: Tensor) -> Tensor:
    """log_prob's last step, from a log-sum-exp that exists."""
    return torch.clamp(logits_RV.gather(1, token_R[:, None])[:, 0] - lse_R, max=0.0)


def support(scaled_RV: Tensor, lse_R: Tensor, rows: RowSampling, program: Program) -> Tensor:
    """Bool [R, V]: the tokens that stay. `scaled_RV` are logits after the temperature, `lse_R` log_prob's log-sum-exp of them.

    A NaN logit stays, so that the row's log-probability shows it.
    """
    marked = _restrict(scaled_RV, _cut(scaled_RV, lse_R, rows, program), program, fill=torch.nan)
    return ~marked.isnan() | scaled_RV.isnan()


@observed(CONTRACT)
def sample(logits_RV: Tensor, rows: RowSampling, program: Program) -> Drawn:
    """Draws one token per row from FP32 logits (of `logits`, before any temperature). No host synchronisation, fixed shapes.

    A row with a NaN logit reports NaN log-probabilities.
    """
    scaled = kept = _scaled(logits_RV, rows)
    lse = kept_lse = _lse(scaled, program)
    if rows.filters:
        kept = _restrict(scaled, _cut(scaled, lse, rows, program), program)
        kept_lse = _lse(kept, program)
    token = CONTRACT.provider(program).function("forward")(kept, rows.seed_R, rows.position_R, rows.greedy_R)
    scored = _score(scaled, lse, token)
    return Drawn(token, scored, _score(kept, kept_lse, token) if rows.filters else scored)


class _ScoreFiltered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: RowSampling, program: Program) -> Tensor:
        scored, kept_lse, logit, last = [], [], [], []
        for r in range(0, hidden.shape[0], ROW_BLOCK):
            block = slice(r, r + ROW_BLOCK)
            scaled = _scaled(logits(hidden[block], weight, program=program), rows[block])
            cut = _cut(scaled, _lse(scaled, program), rows[block], program)
            kept = _restrict(scaled, cut, program)
            kept_lse.append(_lse(kept, program))
            scored.append(_score(kept, kept_lse[-1], targets[block]))
            logit.append(cut[0])
            last.append(cut[1])
        out = torch.cat(scored)
        ctx.save_for_backward(hidden, weight, targets, out, torch.cat(kept_lse), torch.cat(logit), torch.cat(last))
        ctx.rows, ctx.program = rows, program
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """log_prob's walk over chunks of the vocabulary; the cut is known, so no row's whole logits are needed again."""
        hidden, weight, targets, scored, lse, logit, last = ctx.saved_tensors
        program, rows = ctx.program, ctx.rows
        grad_of_logits = CONTRACT.provider(program).function("backward")
        grad = torch.where(scored == -torch.inf, 0.0, grad)
        none = torch.zeros_like(grad)
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total_hidden = torch.zeros(hidden.shape, dtype=accumulate, device=hidden.device) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for c in range(0, weight.shape[0], VOCABULARY_CHUNK):
            part = weight[c : c + VOCABULARY_CHUNK]
            total_weight = torch.zeros(part.shape, dtype=accumulate, device=weight.device) if needs_weight else None
            for r in range(0, hidden.shape[0], ROW_CHUNK):
                b = slice(r, r + ROW_CHUNK)
                scaled = _scaled(logits(hidden[b], part, program=program), rows[b])
                kept = _restrict(scaled, (logit[b], last[b]), program, c, FAR)
                scale = rows.inverse_temperature_R[b]
                d_logits = grad_of_logits(kept, lse[b], none[b], targets[b] - c, grad[b], none[b], none[b], scale, hidden.dtype)
                if total_hidden is not None:
                    total_hidden[b] += d_logits @ part
                if total_weight is not None:
                    total_weight += d_logits.T @ hidden[b]
            if grad_weight is not None and total_weight is not None:
                grad_weight[c : c + VOCABULARY_CHUNK] = total_weight
        return None if total_hidden is None else total_hidden.to(hidden.dtype), grad_weight, None, None, None


@observed(CONTRACT)
def score_filtered(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, rows: RowSampling, program: Program) -> Tensor:
    """FP32 [R] log-probabilities of `targets_R` after temperature and filters: the bytes that `sample` reported for these rows.

    -inf where a target is outside the support. Differentiable in hidden and weight, with the support held constant.
    ValueError if the counts of rows differ.
    """
    if not hidden_RD.shape[0] == targets_R.shape[0] == rows.count:
        raise ValueError(
            f"score_filtered: {hidden_RD.shape[0]} hidden rows, {targets_R.shape[0]} targets, {rows.count} parameters"
        )
    if not rows.filters or rows.count == 0:
        scale = rows.inverse_temperature_or_none()
        return log_prob(hidden_RD, weight_VD, targets_R, program=program, inverse_temperature_R=scale).log_prob_R
    return _ScoreFiltered.apply(hidden_RD, weight_VD, targets_R, rows, program)
