"""sample in Triton: the cut by bisection over ordered integer keys (no sort, no float sum), the draw in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.sample.reference import LANES, MASS_ONE, NO_CUT, WORDS
from zoo.common.ops.tree_kernels import EXACT

CUT_BLOCK = 4096
RESTRICT_BLOCK = 2048

_LANES = tl.constexpr(LANES)
_MASS_ONE = tl.constexpr(float(MASS_ONE))
_NO_CUT = tl.constexpr(NO_CUT)


@triton.jit
def _keys_and_mass(row, start, lse, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Ordered int32 keys (-0 as +0, NaN as -inf), probabilities and int64 masses of a block; columns beyond the row have no mass
    and lie below every key."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row + column, mask=column < WIDTH, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(column < WIDTH, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    p = tl.exp(x - lse)
    p = tl.where(p >= 0, p, 0.0)
    return column, key, p, (p * _MASS_ONE).to(tl.int64)


@triton.jit
def _above(row, lse, key_cut, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys lie above the cut, their mass, and the mass of one token at the cut."""
    count = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.int64)
    tied = tl.zeros([BLOCK], tl.int64)
    for start in range(0, WIDTH, BLOCK):
        _, key, _, m = _keys_and_mass(row, start, lse, WIDTH, BLOCK)
        count += (key > key_cut).to(tl.int64)
        mass += tl.where(key > key_cut, m, 0)
        tied = tl.maximum(tied, tl.where(key == key_cut, m, 0))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.max(tied, 0)


@triton.jit
def _cut_kernel(logits, lse_R, top_k_R, mass_limit_R, min_p_R, logit_R, last_R, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * stride
    lse = tl.load(lse_R + r)
    top_k = tl.load(top_k_R + r)
    limit = tl.load(mass_limit_R + r)
    min_p = tl.load(min_p_R + r)
    if (top_k >= WIDTH) & (limit >= _NO_CUT) & (min_p <= 0):
        tl.store(logit_R + r, -float("inf"))
        tl.store(last_R + r, WIDTH)
    else:
        peak_p = tl.zeros([BLOCK], tl.float32)
        peak_key = tl.full([BLOCK], -2147483648, tl.int32)
        for start in range(0, WIDTH, BLOCK):
            _, key, p, _ = _keys_and_mass(row, start, lse, WIDTH, BLOCK)
            peak_p = tl.maximum(peak_p, p)
            peak_key = tl.maximum(peak_key, key)
        high = tl.max(peak_key, 0).to(tl.int64)
        floor = min_p * tl.max(peak_p, 0)
        least = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, WIDTH, BLOCK):
            column, key, p, _ = _keys_and_mass(row, start, lse, WIDTH, BLOCK)
            least = tl.minimum(least, tl.where((column < WIDTH) & (p >= floor), key, 2147483647))
        low = tl.minimum(tl.min(least, 0).to(tl.int64), high)
        # the lowest key whose first token still has rank < k and mass before it <= the limit
        while low < high:
            middle = (low + high) >> 1
            count, mass, _ = _above(row, lse, middle, WIDTH, BLOCK)
            fits = (count < top_k) & (mass <= limit)
            high = tl.where(fits, middle, high)
            low = tl.where(fits, low, middle + 1)
        count, mass, tied = _above(row, lse, high, WIDTH, BLOCK)
        # equals share one mass, so how many of them stay is a division
        room = tl.where(tied > 0, (limit - mass) // tl.maximum(tied, 1) + 1, _NO_CUT)
        room = tl.maximum(tl.minimum(room, top_k - count), 1)
        last = tl.full([BLOCK], -1, tl.int32)
        seen = tl.zeros([], tl.int32).to(tl.int64)
        for start in range(0, WIDTH, BLOCK):
            column, key, _, _ = _keys_and_mass(row, start, lse, WIDTH, BLOCK)
            equal = key == high
            nth = seen + tl.cumsum(equal.to(tl.int32), 0)
            last = tl.maximum(last, tl.where(equal & (nth <= room), column, -1))
            seen += tl.sum(equal.to(tl.int32), 0)
        bits = high.to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        tl.store(logit_R + r, bits.to(tl.float32, bitcast=True))
        tl.store(last_R + r, tl.max(last, 0).to(tl.int64))


def cut(logits_RV: Tensor, lse_R: Tensor, top_k_R: Tensor, mass_limit_R: Tensor, min_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """(logit, id) of the last token that stays; a row without filters reads nothing and gives (-inf, V)."""
    rows, width = logits_RV.shape
    logit = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    last = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    per_row = (lse_R, top_k_R, mass_limit_R, min_p_R, logit, last)
    if rows:
        _cut_kernel[(rows,)](logits_RV, *per_row, logits_RV.stride(0), WIDTH=width, BLOCK=CUT_BLOCK, num_warps=16, **EXACT)
    return logit, last


@triton.jit
def _restrict_kernel(logits, out, logit_R, last_R, width, stride, first, fill, BLOCK: tl.constexpr):
    r = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + r * stride + column, mask=column < width, other=0.0)
    logit = tl.load(logit_R + r)
    outside = (x < logit) | ((x == logit) & (column + first > tl.load(last_R + r)))
    tl.store(out + r * width + column, tl.where(outside, fill, x), mask=column < width)


def restrict(logits_RC: Tensor, logit_R: Tensor, last_R: Tensor, first: int, fill: float) -> Tensor:
    """Logits of columns first .. first + C with `fill` behind the cut; a NaN stays."""
    rows, width = logits_RC.shape
    out = torch.empty_like(logits_RC, memory_format=torch.contiguous_format)
    if rows:
        grid = (triton.cdiv(width, RESTRICT_BLOCK), rows)
        stride = logits_RC.stride(0)
        _restrict_kernel[grid](logits_RC, out, logit_R, last_R, width, stride, first, fill, BLOCK=RESTRICT_BLOCK, num_warps=4)
    return out


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
    r = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    best = tl.load(best_RB + r * blocks + b, mask=b < blocks, other=-float("inf"))
    ids = tl.load(id_RB + r * blocks + b, mask=b < blocks, other=2147483647)
    tl.store(token_R + r, tl.min(tl.where(best == tl.max(best, 0), ids, 2147483647), 0).to(tl.int64))


def draw(logits_RV: Tensor, seed_R: Tensor, position_R: Tensor, greedy_R: Tensor) -> Tensor:
    """int64 [R]: argmax of logit plus noise, lower id among equals; one pass over the logits and a merge of its blocks."""
    rows, width = logits_RV.shape
    blocks = triton.cdiv(width, LANES * WORDS)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits_RV.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits_RV.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        row = (seed_R, position_R, greedy_R.view(torch.int8), best, ids)
        _draw_kernel[(blocks, rows)](logits_RV, *row, width, logits_RV.stride(0), blocks, LANES=LANES, num_warps=4, **EXACT)
        _merge_kernel[(rows,)](best, ids, token, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1)
    return token
