"""log_prob: FP32 log-probabilities of chosen tokens, straight from hidden rows, by at most 2^26 logits (256 MiB) at a time.

So [R, V] is held whole for few rows only, those of up to 2^26 logits; of more rows it never is.

Source: log softmax by a shifted log-sum-exp, Blanchard, D. Higham and N. Higham 2021, "Accurately computing the log-sum-exp and softmax
functions", IMA Journal of Numerical Analysis 41(4), section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.ops.contract import INTEGERS, PROGRAM, WIDE, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.ops.linear import head_product
from zoo.common.ops.log_prob.backward import ROW_CHUNK, VOCABULARY_CHUNK, through_logits
from zoo.common.program import Program

# few rows take the whole vocabulary at once, while that holds no more than a chunk does: 2^26 logits, 256 MiB in FP32
WHOLE_LOGITS = ROW_CHUNK * VOCABULARY_CHUNK


class Functions(NamedTuple):
    """What a provider brings.

    forward       logits_RV, group
    backward      logits_RC, lse_R, mean_R, local_R, grad_R, grad_lse_R, grad_entropy_R, inverse_temperature_R, dtype
    chunk_stats   logits_RC, first, targets_R, group, stats, selected_R
    merge_groups  peak_RG, mass_RG, mean_RG
    """

    forward: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    chunk_stats: Callable[[Tensor, int, Tensor, int, tuple[Tensor, Tensor, Tensor], Tensor], None]
    merge_groups: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.log_prob import reference

    return Functions(reference.group_stats, reference.logit_grad, reference.chunk_stats, reference.merge_groups)


def _triton() -> Functions:
    from zoo.common.ops.log_prob import kernels

    return Functions(kernels.group_stats, kernels.logit_grad, kernels.chunk_stats, kernels.merge_groups)


CONTRACT = Contract(
    name="log_prob",
    version=1,
    shapes="hidden_RD, weight_VD (the program's dtype), targets_R -> FP32 [R], at most 0",
    reads={
        "hidden_RD": PROGRAM,
        "weight_VD": PROGRAM,
        "targets_R": INTEGERS,
        "ids_K": INTEGERS,
        "inverse_temperature_R": WIDE,
        "logits_RV": WIDE,
        "lse_R": WIDE,
    },
    rounds="never: FP32 logits from the linear contract, FP32 after",
    adds="per group of 256 logits the maximum m and the adjacent-pair tree of exp(x - m), a ragged last group padded with -inf; groups by "
    "the tree over l * exp(m - max), padded with +0; log-probability = min(logit - (max + log(sum)), 0)",
    laws=("row", "place", "shard", "fusion", "repeat"),
    backward="d logits = (onehot - p) g / temperature, rounded to the program's dtype by vocabulary chunk, then the two products; logits "
    "are recomputed, chunks added in FP32",
    launch="at most 2^26 logits (256 MiB) are made at once: of up to 4096 rows all columns where that is no more, else 16384 at a time, as "
    "the gradient always takes them, so [R, V] is never held but for few rows; decode samples from its logits and holds them all",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "group_tree", "cuda", _triton, defining=True),
    ),
)


def head_shapes(vocabulary: int, hidden: int) -> set[tuple[int, ...]]:
    """The linear shapes of a vocabulary head: whole in decode, by chunks in scoring (they are made here by the linear contract)."""
    widths = {vocabulary, min(vocabulary, VOCABULARY_CHUNK), vocabulary % VOCABULARY_CHUNK or VOCABULARY_CHUNK}
    return {(width, hidden, 1) for width in widths if width <= vocabulary}


@dataclass(frozen=True)
class TokenScores:
    """FP32 [R] each: log-probability of the target, log-sum-exp of the (scaled) logits, entropy in nats (None unless asked)."""

    log_prob_R: Tensor
    lse_R: Tensor
    entropy_R: Tensor | None = None


def _logits(hidden: Tensor, weight: Tensor, inverse_temperature: Tensor | None, program: Program) -> Tensor:
    logits = head_product(hidden, weight, program)
    return logits if inverse_temperature is None else logits * inverse_temperature[:, None]


class _LogProb(OpFunction):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: Tensor | None, program: Program, provider: Provider
    ) -> Any:
        rows = hidden.shape[0]
        vocabulary = weight.shape[0]
        group = program.vocab_group
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        selected = torch.zeros(rows, dtype=accumulate, device=hidden.device)
        lse = torch.empty_like(selected)
        mean = torch.empty_like(selected)
        for r in range(0, rows, ROW_CHUNK):
            row = slice(r, min(r + ROW_CHUNK, rows))
            temperature = None if inverse_temperature is None else inverse_temperature[row]
            # a buffer each: slices of one would be aligned by the row count, and each alignment compiles again
            stats = tuple(selected.new_empty(row.stop - r, -(-vocabulary // group)) for _ in range(3))
            columns = vocabulary if (row.stop - r) * vocabulary <= WHOLE_LOGITS else VOCABULARY_CHUNK
            for c in range(0, vocabulary, columns):
                logits = _logits(hidden[row], weight[c : c + columns], temperature, program)
                provider.functions.chunk_stats(logits, c, targets[row], group, stats, selected[row])
            lse[row], mean[row] = provider.functions.merge_groups(*stats)
        ctx.save_for_backward(hidden, weight, targets, inverse_temperature, lse, mean)
        ctx.program = program
        ctx.functions = provider.functions
        return torch.clamp(selected - lse, max=0.0), lse, lse - mean

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor, grad_entropy: Tensor) -> Any:
        hidden, weight, targets, inverse_temperature, lse, mean = ctx.saved_tensors
        functions: Functions = ctx.functions
        logit_grad = functions.backward

        def grad_of_logits(row: slice, first: int, part: Tensor) -> Tensor:
            scale = None if inverse_temperature is None else inverse_temperature[row]
            logits = _logits(hidden[row], part, scale, ctx.program)
            grads = (grad[row], grad_lse[row], grad_entropy[row])
            return logit_grad(logits, lse[row], mean[row], targets[row] - first, *grads, scale, hidden.dtype)

        return *through_logits(hidden, weight, ctx.needs_input_grad[:2], grad_of_logits), None, None, None, None


@observed(CONTRACT)
def log_prob(
    hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, *, program: Program, inverse_temperature_R: Tensor | None = None
) -> TokenScores:
    """Scores of `targets_R` after each row; logits are multiplied by `inverse_temperature_R` (FP32) if it is given."""
    provider = CONTRACT.provider(program)
    return TokenScores(*_LogProb.run(hidden_RD, weight_VD, targets_R, inverse_temperature_R, program, provider))


@observed(CONTRACT, step="logits")
def logits(hidden_RD: Tensor, weight_VD: Tensor, *, program: Program, inverse_temperature_R: Tensor | None = None) -> Tensor:
    """FP32 logits [R, V] of a decode batch, the same bytes that `log_prob` reduces."""
    return _logits(hidden_RD, weight_VD, inverse_temperature_R, program)


@observed(CONTRACT)
def log_prob_of_logits(logits_RV: Tensor, targets_R: Tensor, *, program: Program) -> TokenScores:
    """The same scores from FP32 logits that already exist (decode; masked entries are -inf)."""
    provider = CONTRACT.provider(program)
    lse, mean = provider.functions.merge_groups(*provider.functions.forward(logits_RV, program.vocab_group))
    selected = logits_RV.gather(1, targets_R[:, None])[:, 0]
    return TokenScores(torch.clamp(selected - lse, max=0.0), lse, lse - mean)
