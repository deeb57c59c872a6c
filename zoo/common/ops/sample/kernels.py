"""sample in Triton: the cut by narrowing a range of ordered integer keys (no sort, no float sum), and what it leaves.

With the tokens of a row by falling logit x, lower id first among equals, p = exp(x - lse) and mass m = floor(p 2^60), a token stays if

    rank < top_k                        top-k: Fan, Lewis, Dauphin 2018 (arXiv 1805.04833), section 5.4
    mass before it <= top_p 2^60        top-p: Holtzman et al. 2019 (arXiv 1904.09751)
    it isn't behind the last token      min-p: Nguyen et al. 2024 (arXiv 2407.01082)
      with p >= min_p max p

All three keep a prefix of that order, so the cut is one token: the last that stays. It is found by search, as a radix select finds a
rank: count and mass above T thresholds divide a range of keys, the part that holds the cut becomes the next range.

    first pass     count and mass above each threshold, over the whole row          _first_kernel
    ROUNDS passes  the range narrows; what is left is listed once it is short        _round_kernel
    last pass      a binary search over the list, then the rank among equals         _last_kernel

B blocks (programs) of a row, T thresholds, L listed tokens, S numbers of a row's state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.sample.kernels_draw import draw
from zoo.common.ops.sample.launches import columns_side_by_side, in_launches
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.row_sampling import MASS_ONE, NO_CUT

__all__ = ["cut", "draw", "probability_and_mass", "restrict"]

# thresholds of a row's first tally, and how many nats apart they lie below the log-sum-exp
FIRST_THRESHOLDS = 8
FIRST_STEP = 2.0
# thresholds of the later ones, which divide evenly what is left
THRESHOLDS = 16
# how often the range is narrowed, until at most LISTED tokens are left in it; of more, one program alone searches the row
ROUNDS = 3
LISTED = 4096
# columns that a program reads at once
CHUNK = 1024
# (rows, chunks): of up to so many rows a program's share of each is so many chunks of columns
SHARES = ((8, 2), (96, 8), (1 << 31, 32))
# columns that the last program reads at once of a list, and of a whole row
LIST_BLOCK = 1024
ROW_BLOCK = 4096
# four programs of the kernels that read rows fit on a multiprocessor
WARPS = 8
REGISTERS = 64
RESTRICT_BLOCK = 2048

_MASS_ONE = tl.constexpr(float(MASS_ONE))
_NO_CUT = tl.constexpr(NO_CUT)
_LISTED = tl.constexpr(LISTED)
_CHUNK = tl.constexpr(CHUNK)
_THREADS = tl.constexpr(32 * WARPS)
_STEP = tl.constexpr(FIRST_STEP)
# thresholds that a thread has sums for at once
_SUMS = tl.constexpr(8)
# range, count, mass and number of tokens of a row
_STATE = tl.constexpr(5)
# every key is above the lowest integer; that of -inf is the lowest
_BELOW = tl.constexpr(-(1 << 31))
_NOTHING = tl.constexpr(-(1 << 31) + (1 << 23) - 1)
_TOP = tl.constexpr((1 << 31) - 1)
_LARGEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def _key_of(x):
    """Ordered int32 keys: -0 as +0, NaN as -inf."""
    x = tl.where(x == x, x, -float("inf"))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit_of(key):
    """The logit of an ordered key: the inverse of `_key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keys(values, start, width, BLOCK: tl.constexpr):
    """Columns and keys; a column beyond the row lies below every key, and has no probability."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(values + column, mask=column < width, other=0.0)
    return column, tl.where(column < width, _key_of(x), _BELOW)


@triton.jit
def probability_and_mass(key, lse):
    """p = exp(x - lse) in FP32, and its mass floor(p 2^60) in int64, whose sums are the same in every order."""
    p = tl.exp(_logit_of(key) - lse)
    p = tl.where(p >= 0, p, 0.0)
    return p, (p * _MASS_ONE).to(tl.int64)


@triton.jit
def _filters(top_k_R, mass_limit_R, min_p_R, r, width):
    """A row's top_k and mass limit, its min_p and whether it has one, and whether it has any filter."""
    top_k = tl.load(top_k_R + r)
    limit = tl.load(mass_limit_R + r)
    min_p = tl.load(min_p_R + r)
    floored = (min_p <= 0) == 0
    return top_k, limit, min_p, floored, (top_k < width) | (limit < _NO_CUT) | floored


@triton.jit
def _fits(count, mass, top_k, limit):
    """Whether the first token below `count` tokens of this mass stays: rank < top_k and mass <= limit; the very first always does."""
    few = tl.where((top_k < 1) | (limit < 0), 1, top_k)
    return (count < few) & (mass <= tl.maximum(limit, 0))


@triton.jit
def _room(count, mass, tied, top_k, limit):
    """How many equals of mass `tied` stay below this many tokens of this mass: floor((limit - mass) / tied) + 1, at most top_k."""
    room = tl.where(tied > 0, (limit - mass) // tl.maximum(tied, 1) + 1, _NO_CUT)
    return tl.maximum(tl.minimum(room, top_k - count), 1)


@triton.jit
def _thresholds(t, low, high, lse, T: tl.constexpr, FIRST: tl.constexpr):
    """Keys at which low < .. <= high is divided, in falling order; the last is low. For the result any keys would do."""
    if FIRST:
        key = tl.where(t == T - 2, _NOTHING, _key_of(lse - (t + 1).to(tl.float32) * _STEP))
    else:
        top = _logit_of(high)
        key = _key_of(top - (top - _logit_of(low + 1)) * ((t + 1).to(tl.float32) / T))
    return tl.where(t == T - 1, low, tl.maximum(key, low))


@triton.jit
def _tally(
    row,
    r,
    b,
    low,
    high,
    lse,
    count_RTB,
    mass_RTB,
    end_RB,
    peak_RB,
    blocks,
    width,
    CHUNKS: tl.constexpr,
    T: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Stores a block's count and mass above each threshold, its lowest key but -inf and its highest, all of low < key <= high.

    The first one stores its largest probability too.
    """
    for part in range(T // _SUMS):
        t = part * _SUMS + tl.arange(0, _SUMS)
        key_T = _thresholds(t, low, high, lse, T, FIRST)
        count = tl.zeros([_SUMS, _THREADS], tl.int32)
        mass = tl.zeros([_SUMS, _THREADS], tl.int64)
        lowest = tl.full([_THREADS], _TOP, tl.int32)
        highest = tl.full([_THREADS], _BELOW, tl.int32)
        peak = tl.zeros([_THREADS], tl.float32)
        for chunk in range(CHUNKS):
            # one column per thread, so that it holds one sum per threshold; unrolled, so that several loads are under way
            for piece in tl.static_range(_CHUNK // _THREADS):
                _, key = _keys(row, (b * CHUNKS + chunk) * _CHUNK + piece * _THREADS, width, _THREADS)
                key = tl.where(key <= high, key, _BELOW)
                p, m = probability_and_mass(key, lse)
                lowest = tl.minimum(lowest, tl.where(key > tl.maximum(low, _NOTHING), key, _TOP))
                highest = tl.maximum(highest, key)
                peak = tl.maximum(peak, p)
                above = key[None, :] > key_T[:, None]
                count += above.to(tl.int32)
                mass += tl.where(above, m[None, :], 0)
        tl.store(count_RTB + (r * T + t) * blocks + b, tl.sum(count, 1))
        tl.store(mass_RTB + (r * T + t) * blocks + b, tl.sum(mass, 1))
        tl.store(end_RB + (r * blocks + b) * 2, tl.min(lowest, 0))
        tl.store(end_RB + (r * blocks + b) * 2 + 1, tl.max(highest, 0))
        if FIRST:
            tl.store(peak_RB + r * blocks + b, tl.max(peak, 0))


@triton.jit
def _first_kernel(
    logits,
    lse_R,
    top_k_R,
    mass_limit_R,
    min_p_R,
    count_RTB,
    mass_RTB,
    end_RB,
    peak_RB,
    blocks,
    width,
    stride,
    CHUNKS: tl.constexpr,
    T: tl.constexpr,
):
    """Tallies the whole row."""
    b = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    _, _, _, _, wanted = _filters(top_k_R, mass_limit_R, min_p_R, r, width)
    if wanted:
        low = tl.full([], _BELOW, tl.int32)
        high = tl.full([], _TOP, tl.int32)
        lse = tl.load(lse_R + r)
        _tally(logits + r * stride, r, b, low, high, lse, count_RTB, mass_RTB, end_RB, peak_RB, blocks, width, CHUNKS, T, True)


@triton.jit
def _narrow(
    low,
    high,
    count,
    mass,
    lse,
    top_k,
    limit,
    count_RTB,
    mass_RTB,
    end_RB,
    r,
    blocks,
    BLOCKS: tl.constexpr,
    T: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The part of low < key <= high that holds the cut, the count and mass above it, and how many of its tokens each block has.

    `count` and `mass` are those above high. No token is in it where the whole row fits.
    """
    block = tl.arange(0, BLOCKS)
    held = block < blocks
    at = (r * T + tl.arange(0, T)[:, None]) * blocks + block[None, :]
    count_TB = tl.load(count_RTB + at, mask=held[None, :], other=0)
    mass_TB = tl.load(mass_RTB + at, mask=held[None, :], other=0)
    lowest = tl.min(tl.load(end_RB + (r * blocks + block) * 2, mask=held, other=_TOP), 0)
    highest = tl.max(tl.load(end_RB + (r * blocks + block) * 2 + 1, mask=held, other=_BELOW), 0)
    key_T = _thresholds(tl.arange(0, T), low, high, lse, T, FIRST)
    count_T = count + tl.sum(count_TB, 1)
    mass_T = mass + tl.sum(mass_TB, 1)
    fits_T = _fits(count_T, mass_T, top_k, limit)
    # counts and masses rise as thresholds fall, in every block, so those of the lowest that fits are the largest of all that fit
    above_B = tl.max(tl.where(fits_T[:, None], count_TB, 0), 0)
    inside_B = tl.min(tl.where(fits_T[:, None], _TOP, count_TB), 0) - above_B
    inside_B = tl.where(tl.min(fits_T.to(tl.int32), 0) == 1, 0, inside_B)
    count = tl.maximum(count, tl.max(tl.where(fits_T, count_T, 0), 0))
    mass = tl.maximum(mass, tl.max(tl.where(fits_T, mass_T, 0), 0))
    high = tl.minimum(tl.minimum(high, highest), tl.min(tl.where(fits_T, key_T, _TOP), 0))
    low = tl.maximum(low, tl.max(tl.where(fits_T, _BELOW, key_T), 0))
    return tl.maximum(low, tl.minimum(lowest, high) - 1), high, count, mass, inside_B


@triton.jit
def _floor(row, r, b, lse, floor, peak_key, floor_RB, blocks, width, CHUNKS: tl.constexpr):
    """Stores a block's lowest key with p >= floor = min_p max p (or the peak itself), and the last token that has it."""
    least = tl.full([_CHUNK], _LARGEST, tl.int64)
    for chunk in range(CHUNKS):
        column, key = _keys(row, (b * CHUNKS + chunk) * _CHUNK, width, _CHUNK)
        likely = (probability_and_mass(key, lse)[0] >= floor) | (key == peak_key)
        # the key above, so that it decides; below it the id, falling
        packed = (key.to(tl.int64) << 32) | (column ^ _TOP)
        least = tl.minimum(least, tl.where(likely & (column < width), packed, _LARGEST))
    tl.store(floor_RB + r * blocks + b, tl.min(least, 0))


@triton.jit
def _list(row, r, b, low, high, seen, only, logit_RL, id_RL, width, CHUNKS: tl.constexpr):
    """Lists the tokens of low < key <= high by id, `seen` of them before this block; alone the one of rank `only`, unless negative."""
    for chunk in range(CHUNKS):
        column, key = _keys(row, (b * CHUNKS + chunk) * _CHUNK, width, _CHUNK)
        inside = ((key > low) & (key <= high)).to(tl.int32)
        found = tl.sum(inside, 0)
        if found > 0:
            rank = seen + tl.cumsum(inside, 0) - 1
            kept = (inside > 0) & ((only < 0) | (rank == only))
            at = r * _LISTED + tl.where(only < 0, rank, 0)
            tl.store(logit_RL + at, _logit_of(key), mask=kept)
            tl.store(id_RL + at, column, mask=kept)
        seen += found


@triton.jit
def _read(state_RS, r):
    """A row's range low < key <= high, the count and mass above it, the tokens in it, and whether it needs no more narrowing."""
    low = tl.load(state_RS + r * _STATE).to(tl.int32)
    high = tl.load(state_RS + r * _STATE + 1).to(tl.int32)
    inside = tl.load(state_RS + r * _STATE + 4)
    settled = (inside <= _LISTED) | (low + 1 == high)
    return low, high, tl.load(state_RS + r * _STATE + 2), tl.load(state_RS + r * _STATE + 3), inside, settled


@triton.jit
def _write(state_RS, r, low, high, count, mass, inside):
    """Stores what `_read` reads."""
    tl.store(state_RS + r * _STATE, low.to(tl.int64))
    tl.store(state_RS + r * _STATE + 1, high.to(tl.int64))
    tl.store(state_RS + r * _STATE + 2, count)
    tl.store(state_RS + r * _STATE + 3, mass)
    tl.store(state_RS + r * _STATE + 4, inside)


@triton.jit
def _round_kernel(
    logits,
    lse_R,
    top_k_R,
    mass_limit_R,
    min_p_R,
    old_RS,
    old_count_RTB,
    old_mass_RTB,
    old_end_RB,
    state_RS,
    count_RTB,
    mass_RTB,
    end_RB,
    peak_RB,
    floor_RB,
    logit_RL,
    id_RL,
    blocks,
    width,
    stride,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OLD_T: tl.constexpr,
    T: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Narrows the range by its tally; then lists what is left if that settles the row, else tallies it. The first finds the floor."""
    b = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    top_k, limit, min_p, floored, wanted = _filters(top_k_R, mass_limit_R, min_p_R, r, width)
    if wanted:
        lse = tl.load(lse_R + r)
        row = logits + r * stride
        if FIRST:
            none = tl.full([], 0, tl.int64)
            low = tl.full([], _BELOW, tl.int32)
            high = tl.full([], _TOP, tl.int32)
            count = none
            mass = none
            inside = none
            settled = False
        else:
            low, high, count, mass, inside, settled = _read(old_RS, r)
        if settled:
            if b == 0:
                _write(state_RS, r, low, high, count, mass, inside)
        else:
            low, high, count, mass, inside_B = _narrow(
                low, high, count, mass, lse, top_k, limit, old_count_RTB, old_mass_RTB, old_end_RB, r, blocks, BLOCKS, OLD_T, FIRST
            )
            block = tl.arange(0, BLOCKS)
            inside = tl.sum(inside_B, 0).to(tl.int64)
            if b == 0:
                _write(state_RS, r, low, high, count, mass, inside)
            if FIRST:
                if floored | (inside == 0):
                    peak = tl.max(tl.load(peak_RB + r * blocks + block, mask=block < blocks, other=0.0), 0)
                    highest = tl.load(old_end_RB + (r * blocks + block) * 2 + 1, mask=block < blocks, other=_BELOW)
                    _floor(row, r, b, lse, min_p * peak, tl.max(highest, 0), floor_RB, blocks, width, CHUNKS)
            alone = low + 1 == high
            if alone | (inside <= _LISTED):
                if tl.sum(tl.where(block == b, inside_B, 0), 0) > 0:
                    before = tl.sum(tl.where(block < b, inside_B, 0), 0)
                    nth = tl.minimum(_room(count, mass, probability_and_mass(high, lse)[1], top_k, limit), inside) - 1
                    _list(row, r, b, low, high, before, tl.where(alone, nth, -1), logit_RL, id_RL, width, CHUNKS)
            else:
                if not LAST:
                    _tally(row, r, b, low, high, lse, count_RTB, mass_RTB, end_RB, peak_RB, blocks, width, CHUNKS, T, False)


@triton.jit
def _search(values, n, before, mass_before, low, high, count, mass, inside, lse, top_k, limit, BLOCK: tl.constexpr):
    """(key, index) of the last of n values that stays; it lies in low < key <= high, which holds `inside` of them.

    `count` and `mass` are those above high; `before` and `mass_before` of these are not among the values.
    """
    low = low.to(tl.int64) + 1
    high = high.to(tl.int64)
    down_to_low = count + inside
    # the lowest key that fits; a range with one token in it needs no further halving
    while (low < high) & (down_to_low - count > 1):
        middle = (low + high) >> 1
        counts = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.int64)
        for start in range(0, n, BLOCK):
            _, key = _keys(values, start, n, BLOCK)
            counts += (key > middle).to(tl.int32)
            masses += tl.where(key > middle, probability_and_mass(key, lse)[1], 0)
        count_above = before + tl.sum(counts, 0)
        mass_above = mass_before + tl.sum(masses, 0)
        fits = _fits(count_above, mass_above, top_k, limit)
        count = tl.where(fits, count_above, count)
        mass = tl.where(fits, mass_above, mass)
        down_to_low = tl.where(fits, down_to_low, count_above)
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    highest = tl.full([BLOCK], _BELOW, tl.int32)
    for start in range(0, n, BLOCK):
        _, key = _keys(values, start, n, BLOCK)
        highest = tl.maximum(highest, tl.where(key <= high, key, _BELOW))
    found = tl.max(highest, 0)
    room = _room(count, mass, probability_and_mass(found, lse)[1], top_k, limit)
    last = tl.full([BLOCK], -1, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        index, key = _keys(values, start, n, BLOCK)
        equal = (key == found).to(tl.int32)
        nth = seen + tl.cumsum(equal, 0)
        last = tl.maximum(last, tl.where((equal > 0) & (nth <= room), index, -1))
        seen += tl.sum(equal, 0)
    return found, tl.max(last, 0)


@triton.jit
def _last_kernel(
    logits,
    lse_R,
    top_k_R,
    mass_limit_R,
    min_p_R,
    state_RS,
    floor_RB,
    logit_RL,
    id_RL,
    logit_R,
    last_R,
    blocks,
    width,
    stride,
    BLOCKS: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Finds the cut in what is left of a row, and keeps it at the floor or above."""
    r = tl.program_id(0).to(tl.int64)
    top_k, limit, _, floored, wanted = _filters(top_k_R, mass_limit_R, min_p_R, r, width)
    found = tl.full([], _NOTHING, tl.int32)
    last = tl.full([], 0, tl.int32) + width
    if wanted:
        lse = tl.load(lse_R + r)
        low, high, count, mass, inside, settled = _read(state_RS, r)
        if inside > 0:
            if low + 1 == high:
                found = high
                last = tl.load(id_RL + r * _LISTED)
            elif settled:
                n = inside.to(tl.int32)
                listed = logit_RL + r * _LISTED
                found, last = _search(listed, n, count, mass, low, high, count, mass, inside, lse, top_k, limit, LIST_BLOCK)
                last = tl.load(id_RL + r * _LISTED + last)
            else:
                none = tl.full([], 0, tl.int64)
                row = logits + r * stride
                found, last = _search(row, width, none, none, low, high, count, mass, inside, lse, top_k, limit, ROW_BLOCK)
        if floored | (inside == 0):
            block = tl.arange(0, BLOCKS)
            floor = tl.min(tl.load(floor_RB + r * blocks + block, mask=block < blocks, other=_LARGEST), 0)
            key = (floor >> 32).to(tl.int32)
            # what fits in front of the floor's key leaves room for all that have it
            if (inside == 0) | (key > found):
                found = key
                last = floor.to(tl.int32) ^ _TOP
    tl.store(logit_R + r, _logit_of(found))
    tl.store(last_R + r, last.to(tl.int64))


@in_launches
def cut(
    logits_RV: Tensor, lse_R: Tensor, top_k_R: Tensor, mass_limit_R: Tensor, min_p_R: Tensor, chunks: int | None = None
) -> tuple[Tensor, Tensor]:
    """(logit, id) of the last token that stays; a row without filters reads nothing and gives (-inf, V).

    `chunks` is a program's share of a row. It moves no byte, as all sums are of integers.
    """
    rows, width = logits_RV.shape
    chunks = chunks or next(share for most, share in SHARES if rows <= most)
    blocks = triton.cdiv(width, chunks * CHUNK)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits_RV.device)

    def tally(thresholds: int) -> tuple[Tensor, Tensor, Tensor]:
        count = empty(rows, thresholds, blocks, dtype=torch.int32)
        ends = empty(rows, blocks, 2, dtype=torch.int32)
        return count, empty(rows, thresholds, blocks), ends

    logit = empty(rows, dtype=torch.float32)
    last = empty(rows)
    if not rows:
        return logit, last
    logits = columns_side_by_side(logits_RV)
    lse = lse_R.contiguous()
    top_k = top_k_R.contiguous()
    mass_limit = mass_limit_R.contiguous()
    min_p = min_p_R.contiguous()
    peak = empty(rows, blocks, dtype=torch.float32)
    floor = empty(rows, blocks)
    listed_logit = empty(rows, LISTED, dtype=torch.float32)
    listed_id = empty(rows, LISTED, dtype=torch.int32)
    # layouts of fewer than 32 blocks spill registers
    padded = max(32, triton.next_power_of_2(blocks))
    state = empty(rows, _STATE.value)
    count, mass, ends = tally(FIRST_THRESHOLDS)
    thresholds = FIRST_THRESHOLDS
    _first_kernel[blocks, rows](
        logits,
        lse,
        top_k,
        mass_limit,
        min_p,
        count,
        mass,
        ends,
        peak,
        blocks,
        width,
        logits.stride(0),
        T=thresholds,
        CHUNKS=chunks,
        maxnreg=REGISTERS,
        num_warps=WARPS,
        **EXACT,
    )
    for i in range(ROUNDS):
        old_state = state
        old_count = count
        old_mass = mass
        old_ends = ends
        old_thresholds = thresholds
        state = empty(rows, _STATE.value)
        count, mass, ends = tally(THRESHOLDS)
        thresholds = THRESHOLDS
        _round_kernel[blocks, rows](
            logits,
            lse,
            top_k,
            mass_limit,
            min_p,
            old_state,
            old_count,
            old_mass,
            old_ends,
            state,
            count,
            mass,
            ends,
            peak,
            floor,
            listed_logit,
            listed_id,
            blocks,
            width,
            logits.stride(0),
            BLOCKS=padded,
            OLD_T=old_thresholds,
            T=thresholds,
            FIRST=i == 0,
            LAST=i == ROUNDS - 1,
            CHUNKS=chunks,
            maxnreg=REGISTERS,
            num_warps=WARPS,
            **EXACT,
        )
    _last_kernel[rows,](
        logits,
        lse,
        top_k,
        mass_limit,
        min_p,
        state,
        floor,
        listed_logit,
        listed_id,
        logit,
        last,
        blocks,
        width,
        logits.stride(0),
        BLOCKS=padded,
        LIST_BLOCK=LIST_BLOCK,
        ROW_BLOCK=ROW_BLOCK,
        num_warps=WARPS,
        **EXACT,
    )
    return logit, last


@triton.jit
def _restrict_kernel(logits, out, logit_R, last_R, width, stride, first, fill, BLOCK: tl.constexpr):
    """`fill` for each column behind the cut (logit, id): a lower logit, or an equal one of a higher id."""
    r = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + r * stride + column, mask=column < width, other=0.0)
    logit = tl.load(logit_R + r)
    outside = (x < logit) | ((x == logit) & (column + first > tl.load(last_R + r)))
    tl.store(out + r * width + column, tl.where(outside, fill, x), mask=column < width)


@in_launches
def restrict(logits_RC: Tensor, logit_R: Tensor, last_R: Tensor, first: int, fill: float) -> Tensor:
    """Logits of columns first .. first + C with `fill` behind the cut; a NaN stays."""
    rows, width = logits_RC.shape
    out = torch.empty_like(logits_RC, memory_format=torch.contiguous_format)
    if rows:
        grid = (triton.cdiv(width, RESTRICT_BLOCK), rows)
        logits = columns_side_by_side(logits_RC)
        _restrict_kernel[grid](logits, out, logit_R, last_R, width, logits.stride(0), first, fill, BLOCK=RESTRICT_BLOCK, num_warps=4)
    return out
