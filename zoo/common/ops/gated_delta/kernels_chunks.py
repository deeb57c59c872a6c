"""gated_delta by whole chunks, in Triton: what one chunk can compute alone in parallel, around a scan over the chunks' states.

The gated delta rule is Gated Delta Networks (Yang, Kautz, Hatamizadeh, ICLR 2025, arXiv 2412.06464), section 3.1, its form by
chunks section 3.3; the triangular inverse is the UT transform of Yang et al. (NeurIPS 2024, arXiv 2406.06484). For one
value head, rows i and j of a chunk of 64, and the state before the chunk:

    G_i     log_decay_0 + .. + log_decay_i                                                   sum_log_decays
    a_ij    (k_i . k_j) exp(G_i - G_j) beta_i  for j < i, else 0                             key_products
    T       (I + a)^-1, so T_i = e_i - sum_j a_ij T_j                                        invert_triangle
    w_i     sum_j T_ij beta_j exp(G_j) k_j                                                   apply_inverse
    u_i     sum_j T_ij beta_j v_j - w_i state                                                scan_states
    state'  exp(G_63) state + sum_j exp(G_63 - G_j) k_j u_j                                  scan_states
    o_i     scale (exp(G_i) q_i state + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) u_j)         chunk_outputs

Every product of a row is one `tl.dot` over all of K or all lanes. Which operands are rounded, and where, the contract says.

Sizes: C chunks, J the 64 lanes of a chunk, K the width of a key, E of a value, R rows, N sequences, V value heads, H key heads.
A lane is a place in a chunk; `low` lanes come from the slot's cache (CACHED, a push in the middle of a chunk), and the lanes from
`high` on have no row. REPEAT value heads share a key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.common.ops.gated_delta.slots import CHUNK

J = tl.constexpr(CHUNK)
# FP32 lanes in a sector of GPU memory, which is 32 bytes
SECTOR = tl.constexpr(8)


@triton.jit
def lay_out_chunks(
    starts_ptr,
    lengths_ptr,
    chunk_ptr,
    sequence_ptr,
    sequences,
    BLOCK: tl.constexpr,
):
    """Where each chunk and each sequence lies, from the offsets and lengths of the sequences.

    chunk [C, 4]     the row of its lane 0, lanes that the cache holds, lanes in use (0: a spare chunk), its sequence
    sequence [N, 2]  its first chunk, how many it has
    """
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
def load_chunk(chunk_ptr, c):
    """The row of lane 0, `low`, `high` and the sequence of chunk c."""
    row = tl.load(chunk_ptr + c * 4).to(tl.int64)
    low = tl.load(chunk_ptr + c * 4 + 1)
    high = tl.load(chunk_ptr + c * 4 + 2)
    return row, low, high, tl.load(chunk_ptr + c * 4 + 3)


@triton.jit
def load_lanes(
    x_ptr,
    cache_ptr,
    row,
    stride,
    low,
    high,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CACHED: tl.constexpr,
):
    """[64, COLUMNS] of a head: lanes below `low` from the cache, lanes below `high` from the batch, zeros after them."""
    lane = tl.arange(0, J)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    place = x_ptr + (row + lane) * stride
    mask = (lane >= low) & (lane < high)
    if CACHED:
        place = tl.where(lane < low, cache_ptr + lane * WIDTH, place)
        mask = lane < high
    return tl.load(place + column, mask=mask, other=0.0)


@triton.jit
def load_keys(
    k_ptr,
    beta_ptr,
    k_cache_ptr,
    beta_cache_ptr,
    row,
    low,
    high,
    slot,
    head,
    stride,
    heads,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    CACHED: tl.constexpr,
):
    """k [64, K] and beta [64] of a chunk and value head."""
    lane = tl.arange(0, J)
    slot_key = slot * (heads // REPEAT) + head // REPEAT
    k = load_lanes(k_ptr + head // REPEAT * K, k_cache_ptr + slot_key * J * K, row, stride, low, high, K, K, CACHED)
    beta = tl.load(beta_ptr + (row + lane) * heads + head, mask=(lane >= low) & (lane < high), other=0.0)
    if CACHED:
        cached = beta_cache_ptr + (slot * heads + head) * J
        beta = tl.where(lane < low, tl.load(cached + lane, mask=lane < low, other=0.0), beta)
    return k, beta


@triton.jit
def decay_ratios(decay):
    """exp(G_i - G_j) for j <= i, 0 beyond: positive differences never reach exp."""
    row = tl.arange(0, J)[:, None]
    lane = tl.arange(0, J)[None, :]
    return tl.exp(tl.where(lane <= row, decay[:, None] - decay[None, :], float("-inf")))


@triton.jit
def sum_log_decays(
    log_decay_ptr,
    cache_ptr,
    slot_ptr,
    chunk_ptr,
    decay_ptr,
    heads,
    BLOCK: tl.constexpr,
    CACHED: tl.constexpr,
):
    """G [C, V, 64]: G_i = G_(i-1) + log_decay_i, a head a thread. Lanes from `high` on repeat the last."""
    c = tl.program_id(0).to(tl.int64)
    row, low, high, n = load_chunk(chunk_ptr, c)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    steps = ()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(J):  # all loads before any store
        place = log_decay_ptr + (row + i) * heads + head
        if CACHED:
            place = tl.where(i < low, cache_ptr + (slot * heads + head) * J + i, place)
        steps = steps + (tl.load(place, mask=(head < heads) & (i < high), other=0.0),)
    for i in tl.static_range(J):
        # the cache holds sums already
        total = tl.where(i < low, steps[i], tl.where(i < high, total + steps[i], total))
        tl.store(decay_ptr + (c * heads + head) * J + i, total, mask=head < heads)


@triton.jit
def key_products(
    k_ptr,
    beta_ptr,
    k_cache_ptr,
    beta_cache_ptr,
    slot_ptr,
    chunk_ptr,
    decay_ptr,
    triangle_ptr,
    closing_k_ptr,
    k_stride,
    heads,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    CACHED: tl.constexpr,
):
    """-a_ij = -(k_i . k_j) exp(G_i - G_j) beta_i, and the closing keys exp(G_63 - G_j) k_j.

    triangle [C, V, 64, 64]: -a below the diagonal, +0 on it and beyond; sectors wholly beyond it aren't written.
    """
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row, low, high, n = load_chunk(chunk_ptr, c)
    if high == 0:
        return
    lane = tl.arange(0, J)
    chunk_head = c * heads + head
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    k, beta = load_keys(k_ptr, beta_ptr, k_cache_ptr, beta_cache_ptr, row, low, high, slot, head, k_stride, heads, REPEAT, K, CACHED)
    decay = tl.load(decay_ptr + chunk_head * J + lane)
    closing_k = k.to(tl.float32) * tl.exp(tl.load(decay_ptr + chunk_head * J + J - 1) - decay)[:, None]
    tl.store(closing_k_ptr + chunk_head * J * K + lane[:, None] * K + tl.arange(0, K)[None, :], closing_k.to(k.dtype))
    a = tl.dot(k, tl.trans(k), input_precision="ieee") * decay_ratios(decay) * beta[:, None]
    near = (lane // SECTOR)[None, :] <= (lane // SECTOR)[:, None]
    tl.store(triangle_ptr + chunk_head * J * J + lane[:, None] * J + lane[None, :], -a, mask=near)  # 0 - a: never -0


@triton.jit
def load_pair(ptr):
    """Two FP32 neighbours by one load, for the loads are what `invert_triangle` waits for."""
    both = tl.load(ptr.to(tl.pointer_type(tl.int64), bitcast=True))
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def invert_triangle(triangle_ptr, chunk_ptr, heads, ROWS: tl.constexpr):
    """T_i = e_i - sum_{j < i} a_ij T_j, written over the rows of -a: forward substitution, one chain of FMAs a number, j ascending.

    One warp, whose threads have columns to themselves, makes ROWS rows at once: first what the rows of earlier blocks give them,
    then what they give each other.
    """
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    high = tl.load(chunk_ptr + c * 4 + 2)
    triangle_ptr += (c * heads + head) * J * J
    lane = tl.arange(0, J)
    mine_ptr = triangle_ptr
    for first in range(0, high, ROWS):
        rows = ()
        factors = ()
        for r in tl.static_range(ROWS):
            rows = rows + (tl.where(lane == first + r, 1.0, 0.0),)
        earlier_ptr = triangle_ptr + lane
        factor_ptr = mine_ptr
        for _ in range(0, first, ROWS):
            for s in tl.static_range(0, ROWS, 2):
                # stored by the same thread. -0 is +0 as a factor, not as a result
                one = tl.load(earlier_ptr + s * J) + 0.0
                two = tl.load(earlier_ptr + (s + 1) * J) + 0.0
                later = ()
                for r in tl.static_range(ROWS):
                    of_one, of_two = load_pair(factor_ptr + (r * J + s))
                    later = later + (tl.fma(of_two, two, tl.fma(of_one, one, rows[r])),)
                rows = later
            earlier_ptr += ROWS * J
            factor_ptr += ROWS
        for r in tl.static_range(ROWS):
            for s in tl.static_range(r):
                factors = factors + (tl.load(factor_ptr + (r * J + s)),)
        tl.debug_barrier()  # all threads have these rows of -a
        for r in tl.static_range(ROWS):
            earlier = rows[r] + 0.0
            later = ()
            tl.store(mine_ptr + r * J + lane, rows[r])
            for s in tl.static_range(ROWS):
                later = later + (tl.fma(factors[s * (s - 1) // 2 + r], earlier, rows[s]) if s > r else rows[s],)
            rows = later
        mine_ptr += ROWS * J


@triton.jit
def apply_inverse(
    k_ptr,
    beta_ptr,
    k_cache_ptr,
    beta_cache_ptr,
    inverse_cache_ptr,
    slot_ptr,
    chunk_ptr,
    decay_ptr,
    inverse_ptr,
    w_ptr,
    value_factors_ptr,
    k_stride,
    heads,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    CACHED: tl.constexpr,
):
    """w_i = sum_j T_ij beta_j exp(G_j) k_j, and the values' factors T_ij beta_j as an operand. T of an open chunk goes to its slot."""
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row, low, high, n = load_chunk(chunk_ptr, c)
    if high == 0:
        return
    lane = tl.arange(0, J)
    chunk_head = c * heads + head
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    k, beta = load_keys(k_ptr, beta_ptr, k_cache_ptr, beta_cache_ptr, row, low, high, slot, head, k_stride, heads, REPEAT, K, CACHED)
    decay = tl.load(decay_ptr + chunk_head * J + lane)
    square = lane[:, None] * J + lane[None, :]
    inverse = tl.load(inverse_ptr + chunk_head * J * J + square, mask=(lane < high)[:, None], other=0.0)
    if CACHED:
        if high < J:
            tl.store(inverse_cache_ptr + (slot * heads + head) * J * J + square, inverse, mask=(lane < high)[:, None])
    tl.store(value_factors_ptr + chunk_head * J * J + square, (inverse * beta[None, :]).to(k.dtype))
    w = tl.dot((inverse * (beta * tl.exp(decay))[None, :]).to(k.dtype), k, input_precision="ieee")
    tl.store(w_ptr + chunk_head * J * K + lane[:, None] * K + tl.arange(0, K)[None, :], w.to(k.dtype))


@triton.jit
def scan_states(
    v_ptr,
    v_cache_ptr,
    value_factors_ptr,
    w_ptr,
    closing_k_ptr,
    decay_ptr,
    chunk_ptr,
    sequence_ptr,
    initial_ptr,
    slot_ptr,
    u_ptr,
    rounded_ptr,
    final_ptr,
    final_rounded_ptr,
    u_cache_ptr,
    v_stride,
    heads,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    CACHED: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Chunk after chunk of one sequence and head, for BLOCK columns of its state:

    u_i    = sum_j T_ij beta_j v_j - w_i state
    state' = exp(G_63) state + sum_j exp(G_63 - G_j) k_j u_j

    Kept are u, the state before each chunk as its rows read it (`rounded`), and the state after the last whole chunk.
    """
    # a head's columns side by side, which read the same w; `apply_inverse`'s last head first, which L2 still has
    n = tl.program_id(0) // (E // BLOCK)
    begin = tl.program_id(0) % (E // BLOCK) * BLOCK
    head = heads - 1 - tl.program_id(1)
    lane = tl.arange(0, J)
    key = tl.arange(0, K)
    column = begin + tl.arange(0, BLOCK)
    first = tl.load(sequence_ptr + n * 2).to(tl.int64)
    count = tl.load(sequence_ptr + n * 2 + 1)
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    slot_head = slot * heads + head
    row, cached, _, _ = load_chunk(chunk_ptr, first)
    last = tl.load(chunk_ptr + (first + tl.maximum(count, 1) - 1) * 4 + 2)
    tile = key[:, None] * E + column[None, :]
    state = tl.load(initial_ptr + slot_head * K * E + tile) if INITIAL else tl.zeros((K, BLOCK), dtype=tl.float32)
    for step in range(count):
        chunk_head = (first + step) * heads + head
        low = tl.where(step == 0, cached, 0)
        high = tl.where(step == count - 1, last, J)
        last_decay = tl.load(decay_ptr + chunk_head * J + J - 1)
        rounded = state.to(w_ptr.dtype.element_ty)

        factors = tl.load(value_factors_ptr + chunk_head * J * J + lane[:, None] * J + lane[None, :])
        v_block_ptr = v_ptr + head * E + begin
        v_cache_block_ptr = v_cache_ptr + slot_head * J * E + begin
        v = load_lanes(v_block_ptr, v_cache_block_ptr, row + step * J, v_stride, low, high, E, BLOCK, CACHED)
        from_values = tl.dot(factors, v, input_precision="ieee")
        w = tl.load(w_ptr + chunk_head * J * K + lane[:, None] * K + key[None, :])
        u = (from_values - tl.dot(w, rounded, input_precision="ieee")).to(rounded.dtype)
        tl.store(rounded_ptr + chunk_head * K * E + tile, rounded)
        tl.store(u_ptr + chunk_head * J * E + lane[:, None] * E + column[None, :], u)
        if CACHED:
            open_lane = (lane < high) & (high < J)
            tl.store(u_cache_ptr + slot_head * J * E + lane[:, None] * E + column[None, :], u, mask=open_lane[:, None])

        closing_k = tl.load(closing_k_ptr + chunk_head * J * K + lane[:, None] * K + key[None, :])
        added = tl.dot(tl.trans(closing_k), u, input_precision="ieee")
        kept = tl.exp(last_decay) + tl.zeros((K, BLOCK), dtype=tl.float32)
        state = tl.where(high == J, tl.fma(kept, state, added), state)
    tl.store(final_ptr + slot_head * K * E + tile, state)
    if CACHED:
        tl.store(final_rounded_ptr + slot_head * K * E + tile, state.to(w_ptr.dtype.element_ty))


@triton.jit
def chunk_outputs(
    q_ptr,
    k_ptr,
    k_cache_ptr,
    slot_ptr,
    chunk_ptr,
    decay_ptr,
    u_ptr,
    rounded_ptr,
    out_ptr,
    q_stride,
    k_stride,
    heads,
    scale,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    CACHED: tl.constexpr,
):
    """o_i = scale (exp(G_i) q_i state + sum_{j <= i} p_ij u_j), p_ij = exp(G_i - G_j) (q_i . k_j).

    BLOCK columns after each other, so that p is made once.
    """
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row, low, high, n = load_chunk(chunk_ptr, c)
    if high == 0:
        return
    lane = tl.arange(0, J)
    key = tl.arange(0, K)
    chunk_head = c * heads + head
    slot = tl.load(slot_ptr + n) if CACHED else n.to(tl.int64)
    slot_key = slot * (heads // REPEAT) + head // REPEAT
    q = load_lanes(q_ptr + head // REPEAT * K, q_ptr, row, q_stride, low, high, K, K, False)
    k = load_lanes(k_ptr + head // REPEAT * K, k_cache_ptr + slot_key * J * K, row, k_stride, low, high, K, K, CACHED)
    decay = tl.load(decay_ptr + chunk_head * J + lane)
    p = (tl.dot(q, tl.trans(k), input_precision="ieee") * decay_ratios(decay)).to(q.dtype)
    p = tl.where(lane[None, :] <= lane[:, None], p, 0.0)
    for begin in tl.static_range(0, E, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        rounded = tl.load(rounded_ptr + chunk_head * K * E + key[:, None] * E + column[None, :])
        u = tl.load(u_ptr + chunk_head * J * E + lane[:, None] * E + column[None, :], mask=(lane < high)[:, None], other=0.0)
        from_state = tl.dot(q, rounded, input_precision="ieee") * tl.exp(decay)[:, None]
        out = tl.dot(p, u, from_state, input_precision="ieee") * scale
        place = out_ptr + ((row + lane)[:, None] * heads + head) * E + column[None, :]
        tl.store(place, out.to(q.dtype), mask=(lane >= low)[:, None] & (lane < high)[:, None])


@triton.jit
def keep_open_chunk(
    k_ptr,
    v_ptr,
    beta_ptr,
    decay_ptr,
    chunk_ptr,
    sequence_ptr,
    slot_ptr,
    k_cache_ptr,
    v_cache_ptr,
    beta_cache_ptr,
    decay_cache_ptr,
    k_stride,
    v_stride,
    heads,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """The rows of a sequence's unfinished last chunk go to its slot, after every reader of the slot."""
    n = tl.program_id(0)
    head = tl.program_id(1)
    c = (tl.load(sequence_ptr + n * 2) + tl.load(sequence_ptr + n * 2 + 1) - 1).to(tl.int64)
    row, low, high, _ = load_chunk(chunk_ptr, c)
    if high == J:
        return
    lane = tl.arange(0, J)
    slot = tl.load(slot_ptr + n)
    chunk_head = c * heads + head
    slot_head = slot * heads + head
    pushed = (lane >= low) & (lane < high)
    if head % REPEAT == 0:
        slot_key = slot * (heads // REPEAT) + head // REPEAT
        k = load_lanes(k_ptr + head // REPEAT * K, k_ptr, row, k_stride, low, high, K, K, False)
        tl.store(k_cache_ptr + slot_key * J * K + lane[:, None] * K + tl.arange(0, K)[None, :], k, mask=pushed[:, None])
    v = load_lanes(v_ptr + head * E, v_ptr, row, v_stride, low, high, E, E, False)
    tl.store(v_cache_ptr + slot_head * J * E + lane[:, None] * E + tl.arange(0, E)[None, :], v, mask=pushed[:, None])
    tl.store(beta_cache_ptr + slot_head * J + lane, tl.load(beta_ptr + (row + lane) * heads + head, mask=pushed, other=0.0), mask=pushed)
    tl.store(decay_cache_ptr + slot_head * J + lane, tl.load(decay_ptr + chunk_head * J + lane), mask=pushed)
