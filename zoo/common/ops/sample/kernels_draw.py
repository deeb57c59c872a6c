"""sample's draw in Triton: one pass over the logits with Philox noise, and a merge of its blocks.

    token = argmax_id (x_id + g_id),  g = -log(-log(u))        the Gumbel-max trick: Maddison, Tarlow, Minka 2014 (arXiv 1411.0030)
    u = (odd 24-bit integer) / 2^24 of Philox4x32-10           Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011

Philox's key is the request's seed, its counter (id without its bits 10 and 11, position low, position high, 0); these two bits choose
one of the four words that a call gives, so that a program of LANES threads serves 4 LANES tokens.

B blocks (programs) of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.sample.launches import columns_side_by_side, in_launches
from zoo.common.ops.sample.reference import LANES, WORDS
from zoo.common.ops.tree_kernels import EXACT


@triton.jit
def gumbel(bits):
    """-log(-log(u)), u an odd 24-bit integer over 2^24."""
    u = ((bits >> 8) | 1).to(tl.float32) * 5.9604644775390625e-08
    return -tl.log(-tl.log(u))


@triton.jit
def philox_words(seed, position, counter):
    """The four output words of the call at `counter`."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = counter * 0
    return tl.philox(seed, counter, zero + low, zero + high, zero)


@triton.jit
def _better(best, best_id, row, start, lane, width, bits, greedy):
    """Keeps the higher score per lane; columns come in ascending order, so a strict comparison keeps the lower id."""
    column = start + lane
    x = tl.load(row + column, mask=column < width, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))
    score = tl.where(greedy, x, x + gumbel(bits))
    above = score > best
    return tl.where(above, score, best), tl.where(above, column, best_id)


@triton.jit
def _draw_kernel(logits, seed_R, position_R, greedy_R, best_RB, id_RB, width, stride, blocks, LANES: tl.constexpr):
    """The best x + g of 4 LANES columns of a row, g from the four words of one Philox call a lane; greedy rows take x alone."""
    b = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    row = logits + r * stride
    lane = tl.arange(0, LANES)
    greedy = tl.load(greedy_R + r) != 0
    w0, w1, w2, w3 = philox_words(tl.load(seed_R + r), tl.load(position_R + r), (b * LANES + lane).to(tl.uint32))
    start = b * LANES * 4
    best = tl.full([LANES], -float("inf"), tl.float32)
    best_id = start + lane
    best, best_id = _better(best, best_id, row, start, lane, width, w0, greedy)
    best, best_id = _better(best, best_id, row, start + LANES, lane, width, w1, greedy)
    best, best_id = _better(best, best_id, row, start + 2 * LANES, lane, width, w2, greedy)
    best, best_id = _better(best, best_id, row, start + 3 * LANES, lane, width, w3, greedy)
    top = tl.max(best, 0)
    tl.store(best_RB + r * blocks + b, top)
    tl.store(id_RB + r * blocks + b, tl.min(tl.where(best == top, best_id, 2147483647), 0))


@triton.jit
def _merge_kernel(best_RB, id_RB, token_R, blocks, BLOCKS: tl.constexpr):
    """The best of a row's blocks, the lowest id among equals."""
    r = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    best = tl.load(best_RB + r * blocks + b, mask=b < blocks, other=-float("inf"))
    ids = tl.load(id_RB + r * blocks + b, mask=b < blocks, other=2147483647)
    tl.store(token_R + r, tl.min(tl.where(best == tl.max(best, 0), ids, 2147483647), 0).to(tl.int64))


@in_launches
def draw(logits_RV: Tensor, seed_R: Tensor, position_R: Tensor, greedy_R: Tensor) -> Tensor:
    """int64 [R]: argmax of logit plus noise, lower id among equals; one pass over the logits and a merge of its blocks."""
    rows, width = logits_RV.shape
    blocks = triton.cdiv(width, LANES * WORDS)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits_RV.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits_RV.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        logits = columns_side_by_side(logits_RV)
        _draw_kernel[(blocks, rows)](
            logits,
            seed_R.contiguous(),
            position_R.contiguous(),
            greedy_R.contiguous().view(torch.int8),
            best,
            ids,
            width,
            logits.stride(0),
            blocks,
            LANES=LANES,
            num_warps=4,
            **EXACT,
        )
        _merge_kernel[(rows,)](best, ids, token, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1)
    return token
