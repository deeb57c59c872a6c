"""gated_delta on CUDA: whole chunks in parallel around a scan of states, or one row a sequence replayed from its slot.

Every product of a row is one `tl.dot` over all of K or all lanes, of 64 rows in chunks and of two in a step, which leaves out
steps over zeros: the same ones in the same order.

`_plan` lays out C chunks, a bound from shapes alone, so that nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.rows import Rows

J = tl.constexpr(CHUNK)
CLOSE_COLUMNS = 32  # of a state that a closing step holds at once
FOLD_HEADS = 32
# of a chunk's outputs at once: 4 programs are resident. ptxas 12.8 assembles fewer wrongly where K is 64 or more (docs/TRITON_FAULT.md)
OUTPUT_COLUMNS = 64
# a scan's launch for at most so many sequences x heads x columns: columns of a program, warps, stages (3: a chunk's operands arrive
# during the one before, a program a multiprocessor; 2: two programs fit and overlap)
SCAN_SHAPES = ((132 * 32, 32, 4, 3), (264 * 32, 32, 4, 2), (1 << 62, 64, 4, 2))
INVERT_ROWS = 8  # of the inverse at once; even, as `_pair` loads aligned pairs, and divides 64. 64 registers: 32 programs fit
WIDE_REGISTERS = 128  # of a thread of the kernels around it, so that 4 programs are resident; without a cache or in FP32 it would spill
# a step's launch for at most so many sequences x heads: columns of a program, warps, stages (2: it copies its tiles
# asynchronously: fast alone, but only two fit a multiprocessor), registers of a thread at most; the fastest of 11 on an H200
STEP_SHAPES = ((64, 64, 4, 2, None), (1 << 62, 128, 4, 1, None))
STEP_ROWS = 2  # of a step's tiles, which the compiler pads to the tensor cores' 16 (16 gives the same bytes)


@triton.jit
def _plan(starts_ptr, lengths_ptr, chunk_ptr, sequence_ptr, sequences, BLOCK: tl.constexpr):
    """Of a chunk: row of lane 0, lanes that memory holds, lanes in use (0: spare), sequence. Of a sequence: first, count."""
    c = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    begin = tl.load(starts_ptr + n, mask=n < sequences, other=0)
    rows = tl.load(starts_ptr + n + 1, mask=n < sequences, other=0) - begin
    held = (tl.load(lengths_ptr + n, mask=n < sequences, other=0) - rows) % J
    count = (held + rows + J - 1) // J
    ends = tl.cumsum(count, axis=0)
    mine = (ends - count <= c) & (c < ends)
    inside = tl.sum(tl.where(mine, c - (ends - count), 0), axis=0) * J
    cached = tl.sum(tl.where(mine, held, 0), axis=0)
    tl.store(chunk_ptr + c * 4, tl.sum(tl.where(mine, begin, 0), axis=0) - cached + inside)
    tl.store(chunk_ptr + c * 4 + 1, tl.maximum(cached - inside, 0))
    tl.store(chunk_ptr + c * 4 + 2, tl.minimum(tl.maximum(cached + tl.sum(tl.where(mine, rows, 0), axis=0) - inside, 0), J))
    tl.store(chunk_ptr + c * 4 + 3, tl.sum(tl.where(mine, n, 0), axis=0))
    if c == 0:
        tl.store(sequence_ptr + n * 2, ends - count, mask=n < sequences)
        tl.store(sequence_ptr + n * 2 + 1, count, mask=n < sequences)


@triton.jit
def _chunk(chunk_ptr, c):
    row, low = tl.load(chunk_ptr + c * 4).to(tl.int64), tl.load(chunk_ptr + c * 4 + 1)
    return row, low, tl.load(chunk_ptr + c * 4 + 2), tl.load(chunk_ptr + c * 4 + 3)


@triton.jit
def _rows(x_ptr, cache_ptr, row, stride, low, high, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CACHED: tl.constexpr):
    """[64, COLUMNS] of a head: lanes below `low` from the cache, lanes below `high` from the batch, zeros after them."""
    lane, column = tl.arange(0, J)[:, None], tl.arange(0, COLUMNS)[None, :]
    place, mask = x_ptr + (row + lane) * stride, (lane >= low) & (lane < high)
    if CACHED:
        place, mask = tl.where(lane < low, cache_ptr + lane * WIDTH, place), lane < high
    return tl.load(place + column, mask=mask, other=0.0)


@triton.jit
def _fade(decay):
    """exp(G_i - G_j) for j <= i, 0 beyond: positive differences never reach exp."""
    row, lane = tl.arange(0, J)[:, None], tl.arange(0, J)[None, :]
    return tl.exp(tl.where(lane <= row, decay[:, None] - decay[None, :], float("-inf")))


@triton.jit
def _fold(log_decay_ptr, cache_ptr, slot_ptr, chunk_ptr, decay_ptr, heads, BLOCK: tl.constexpr, CACHED: tl.constexpr):
    """decay [C, V, 64]: the left fold of log-decay in each chunk, a head a thread; lanes beyond the chunk's rows repeat the last."""
    c = tl.program_id(0).to(tl.int64)
    row, low, high, n = _chunk(chunk_ptr, c)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    steps, total = (), tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(J):  # all loads before any store
        place = log_decay_ptr + (row + i) * heads + head
        if CACHED:
            place = tl.where(i < low, cache_ptr + (slot * heads + head) * J + i, place)
        steps = steps + (tl.load(place, mask=(head < heads) & (i < high), other=0.0),)
    for i in tl.static_range(J):
        total = tl.where(i < low, steps[i], tl.where(i < high, total + steps[i], total))
        tl.store(decay_ptr + (c * heads + head) * J + i, total, mask=head < heads)


@triton.jit
def _keys(k_ptr, beta_ptr, k_cache_ptr, beta_cache_ptr, row, low, high, slot, head, stride, heads, REPEAT: tl.constexpr,
          K: tl.constexpr, CACHED: tl.constexpr):  # fmt: skip
    """k [64, K] and beta [64] of a chunk and value head."""
    lane = tl.arange(0, J)
    held_key = slot * (heads // REPEAT) + head // REPEAT
    k = _rows(k_ptr + head // REPEAT * K, k_cache_ptr + held_key * J * K, row, stride, low, high, K, K, CACHED)
    beta = tl.load(beta_ptr + (row + lane) * heads + head, mask=(lane >= low) & (lane < high), other=0.0)
    if CACHED:
        held = beta_cache_ptr + (slot * heads + head) * J
        beta = tl.where(lane < low, tl.load(held + lane, mask=lane < low, other=0.0), beta)
    return k, beta


@triton.jit
def _scores(k_ptr, beta_ptr, k_cache_ptr, beta_cache_ptr, slot_ptr, chunk_ptr, decay_ptr, tile_ptr, leave_ptr, k_stride, heads,
            REPEAT: tl.constexpr, K: tl.constexpr, CACHED: tl.constexpr):  # fmt: skip
    """exp(G_63 - G_j) k_j, and tile [C, V, 64, 64]: -a below the diagonal, zeros +0; sectors wholly beyond it aren't written."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, low, high, n = _chunk(chunk_ptr, c)
    if high == 0:
        return
    lane, at = tl.arange(0, J), c * heads + head
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    k, beta = _keys(k_ptr, beta_ptr, k_cache_ptr, beta_cache_ptr, row, low, high, slot, head, k_stride, heads, REPEAT, K, CACHED)
    decay = tl.load(decay_ptr + at * J + lane)
    leave = k.to(tl.float32) * tl.exp(tl.load(decay_ptr + at * J + J - 1) - decay)[:, None]
    tl.store(leave_ptr + at * J * K + lane[:, None] * K + tl.arange(0, K)[None, :], leave.to(k.dtype))
    a = tl.dot(k, tl.trans(k), input_precision="ieee") * _fade(decay) * beta[:, None]
    near = (lane // 8)[None, :] <= (lane // 8)[:, None]  # 8: a sector of memory, 32 bytes; not INVERT_ROWS
    tl.store(tile_ptr + at * J * J + lane[:, None] * J + lane[None, :], -a, mask=near)  # 0 - a: never -0


@triton.jit
def _pair(ptr):
    """Two FP32 neighbours by one load, for the loads are what `_invert` waits for."""
    both = tl.load(ptr.to(tl.pointer_type(tl.int64), bitcast=True))
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _invert(tile_ptr, chunk_ptr, heads, ROWS: tl.constexpr):
    """Rows T_i = e_i - sum_j a_ij T_j over those of -a: one warp, whose threads have columns to themselves, ROWS rows at once."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    high = tl.load(chunk_ptr + c * 4 + 2)
    tile_ptr += (c * heads + head) * J * J
    lane, mine_ptr = tl.arange(0, J), tile_ptr
    for first in range(0, high, ROWS):
        rows, factors = (), ()
        for r in tl.static_range(ROWS):
            rows = rows + (tl.where(lane == first + r, 1.0, 0.0),)
        earlier_ptr, factor_ptr = tile_ptr + lane, mine_ptr
        for _ in range(0, first, ROWS):
            for s in tl.static_range(0, ROWS, 2):
                # stored by the same thread. -0 is +0 as a factor, not as a result
                one, two, later = tl.load(earlier_ptr + s * J) + 0.0, tl.load(earlier_ptr + (s + 1) * J) + 0.0, ()
                for r in tl.static_range(ROWS):
                    of_one, of_two = _pair(factor_ptr + (r * J + s))
                    later = later + (tl.fma(of_two, two, tl.fma(of_one, one, rows[r])),)
                rows = later
            earlier_ptr += ROWS * J
            factor_ptr += ROWS
        for r in tl.static_range(ROWS):
            for s in tl.static_range(r):
                factors = factors + (tl.load(factor_ptr + (r * J + s)),)
        tl.debug_barrier()  # all threads have these rows of -a
        for r in tl.static_range(ROWS):
            earlier, later = rows[r] + 0.0, ()
            tl.store(mine_ptr + r * J + lane, rows[r])
            for s in tl.static_range(ROWS):
                later = later + (tl.fma(factors[s * (s - 1) // 2 + r], earlier, rows[s]) if s > r else rows[s],)
            rows = later
        mine_ptr += ROWS * J


@triton.jit
def _local(k_ptr, beta_ptr, k_cache_ptr, beta_cache_ptr, inverse_cache_ptr, slot_ptr, chunk_ptr, decay_ptr, tile_ptr, w_ptr, left_ptr,
           k_stride, heads, REPEAT: tl.constexpr, K: tl.constexpr, CACHED: tl.constexpr):  # fmt: skip
    """What a chunk's rows need of T and no state: w, and T_ij beta_j as an operand."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, low, high, n = _chunk(chunk_ptr, c)
    if high == 0:
        return
    lane, at = tl.arange(0, J), c * heads + head
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    k, beta = _keys(k_ptr, beta_ptr, k_cache_ptr, beta_cache_ptr, row, low, high, slot, head, k_stride, heads, REPEAT, K, CACHED)
    decay, square = tl.load(decay_ptr + at * J + lane), lane[:, None] * J + lane[None, :]
    inverse = tl.load(tile_ptr + at * J * J + square, mask=(lane < high)[:, None], other=0.0)
    if CACHED:
        if high < J:
            tl.store(inverse_cache_ptr + (slot * heads + head) * J * J + square, inverse, mask=(lane < high)[:, None])
    tl.store(left_ptr + at * J * J + square, (inverse * beta[None, :]).to(k.dtype))
    w = tl.dot((inverse * (beta * tl.exp(decay))[None, :]).to(k.dtype), k, input_precision="ieee")
    tl.store(w_ptr + at * J * K + lane[:, None] * K + tl.arange(0, K)[None, :], w.to(k.dtype))


@triton.jit
def _scan(v_ptr, v_cache_ptr, left_ptr, w_ptr, leave_ptr, decay_ptr, chunk_ptr, sequence_ptr, initial_ptr, slot_ptr, u_ptr, image_ptr,
          final_ptr, final_image_ptr, u_cache_ptr, v_stride, heads, K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
          CACHED: tl.constexpr, INITIAL: tl.constexpr):  # fmt: skip
    """The states of one sequence and head, chunk after chunk, for BLOCK columns: each chunk's image and u, the last state."""
    # a head's columns side by side, which read the same w; `_local`'s last head first, which L2 still has
    n, begin, head = tl.program_id(0) // (E // BLOCK), tl.program_id(0) % (E // BLOCK) * BLOCK, heads - 1 - tl.program_id(1)
    lane, key, column = tl.arange(0, J), tl.arange(0, K), begin + tl.arange(0, BLOCK)
    first, count = tl.load(sequence_ptr + n * 2).to(tl.int64), tl.load(sequence_ptr + n * 2 + 1)
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    held = slot * heads + head
    row, cached, _, _ = _chunk(chunk_ptr, first)
    last = tl.load(chunk_ptr + (first + tl.maximum(count, 1) - 1) * 4 + 2)
    tile = key[:, None] * E + column[None, :]
    state = tl.load(initial_ptr + held * K * E + tile) if INITIAL else tl.zeros((K, BLOCK), dtype=tl.float32)
    for step in range(count):
        at = (first + step) * heads + head
        low, high = tl.where(step == 0, cached, 0), tl.where(step == count - 1, last, J)
        total = tl.load(decay_ptr + at * J + J - 1)
        image = state.to(w_ptr.dtype.element_ty)
        left = tl.load(left_ptr + at * J * J + lane[:, None] * J + lane[None, :])
        v = _rows(v_ptr + head * E + begin, v_cache_ptr + held * J * E + begin, row + step * J, v_stride, low, high, E, BLOCK, CACHED)
        own = tl.dot(left, v, input_precision="ieee")
        w = tl.load(w_ptr + at * J * K + lane[:, None] * K + key[None, :])
        u = (own - tl.dot(w, image, input_precision="ieee")).to(image.dtype)
        tl.store(image_ptr + at * K * E + tile, image)
        tl.store(u_ptr + at * J * E + lane[:, None] * E + column[None, :], u)
        if CACHED:
            open_lane = (lane < high) & (high < J)
            tl.store(u_cache_ptr + held * J * E + lane[:, None] * E + column[None, :], u, mask=open_lane[:, None])
        leave = tl.load(leave_ptr + at * J * K + lane[:, None] * K + key[None, :])
        added = tl.dot(tl.trans(leave), u, input_precision="ieee")
        closing = tl.exp(total) + tl.zeros((K, BLOCK), dtype=tl.float32)
        state = tl.where(high == J, tl.fma(closing, state, added), state)
    tl.store(final_ptr + held * K * E + tile, state)
    if CACHED:
        tl.store(final_image_ptr + held * K * E + tile, state.to(w_ptr.dtype.element_ty))


@triton.jit
def _outputs(q_ptr, k_ptr, k_cache_ptr, slot_ptr, chunk_ptr, decay_ptr, u_ptr, image_ptr, out_ptr, q_stride, k_stride, heads,
             scale, REPEAT: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
             CACHED: tl.constexpr):  # fmt: skip
    """Rows of a chunk and head, BLOCK columns after each other: P is made once."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, low, high, n = _chunk(chunk_ptr, c)
    if high == 0:
        return
    lane, key, at = tl.arange(0, J), tl.arange(0, K), c * heads + head
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    held_key = slot * (heads // REPEAT) + head // REPEAT
    q = _rows(q_ptr + head // REPEAT * K, q_ptr, row, q_stride, low, high, K, K, False)
    k = _rows(k_ptr + head // REPEAT * K, k_cache_ptr + held_key * J * K, row, k_stride, low, high, K, K, CACHED)
    decay = tl.load(decay_ptr + at * J + lane)
    p = (tl.dot(q, tl.trans(k), input_precision="ieee") * _fade(decay)).to(q.dtype)
    p = tl.where(lane[None, :] <= lane[:, None], p, 0.0)
    for begin in tl.static_range(0, E, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        image = tl.load(image_ptr + at * K * E + key[:, None] * E + column[None, :])
        u = tl.load(u_ptr + at * J * E + lane[:, None] * E + column[None, :], mask=(lane < high)[:, None], other=0.0)
        read = tl.dot(q, image, input_precision="ieee") * tl.exp(decay)[:, None]
        out = tl.dot(p, u, read, input_precision="ieee") * scale
        place = out_ptr + ((row + lane)[:, None] * heads + head) * E + column[None, :]
        tl.store(place, out.to(q.dtype), mask=(lane >= low)[:, None] & (lane < high)[:, None])


@triton.jit
def _keep(k_ptr, v_ptr, beta_ptr, decay_ptr, chunk_ptr, sequence_ptr, slot_ptr, k_cache_ptr, v_cache_ptr, beta_cache_ptr,
          decay_cache_ptr, k_stride, v_stride, heads, REPEAT: tl.constexpr, K: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """The rows of a sequence's unfinished last chunk go to its slot, after every reader of the slot."""
    n, head = tl.program_id(0), tl.program_id(1)
    c = (tl.load(sequence_ptr + n * 2) + tl.load(sequence_ptr + n * 2 + 1) - 1).to(tl.int64)
    row, low, high, _ = _chunk(chunk_ptr, c)
    if high == J:
        return
    lane, slot, at = tl.arange(0, J), tl.load(slot_ptr + n), c * heads + head
    held = slot * heads + head
    fresh = (lane >= low) & (lane < high)
    if head % REPEAT == 0:
        held_key = slot * (heads // REPEAT) + head // REPEAT
        k = _rows(k_ptr + head // REPEAT * K, k_ptr, row, k_stride, low, high, K, K, False)
        tl.store(k_cache_ptr + held_key * J * K + lane[:, None] * K + tl.arange(0, K)[None, :], k, mask=fresh[:, None])
    v = _rows(v_ptr + head * E, v_ptr, row, v_stride, low, high, E, E, False)
    tl.store(v_cache_ptr + held * J * E + lane[:, None] * E + tl.arange(0, E)[None, :], v, mask=fresh[:, None])
    tl.store(beta_cache_ptr + held * J + lane, tl.load(beta_ptr + (row + lane) * heads + head, mask=fresh, other=0.0), mask=fresh)
    tl.store(decay_cache_ptr + held * J + lane, tl.load(decay_ptr + at * J + lane), mask=fresh)


@triton.jit
def _replay(i, slot, log_decay, beta_new, q_ptr, k_ptr, v_ptr, image_ptr, k_cache_ptr, v_cache_ptr, u_cache_ptr, beta_cache_ptr,
            decay_cache_ptr, inverse_cache_ptr, out_ptr, heads, scale, REPEAT: tl.constexpr, K: tl.constexpr,
            E: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Row i of a chunk, i < LANES. A product's tile has two rows: 0 is on the way to u, 1 (and its copies) on the way to o."""
    n, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    lane, key, column = tl.arange(0, LANES), tl.arange(0, K), part * BLOCK + tl.arange(0, BLOCK)
    row, own, live, before = tl.arange(0, ROWS)[:, None], lane == i, lane <= i, lane < i
    held, at = slot * heads + head, n * heads + head
    k_cache_ptr += (slot * (heads // REPEAT) + head // REPEAT) * J * K
    v_cache_ptr, u_cache_ptr = v_cache_ptr + held * J * E, u_cache_ptr + held * J * E
    beta_cache_ptr, decay_cache_ptr = beta_cache_ptr + held * J, decay_cache_ptr + held * J
    inverse_cache_ptr += held * J * J
    k_lanes, v_lanes = tl.where(own, k_ptr, k_cache_ptr + lane * K), tl.where(own, v_ptr, v_cache_ptr + lane * E)

    total = tl.load(decay_cache_ptr + i - 1, mask=i > 0, other=0.0) + log_decay
    beta = tl.where(own, beta_new, tl.load(beta_cache_ptr + lane, mask=before, other=0.0))
    decay = tl.where(own, total, tl.load(decay_cache_ptr + lane, mask=before, other=0.0))
    fade = tl.exp(tl.where(live, total - decay, float("-inf")))
    # one turn, which the compiler doesn't know: with two stages it copies a loop's tiles asynchronously, all at once
    for _ in tl.range(0, (slot >= 0).to(tl.int32), num_stages=STAGES):
        keys = tl.load(k_lanes[None, :] + key[:, None], mask=live[None, :], other=0.0)
        new = tl.load(tl.where(row == 0, k_ptr, q_ptr) + key[None, :])
        scores = tl.dot(new, keys, input_precision="ieee")
        earlier = tl.load(inverse_cache_ptr + lane[:, None] * J + lane[None, :], mask=before[:, None], other=0.0)
        k = tl.load(k_lanes[:, None] + key[None, :], mask=live[:, None], other=0.0)
        image = tl.load(image_ptr + held * K * E + key[:, None] * E + column[None, :])
        v = tl.load(v_lanes[:, None] + column[None, :], mask=live[:, None], other=0.0)
        u = tl.load(u_cache_ptr + lane[:, None] * E + column[None, :], mask=before[:, None], other=0.0)

        a = tl.sum(tl.where(row == 0, scores, 0.0), axis=0) * fade * beta_new
        p = tl.where((row > 0) & live[None, :], scores * fade[None, :], 0.0).to(k.dtype)
        # of FP32 a product is FMAs, j ascending: `_invert`'s chain. + 0.0 makes -0 +0, as its sums do; -1.0 x 0 leaves even -0 alone
        a = tl.where(before, -(a + 0.0), -1.0)
        inverse = tl.dot(a[None, :], earlier + 0.0, tl.where(own, 1.0, 0.0)[None, :], input_precision="ieee")
        left = tl.where(row == 0, inverse * (beta * tl.exp(decay))[None, :], inverse * beta[None, :]).to(k.dtype)
        w = tl.dot(left, k, input_precision="ieee").to(k.dtype)
        own_u = tl.sum(tl.where(row == 1, tl.dot(left, v, input_precision="ieee"), 0.0), axis=0)
        read = tl.dot(tl.where(row == 0, w, new), image, input_precision="ieee")
        u_new = (own_u - tl.sum(tl.where(row == 0, read, 0.0), axis=0)).to(k.dtype)
        u = tl.where(own[:, None], u_new[None, :], u)
        out = tl.dot(p, u, read * tl.exp(total), input_precision="ieee")
        if LANES < J:
            out += 0.0  # the steps left out, over zeros, make -0 +0
        result = tl.where(row == 0, u_new[None, :], (out * scale).to(k.dtype))
        tl.store(tl.where(row == 0, u_cache_ptr + i * E, out_ptr + at * E) + column[None, :], result, mask=row < 2)
        if part == 0:
            tl.store(inverse_cache_ptr + i * J + lane[None, :], inverse)
            if LANES < J:
                tl.store(inverse_cache_ptr + i * J + tl.arange(0, J), tl.zeros((J,), tl.float32), mask=tl.arange(0, J) >= LANES)
            tl.store(beta_cache_ptr + i, beta_new)
            tl.store(decay_cache_ptr + i, total)


@triton.jit
def _close(slot, k_ptr, log_decay, start_ptr, image_ptr, k_cache_ptr, u_cache_ptr, decay_cache_ptr, heads, REPEAT: tl.constexpr,
           K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr):  # fmt: skip
    """The next chunk's start, after row 63: of what other programs write now, nothing is read."""
    head, part = tl.program_id(1), tl.program_id(2)
    lane, key, held = tl.arange(0, J), tl.arange(0, K), slot * heads + head
    own, decay_cache_ptr = lane == J - 1, decay_cache_ptr + held * J
    k_cache_ptr += (slot * (heads // REPEAT) + head // REPEAT) * J * K
    total = tl.load(decay_cache_ptr + J - 2) + log_decay
    fade = tl.exp(total - tl.where(own, total, tl.load(decay_cache_ptr + lane, mask=lane < J - 1, other=0.0)))
    k = tl.load(tl.where(own, k_ptr, k_cache_ptr + lane * K)[:, None] + key[None, :])
    leave = tl.trans((k.to(tl.float32) * fade[:, None]).to(k.dtype))
    tl.debug_barrier()  # the last row of u is from this launch
    for first in range(0, BLOCK, NARROW):
        column = part * BLOCK + first + tl.arange(0, NARROW)
        news = tl.load(u_cache_ptr + held * J * E + lane[:, None] * E + column[None, :])
        place = held * K * E + key[:, None] * E + column[None, :]
        added = tl.dot(leave, news, input_precision="ieee")
        closing = tl.exp(total) + tl.zeros((K, NARROW), dtype=tl.float32)
        closed = tl.fma(closing, tl.load(start_ptr + place), added)
        tl.store(start_ptr + place, closed)
        tl.store(image_ptr + place, closed.to(k.dtype))


@triton.jit
def _step(q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, positions_ptr, slot_ptr, start_ptr, image_ptr, k_cache_ptr, v_cache_ptr,
          u_cache_ptr, beta_cache_ptr, decay_cache_ptr, inverse_cache_ptr, out_ptr, q_stride, k_stride, v_stride, heads, scale,
          REPEAT: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
          ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One row of a sequence and head for BLOCK columns: reads lanes before its own, writes its own; row 63 closes the chunk."""
    n, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    q_ptr, k_ptr = q_ptr + n * q_stride + head // REPEAT * K, k_ptr + n * k_stride + head // REPEAT * K
    v_ptr += n * v_stride + head * E
    key, column = tl.arange(0, K), part * BLOCK + tl.arange(0, BLOCK)
    # these loads wait for nothing
    k_new, v_new = tl.load(k_ptr + key), tl.load(v_ptr + column)
    log_decay, beta_new = tl.load(log_decay_ptr + n * heads + head), tl.load(beta_ptr + n * heads + head)
    i, slot = tl.load(positions_ptr + n).to(tl.int32) & (J - 1), tl.load(slot_ptr + n)
    tl.store(v_cache_ptr + ((slot * heads + head) * J + i) * E + column, v_new)
    if (part == 0) & (head % REPEAT == 0):
        tl.store(k_cache_ptr + ((slot * (heads // REPEAT) + head // REPEAT) * J + i) * K + key, k_new)
    operands = (i, slot, log_decay, beta_new, q_ptr, k_ptr, v_ptr, image_ptr, k_cache_ptr, v_cache_ptr, u_cache_ptr, beta_cache_ptr,
                decay_cache_ptr, inverse_cache_ptr, out_ptr, heads, scale)  # fmt: skip
    if i < 16:
        _replay(*operands, REPEAT, K, E, BLOCK, ROWS, STAGES, 16)
    elif i < 32:
        _replay(*operands, REPEAT, K, E, BLOCK, ROWS, STAGES, 32)
    else:
        _replay(*operands, REPEAT, K, E, BLOCK, ROWS, STAGES, J)
    if i == J - 1:
        _close(slot, k_ptr, log_decay, start_ptr, image_ptr, k_cache_ptr, u_cache_ptr, decay_cache_ptr, heads, REPEAT, K, E, BLOCK,
               NARROW)  # fmt: skip


def gated_delta(
    q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, initial_NVKE: Tensor | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """(o_RVE, the state after each document's last whole chunk)."""
    return _by_chunks(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, initial_NVKE, None, rows)


def serve(q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, state: DeltaState, rows: Rows) -> Tensor:
    """o_RVE; the slots of `state` advance in place. Several rows a sequence, or one, can be captured in a CUDA graph."""
    operands = (q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV)
    if rows.max_rows > 1:
        return _by_chunks(*operands, None, state, rows)[0]
    return _by_steps(*operands, state, rows)


def _heads_contiguous(x_RHK: Tensor) -> Tensor:
    """Rows may be slices of wider ones; inside a row heads follow each other."""
    return x_RHK if x_RHK.stride()[1:] == (x_RHK.shape[2], 1) else x_RHK.contiguous()


def plan(rows: Rows) -> tuple[Tensor, Tensor]:
    """`_plan`'s tables, [C, 4] and [N, 2], once for all layers; C is the most chunks that so many rows and sequences can touch."""
    key = "gated_delta plan"
    if key not in rows.launch:
        rows.launch[key] = _lay_out(rows)
    return rows.launch[key]


def _lay_out(rows: Rows) -> tuple[Tensor, Tensor]:
    sequences = rows.starts_N1.shape[0] - 1
    chunks, integers = rows.count // CHUNK + 2 * sequences, {"dtype": torch.int32, "device": rows.starts_N1.device}
    chunk, sequence = torch.empty(chunks, 4, **integers), torch.empty(sequences, 2, **integers)
    _plan[(chunks,)](rows.starts_N1, rows.lengths_N, chunk, sequence, sequences, BLOCK=triton.next_power_of_2(sequences))
    return chunk, sequence


def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None, state: DeltaState | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    q, k, v, beta = *(_heads_contiguous(t) for t in (q, k, v)), beta.contiguous()
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    (chunk, sequence), out = plan(rows), v.new_empty(v.shape)
    *_, decay, u, image, final = states(k, v, log_decay.contiguous(), beta, initial, state, rows)
    sizes = {"REPEAT": heads // key_heads, "K": key_dim, "E": value_dim}
    slot, k_cache = (chunk, chunk) if state is None else (state.slot_N, state.k_SHJK)
    _outputs[(chunk.shape[0], heads)](
        q, k, k_cache, slot, chunk, decay, u, image, out, q.stride(0), k.stride(0), heads, key_dim**-0.5,
        **sizes, BLOCK=min(value_dim, OUTPUT_COLUMNS), CACHED=state is not None, num_warps=4, num_stages=1, **EXACT,
    )  # fmt: skip
    if state is not None:
        _keep[(sequence.shape[0], heads)](
            k, v, beta, decay, chunk, sequence, slot, k_cache, state.v_SVJE, state.beta_SVJ, state.decay_SVJ, k.stride(0), v.stride(0),
            heads, **sizes, num_warps=4, **EXACT,
        )  # fmt: skip
    return out, final


def states(
    k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None, state: DeltaState | None, rows: Rows
) -> tuple[Tensor, ...]:
    """T [C, V, 64, 64], w, exp(G_63 - G) k, G [C, V, 64], u and the image of each chunk, and the states after the last whole ones."""
    (_, key_heads, key_dim), (_, heads, value_dim), (chunk, sequence) = k.shape, v.shape, plan(rows)
    (chunks, _), (sequences, _), exact = chunk.shape, sequence.shape, {"dtype": torch.float32, "device": k.device}
    repeat, cached = heads // key_heads, state is not None
    registers = WIDE_REGISTERS if cached and k.element_size() == 2 else None
    decay, tile = torch.empty(chunks, heads, CHUNK, **exact), torch.empty(chunks, heads, CHUNK, CHUNK, **exact)
    w, leave, u = (k.new_empty(chunks, heads, CHUNK, width) for width in (key_dim, key_dim, value_dim))
    left, image = k.new_empty(tile.shape), k.new_empty(chunks, heads, key_dim, value_dim)
    if state is None:
        slot = k_cache = v_cache = u_cache = beta_cache = decay_cache = inverse_cache = final_image = chunk  # never read
        start = chunk if initial is None else initial.float().contiguous()
        final = torch.empty(sequences, heads, key_dim, value_dim, **exact)
    else:
        slot, k_cache, v_cache, u_cache = state.slot_N, state.k_SHJK, state.v_SVJE, state.u_SVJE
        beta_cache, decay_cache, inverse_cache = state.beta_SVJ, state.decay_SVJ, state.inverse_SVJJ
        final_image, start, final = state.image_SVKE, state.start_SVKE, state.start_SVKE
    _fold[(chunks, triton.cdiv(heads, FOLD_HEADS))](
        log_decay, decay_cache, slot, chunk, decay, heads, BLOCK=FOLD_HEADS, CACHED=cached, num_warps=1, **EXACT
    )
    _scores[(chunks, heads)](
        k, beta, k_cache, beta_cache, slot, chunk, decay, tile, leave, k.stride(0), heads, REPEAT=repeat, K=key_dim, CACHED=cached,
        num_warps=4, num_stages=1, maxnreg=registers, **EXACT,
    )  # fmt: skip
    _invert[(chunks, heads)](tile, chunk, heads, ROWS=INVERT_ROWS, num_warps=1, num_stages=1, **EXACT)
    _local[(chunks, heads)](
        k, beta, k_cache, beta_cache, inverse_cache, slot, chunk, decay, tile, w, left, k.stride(0), heads, REPEAT=repeat, K=key_dim,
        CACHED=cached, num_warps=4, num_stages=1, maxnreg=registers, **EXACT,
    )  # fmt: skip
    wanted, warps, stages = next(shape for most, *shape in SCAN_SHAPES if sequences * heads * value_dim <= most)
    block = min(value_dim, wanted)
    _scan[(sequences * (value_dim // block), heads)](
        v, v_cache, left, w, leave, decay, chunk, sequence, start, slot, u, image, final, final_image, u_cache, v.stride(0), heads,
        K=key_dim, E=value_dim, BLOCK=block, CACHED=cached, INITIAL=start is not chunk, num_warps=warps, num_stages=stages, **EXACT,
    )  # fmt: skip
    return tile, w, leave, decay, u, image, final


def _by_steps(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: DeltaState, rows: Rows) -> Tensor:
    q, k, v = (_heads_contiguous(t) for t in (q, k, v))
    (count, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    wanted, warps, stages, registers = next(shape for most, *shape in STEP_SHAPES if count * heads <= most)
    block, out = min(value_dim, wanted), v.new_empty(v.shape)
    _step[(count, heads, value_dim // block)](
        q, k, v, log_decay.contiguous(), beta.contiguous(), rows.positions_R, state.slot_N, state.start_SVKE, state.image_SVKE,
        state.k_SHJK, state.v_SVJE, state.u_SVJE, state.beta_SVJ, state.decay_SVJ, state.inverse_SVJJ, out,
        q.stride(0), k.stride(0), v.stride(0), heads, key_dim**-0.5, REPEAT=heads // key_heads, K=key_dim, E=value_dim,
        BLOCK=block, NARROW=min(block, CLOSE_COLUMNS), ROWS=STEP_ROWS, STAGES=stages, num_warps=warps, num_stages=1,
        maxnreg=registers, **EXACT,
    )  # fmt: skip
    return out
