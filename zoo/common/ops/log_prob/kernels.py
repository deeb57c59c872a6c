"""log_prob on CUDA: group reductions, their merge, and the gradient of a chunk of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width

LOGITS_EACH = 2048  # of a program that reduces groups
BLOCK = 1024


@triton.jit
def _group_stats(
    logits_ptr,
    targets_ptr,
    selected_ptr,
    peak_ptr,
    mass_ptr,
    mean_ptr,
    row_stride,
    width,
    first,
    groups,
    SELECT: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TILE groups of one row; columns beyond the row's end or the group's are -inf. `first`: the chunk's first column of all."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + lane[None, :]
    x = tl.load(logits_ptr + row * row_stride + column, mask=(column < width) & (lane[None, :] < GROUP), other=-float("inf"))
    peak = tl.max(x, axis=1)
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp(x - safe[:, None])
    mass = pair_tree(weight, BLOCK)
    mean = pair_tree(weight * tl.where(x == -float("inf"), 0.0, x), BLOCK)
    place = row * groups + first // GROUP + group
    tl.store(peak_ptr + place, peak, mask=group * GROUP < width)
    tl.store(mass_ptr + place, mass, mask=group * GROUP < width)
    tl.store(mean_ptr + place, mean, mask=group * GROUP < width)
    if SELECT:
        local = tl.load(targets_ptr + row) - first
        mine = (local >= 0) & (local < width) & (tl.program_id(1) == 0)
        tl.store(selected_ptr + row, tl.load(logits_ptr + row * row_stride + local, mask=mine, other=0.0), mask=mine)


def group_stats(logits_RV: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per group of columns: the maximum, the sum of exp(x - max), the sum of exp(x - max) * x, FP32 [R, groups] each."""
    peak = logits_RV.new_empty(logits_RV.shape[0], triton.cdiv(logits_RV.shape[1], group))
    stats = peak, torch.empty_like(peak), torch.empty_like(peak)
    _write_stats(logits_RV, 0, None, group, stats, None)
    return stats


def chunk_stats(
    logits_RC: Tensor, first: int, targets_R: Tensor, group: int, stats: tuple[Tensor, Tensor, Tensor], selected_R: Tensor
) -> None:
    """Writes `group_stats` of columns `first` .. into their places in `stats`, and the targets' logits among them into `selected_R`."""
    assert first % group == 0, f"column {first} starts no group of {group}"
    _write_stats(logits_RC, first, targets_R.contiguous(), group, stats, selected_R)


def _write_stats(
    logits: Tensor, first: int, targets: Tensor | None, group: int, stats: tuple[Tensor, ...], selected: Tensor | None
) -> None:
    rows, width = logits.shape
    if logits.numel():
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        block = padded_width(group)
        tile = max(1, LOGITS_EACH // block)
        _group_stats[(rows, triton.cdiv(triton.cdiv(width, group), tile))](
            logits,
            targets,
            selected,
            *stats,
            logits.stride(0),
            width,
            first,
            stats[0].shape[1],
            SELECT=targets is not None,
            GROUP=group,
            TILE=tile,
            BLOCK=block,
            num_warps=4,
            **EXACT,
        )


@triton.jit
def _merge_groups(peak_ptr, mass_ptr, mean_ptr, lse_ptr, expected_ptr, groups, BLOCK: tl.constexpr):
    """lse = peak + log(sum_g mass_g exp(peak_g - peak)), and the expected logit sum_g mean_g exp(peak_g - peak) / the same sum."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK)
    mask = group < groups
    peaks = tl.load(peak_ptr + row * groups + group, mask=mask, other=-float("inf"))
    masses = tl.load(mass_ptr + row * groups + group, mask=mask, other=0.0)
    means = tl.load(mean_ptr + row * groups + group, mask=mask, other=0.0)
    peak = tl.max(peaks, axis=0)
    scale = tl.exp(peaks - peak)
    mass = pair_tree(masses * scale, BLOCK)
    tl.store(lse_ptr + row, peak + tl.log(mass))
    tl.store(expected_ptr + row, tl.div_rn(pair_tree(means * scale, BLOCK), mass))


def merge_groups(peak_RG: Tensor, mass_RG: Tensor, mean_RG: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp, expected logit), FP32 [R] each, from the groups' (max, sum of exp, sum of exp * logit)."""
    rows, groups = peak_RG.shape
    lse = peak_RG.new_empty(rows)
    expected = torch.empty_like(lse)
    if rows:
        stats = (t.contiguous() for t in (peak_RG, mass_RG, mean_RG))
        _merge_groups[(rows,)](*stats, lse, expected, groups, BLOCK=padded_width(groups), num_warps=4, **EXACT)
    return lse, expected


@triton.jit
def _logit_grad(
    logits_ptr,
    lse_ptr,
    mean_ptr,
    local_ptr,
    grad_ptr,
    grad_lse_ptr,
    grad_entropy_ptr,
    temperature_ptr,
    out_ptr,
    row_stride,
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d x = p (d lse - d log_prob) - p (x - expected) d entropy, and d log_prob more at the target; p = exp(x - lse)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(logits_ptr + row * row_stride + column, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + row)
    p = tl.exp(x - tl.load(lse_ptr + row))
    out = p * (tl.load(grad_lse_ptr + row) - grad) - p * (x - tl.load(mean_ptr + row)) * tl.load(grad_entropy_ptr + row)
    out = tl.where(column == tl.load(local_ptr + row), out + grad, out)
    if SCALED:
        out = out * tl.load(temperature_ptr + row)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def logit_grad(
    logits_RC: Tensor,
    lse_R: Tensor,
    mean_R: Tensor,
    local_R: Tensor,
    grad_R: Tensor,
    grad_lse_R: Tensor,
    grad_entropy_R: Tensor,
    inverse_temperature_R: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """d logits of one vocabulary chunk in `dtype`; a target outside the chunk has no one-hot term there."""
    rows, width = logits_RC.shape
    out = logits_RC.new_empty(rows, width, dtype=dtype)
    if out.numel():
        logits = logits_RC if logits_RC.stride(1) == 1 else logits_RC.contiguous()
        temperature = lse_R if inverse_temperature_R is None else inverse_temperature_R
        per_row = (t.contiguous() for t in (lse_R, mean_R, local_R, grad_R, grad_lse_R, grad_entropy_R, temperature))
        scaled = inverse_temperature_R is not None
        _logit_grad[(rows, triton.cdiv(width, BLOCK))](
            logits, *per_row, out, logits.stride(0), width, SCALED=scaled, BLOCK=BLOCK, num_warps=4, **EXACT
        )
    return out
