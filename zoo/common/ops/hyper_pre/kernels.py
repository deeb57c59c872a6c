"""hyper_pre on CUDA: the streams' product by linear's FP32 kernel, the coefficients of a row in one program, the collapse by columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.linear.kernels import linear_fp32
from zoo.common.ops.tree_kernels import EXACT, pair_tree, pair_tree_first
from zoo.common.ops.trees import padded_width
from zoo.common.program import split_k

if TYPE_CHECKING:
    from zoo.common.ops.hyper_pre import Sinkhorn


@triton.jit
def sigmoid(x, N: tl.constexpr):
    """1 / (1 + exp(-x)) of [N], the division as IEEE has it."""
    return tl.div_rn(tl.full((N,), 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def inverse_root(x_ptr, row, eps, inverse_width, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One over the root of a row's mean square plus eps."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(tl.reshape(pair_tree(tl.reshape(x * x, (1, BLOCK)), BLOCK), (1,)), axis=0) * inverse_width + eps)


@triton.jit
def _coefficients(
    x_ptr,
    dot_ptr,
    base_ptr,
    scale_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    eps,
    floor,
    inverse_width,
    ROUNDS: tl.constexpr,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """pre = sigmoid + floor, post = 2 sigmoid, comb = Sinkhorn's divisions of a softmax, of one row's mix."""
    row = tl.program_id(0).to(tl.int64)
    root = inverse_root(x_ptr, row, eps, inverse_width, WIDTH, BLOCK)
    stream = tl.arange(0, BLOCK_S)
    live = stream < STREAMS
    dots = dot_ptr + row * ((2 + STREAMS) * STREAMS)
    first = tl.load(dots + stream, mask=live, other=0.0) * root
    second = tl.load(dots + STREAMS + stream, mask=live, other=0.0) * root
    pre = sigmoid(first * tl.load(scale_ptr) + tl.load(base_ptr + stream, mask=live, other=0.0), BLOCK_S) + floor
    post = 2.0 * sigmoid(second * tl.load(scale_ptr + 1) + tl.load(base_ptr + STREAMS + stream, mask=live, other=0.0), BLOCK_S)
    tl.store(pre_ptr + row * STREAMS + stream, pre, mask=live)
    tl.store(post_ptr + row * STREAMS + stream, post, mask=live)
    place = 2 * STREAMS + stream[:, None] * STREAMS + stream[None, :]
    both = live[:, None] & live[None, :]
    mixed = tl.load(dots + place, mask=both, other=0.0) * root
    logit = mixed * tl.load(scale_ptr + 2) + tl.load(base_ptr + place, mask=both, other=0.0)
    peak = tl.max(tl.where(both, logit, -float("inf")), axis=1)
    exponential = tl.where(both, tl.exp(logit - tl.where(live, peak, 0.0)[:, None]), 0.0)
    ones = tl.zeros((BLOCK_S, BLOCK_S), dtype=tl.float32)
    total = tl.where(live, pair_tree(exponential, BLOCK_S), 1.0)
    comb = tl.where(both, tl.div_rn(exponential, ones + total[:, None]) + floor, 0.0)
    comb = tl.div_rn(comb, ones + (pair_tree_first(comb, BLOCK_S, BLOCK_S) + floor)[None, :])
    for _ in range(ROUNDS - 1):
        comb = tl.div_rn(comb, ones + (pair_tree(comb, BLOCK_S) + floor)[:, None])
        comb = tl.div_rn(comb, ones + (pair_tree_first(comb, BLOCK_S, BLOCK_S) + floor)[None, :])
    tl.store(comb_ptr + row * STREAMS * STREAMS + stream[:, None] * STREAMS + stream[None, :], comb, mask=both)


@triton.jit
def _collapse(x_ptr, weight_ptr, out_ptr, width, STREAMS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    """out = the adjacent-pair tree over streams of stream times weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, BLOCK_S)
    mask = (stream[:, None] < STREAMS) & (column[None, :] < width)
    x = tl.load(x_ptr + (row * STREAMS + stream[:, None]) * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row * STREAMS + stream, mask=stream < STREAMS, other=0.0)
    out = pair_tree_first(x * weight[:, None], BLOCK_S, BLOCK)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=column < width)


def collapse(streams_RSD: Tensor, weight_RS: Tensor) -> Tensor:
    """The streams' weighted sum, rounded once."""
    rows, streams, width = streams_RSD.shape
    out = streams_RSD.new_empty(rows, width)
    if out.numel():
        block = min(256, padded_width(width))
        grid = (rows, triton.cdiv(width, block))
        _collapse[grid](streams_RSD, weight_RS, out, width, STREAMS=streams, BLOCK=block, BLOCK_S=padded_width(streams), **EXACT)
    return out


def products(streams_RSD: Tensor, fn_MK: Tensor) -> Tensor:
    """FP32 [R, M]: the streams side by side times fn, not yet over their root mean square."""
    return linear_fp32(streams_RSD.flatten(1), fn_MK, torch.float32, split_k(*fn_MK.shape))


def warps(block: int) -> int:
    """Of a program that holds a whole row."""
    return min(16, max(1, block // 1024))


def hyper_pre(streams_RSD: Tensor, fn_MK: Tensor, base_M: Tensor, scale_3: Tensor, how: Sinkhorn) -> tuple[Tensor, Tensor, Tensor]:
    """(x_RD, post_RS and comb_RSS in FP32)."""
    rows, streams, width = streams_RSD.shape
    x = streams_RSD.contiguous()
    pre, post = (torch.empty(rows, streams, dtype=torch.float32, device=x.device) for _ in range(2))
    comb = torch.empty(rows, streams, streams, dtype=torch.float32, device=x.device)
    if rows:
        block = padded_width(streams * width)
        _coefficients[(rows,)](
            x,
            products(x, fn_MK),
            base_M.contiguous(),
            scale_3.contiguous(),
            pre,
            post,
            comb,
            how.eps,
            how.floor,
            1.0 / (streams * width),
            ROUNDS=how.rounds,
            STREAMS=streams,
            WIDTH=streams * width,
            BLOCK=block,
            BLOCK_S=padded_width(streams),
            num_warps=warps(block),
            **EXACT,
        )
    return collapse(x, pre), post, comb
