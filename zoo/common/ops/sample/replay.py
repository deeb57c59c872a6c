"""sample's steps, shared by the draw and by the trainer's replay from hidden rows, and that replay's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.common.ops.contract import CONTRACTS, OpFunction, closed_form
from zoo.common.ops.log_prob import CONTRACT as LOG_PROB
from zoo.common.ops.log_prob import logits
from zoo.common.ops.log_prob.backward import through_logits
from zoo.common.program import Program
from zoo.common.row_sampling import RowSampling

if TYPE_CHECKING:
    from zoo.common.ops.sample import Functions

# rows whose whole logits the replay holds at once
ROW_BLOCK = 128
# stands for a masked logit in the gradient: its probability is 0, and 0 times it is 0 (0 times -inf is not)
FAR = -1e30


def _functions(program: Program) -> Functions:
    found: Functions = CONTRACTS["sample"].provider(program).functions
    return found


def scale_logits(logits_RV: Tensor, rows: RowSampling) -> Tensor:
    """The same product as log_prob's; by 1.0 it changes no byte, so skipping it where all are 1.0 changes none either."""
    return logits_RV * rows.inverse_temperature_R[:, None] if rows.scales else logits_RV


def find_cut(scaled_RV: Tensor, lse_R: Tensor, rows: RowSampling, program: Program) -> tuple[Tensor, Tensor]:
    return _functions(program).cut(scaled_RV, lse_R, rows.top_k_R, rows.mass_limit_R, rows.min_p_R)


def restrict(scaled_RC: Tensor, cut: tuple[Tensor, Tensor], program: Program, first: int = 0, fill: float = -torch.inf) -> Tensor:
    return _functions(program).restrict(scaled_RC, *cut, first, fill)


def log_sum_exp(scaled_RV: Tensor, program: Program) -> Tensor:
    """log_prob's, without the score of a token: none is chosen yet, and each of these launches counts in a decode step."""
    return log_sum_exp_and_mean(scaled_RV, program)[0]


def log_sum_exp_and_mean(scaled_RV: Tensor, program: Program) -> tuple[Tensor, Tensor]:
    """log_prob's log-sum-exp and expected logit of rows."""
    provider = LOG_PROB.provider(program)
    lse_R, mean_R = provider.functions.merge_groups(*provider.functions.forward(scaled_RV, program.vocab_group))
    return lse_R, mean_R


def score_of(logits_RV: Tensor, lse_R: Tensor, token_R: Tensor) -> Tensor:
    """log_prob's last step, from a log-sum-exp that exists."""
    return torch.clamp(logits_RV.gather(1, token_R[:, None])[:, 0] - lse_R, max=0.0)


class ScoreFiltered(OpFunction):
    """(scores after the filters; log-sum-exp and entropy before them), all from one product with the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: RowSampling, program: Program
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for r in range(0, hidden.shape[0], ROW_BLOCK):
            block = slice(r, r + ROW_BLOCK)
            scaled = scale_logits(logits(hidden[block], weight, program=program), rows[block])
            lse, mean = log_sum_exp_and_mean(scaled, program)
            cut = find_cut(scaled, lse, rows[block], program)
            kept = restrict(scaled, cut, program)
            kept_lse = log_sum_exp(kept, program)
            found.append((score_of(kept, kept_lse, targets[block]), lse, mean, kept_lse, *cut))
        scored, lse, mean, kept_lse, logit, last = (torch.cat(blocks) for blocks in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, scored, lse, mean, kept_lse, logit, last)
        ctx.rows = rows
        ctx.program = program
        ctx.set_materialize_grads(False)
        return scored, lse, lse - mean

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None) -> Any:
        """By chunks of the vocabulary, as log_prob's; the cut is known, so no row's whole logits are needed again.

        What comes back through the scores and what comes through the plain distribution are gradients of their own, then added.
        """
        hidden, weight, targets, scored, lse, mean, kept_lse, logit, last = ctx.saved_tensors
        program = ctx.program
        rows = ctx.rows
        logit_grad = _functions(program).backward
        none = torch.zeros_like(scored)
        parts = []
        if grad is not None:
            upstream = torch.where(scored == -torch.inf, 0.0, grad)

            def through_kept(row: slice, first: int, part: Tensor) -> Tensor:
                scaled = scale_logits(logits(hidden[row], part, program=program), rows[row])
                kept = restrict(scaled, (logit[row], last[row]), program, first, FAR)
                grads = (upstream[row], none[row], none[row])
                return logit_grad(
                    kept, kept_lse[row], none[row], targets[row] - first, *grads, rows.inverse_temperature_R[row], hidden.dtype
                )

            parts.append(through_logits(hidden, weight, ctx.needs_input_grad[:2], through_kept))
        if grad_lse is not None or grad_entropy is not None:
            of_lse, of_entropy = (none if g is None else g for g in (grad_lse, grad_entropy))
            inverse = rows.inverse_temperature_or_none()

            def through_plain(row: slice, first: int, part: Tensor) -> Tensor:
                scaled = scale_logits(logits(hidden[row], part, program=program), rows[row])
                grads = (none[row], of_lse[row], of_entropy[row])
                scale = None if inverse is None else inverse[row]
                return logit_grad(scaled, lse[row], mean[row], targets[row] - first, *grads, scale, hidden.dtype)

            parts.append(through_logits(hidden, weight, ctx.needs_input_grad[:2], through_plain))
        grad_hidden, grad_weight = (None if of[0] is None else sum(of[1:], of[0]) for of in zip(*parts, strict=True))
        return grad_hidden, grad_weight, None, None, None
