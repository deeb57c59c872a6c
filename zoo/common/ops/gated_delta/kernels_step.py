"""gated_delta by one row a sequence, in Triton: decode replays the row from its slot, and row 63 closes the chunk.

The formulas and letters are those of `kernels_chunks`. Every product has the bytes of a row of the whole chunk's: the same steps in
the same order, those over zeros left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.common.ops.gated_delta.kernels_chunks import J


@triton.jit
def replay_row(
    i,
    slot,
    log_decay,
    beta_new,
    q_ptr,
    k_ptr,
    v_ptr,
    rounded_ptr,
    k_cache_ptr,
    v_cache_ptr,
    u_cache_ptr,
    beta_cache_ptr,
    decay_cache_ptr,
    inverse_cache_ptr,
    out_ptr,
    heads,
    scale,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Row i of a chunk, i < LANES: u_i and T_i for the slot, o_i for the caller.

    A product's tile has two rows that count: row 0 is on the way to u, row 1 (and its copies) on the way to o.
    """
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    lane = tl.arange(0, LANES)
    key = tl.arange(0, K)
    column = part * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[:, None]
    own = lane == i
    live = lane <= i
    before = lane < i
    slot_head = slot * heads + head
    row_head = n * heads + head
    k_cache_ptr += (slot * (heads // REPEAT) + head // REPEAT) * J * K
    v_cache_ptr = v_cache_ptr + slot_head * J * E
    u_cache_ptr = u_cache_ptr + slot_head * J * E
    beta_cache_ptr = beta_cache_ptr + slot_head * J
    decay_cache_ptr = decay_cache_ptr + slot_head * J
    inverse_cache_ptr += slot_head * J * J
    k_lanes = tl.where(own, k_ptr, k_cache_ptr + lane * K)
    v_lanes = tl.where(own, v_ptr, v_cache_ptr + lane * E)

    # G_i = G_(i-1) + log_decay_i, and exp(G_i - G_j)
    total = tl.load(decay_cache_ptr + i - 1, mask=i > 0, other=0.0) + log_decay
    beta = tl.where(own, beta_new, tl.load(beta_cache_ptr + lane, mask=before, other=0.0))
    decay = tl.where(own, total, tl.load(decay_cache_ptr + lane, mask=before, other=0.0))
    ratio = tl.exp(tl.where(live, total - decay, float("-inf")))
    # one turn, which the compiler doesn't know: with two stages it copies a loop's tiles asynchronously, all at once
    for _ in tl.range(0, (slot >= 0).to(tl.int32), num_stages=STAGES):
        keys = tl.load(k_lanes[None, :] + key[:, None], mask=live[None, :], other=0.0)
        k_and_q = tl.load(tl.where(row == 0, k_ptr, q_ptr) + key[None, :])
        products = tl.dot(k_and_q, keys, input_precision="ieee")
        earlier = tl.load(inverse_cache_ptr + lane[:, None] * J + lane[None, :], mask=before[:, None], other=0.0)
        k = tl.load(k_lanes[:, None] + key[None, :], mask=live[:, None], other=0.0)
        rounded = tl.load(rounded_ptr + slot_head * K * E + key[:, None] * E + column[None, :])
        v = tl.load(v_lanes[:, None] + column[None, :], mask=live[:, None], other=0.0)
        u = tl.load(u_cache_ptr + lane[:, None] * E + column[None, :], mask=before[:, None], other=0.0)

        # a_ij = (k_i . k_j) exp(G_i - G_j) beta_i and p_ij = (q_i . k_j) exp(G_i - G_j)
        a = tl.sum(tl.where(row == 0, products, 0.0), axis=0) * ratio * beta_new
        p = tl.where((row > 0) & live[None, :], products * ratio[None, :], 0.0).to(k.dtype)
        # T_i = e_i - sum_j a_ij T_j. A product of FP32 is FMAs, j ascending: `invert_triangle`'s chain. + 0.0 makes -0 +0, as its
        # sums do; -1.0 x 0 leaves even -0 alone
        a = tl.where(before, -(a + 0.0), -1.0)
        inverse = tl.dot(a[None, :], earlier + 0.0, tl.where(own, 1.0, 0.0)[None, :], input_precision="ieee")
        # w_i = sum_j T_ij beta_j exp(G_j) k_j, and sum_j T_ij beta_j v_j
        factors = tl.where(row == 0, inverse * (beta * tl.exp(decay))[None, :], inverse * beta[None, :]).to(k.dtype)
        w = tl.dot(factors, k, input_precision="ieee").to(k.dtype)
        from_values = tl.sum(tl.where(row == 1, tl.dot(factors, v, input_precision="ieee"), 0.0), axis=0)
        # w_i state and q_i state; u_i is the difference
        from_state = tl.dot(tl.where(row == 0, w, k_and_q), rounded, input_precision="ieee")
        u_new = (from_values - tl.sum(tl.where(row == 0, from_state, 0.0), axis=0)).to(k.dtype)
        u = tl.where(own[:, None], u_new[None, :], u)
        # o_i = scale (exp(G_i) q_i state + sum_j p_ij u_j)
        out = tl.dot(p, u, from_state * tl.exp(total), input_precision="ieee")
        if LANES < J:
            out += 0.0  # the steps left out, over zeros, make -0 +0
        result = tl.where(row == 0, u_new[None, :], (out * scale).to(k.dtype))
        tl.store(tl.where(row == 0, u_cache_ptr + i * E, out_ptr + row_head * E) + column[None, :], result, mask=row < 2)
        if part == 0:
            tl.store(inverse_cache_ptr + i * J + lane[None, :], inverse)
            if LANES < J:
                tl.store(inverse_cache_ptr + i * J + tl.arange(0, J), tl.zeros((J,), tl.float32), mask=tl.arange(0, J) >= LANES)
            tl.store(beta_cache_ptr + i, beta_new)
            tl.store(decay_cache_ptr + i, total)


@triton.jit
def close_chunk(
    slot,
    k_ptr,
    log_decay,
    state_ptr,
    rounded_ptr,
    k_cache_ptr,
    u_cache_ptr,
    decay_cache_ptr,
    heads,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """state' = exp(G_63) state + sum_j exp(G_63 - G_j) k_j u_j, after row 63.

    Of what other programs write now, nothing is read.
    """
    head = tl.program_id(1)
    part = tl.program_id(2)
    lane = tl.arange(0, J)
    key = tl.arange(0, K)
    slot_head = slot * heads + head
    own = lane == J - 1
    decay_cache_ptr = decay_cache_ptr + slot_head * J
    k_cache_ptr += (slot * (heads // REPEAT) + head // REPEAT) * J * K
    total = tl.load(decay_cache_ptr + J - 2) + log_decay
    ratio = tl.exp(total - tl.where(own, total, tl.load(decay_cache_ptr + lane, mask=lane < J - 1, other=0.0)))
    k = tl.load(tl.where(own, k_ptr, k_cache_ptr + lane * K)[:, None] + key[None, :])
    closing_k = tl.trans((k.to(tl.float32) * ratio[:, None]).to(k.dtype))
    tl.debug_barrier()  # the last row of u is from this launch
    for first in range(0, BLOCK, NARROW):
        column = part * BLOCK + first + tl.arange(0, NARROW)
        u = tl.load(u_cache_ptr + slot_head * J * E + lane[:, None] * E + column[None, :])
        place = slot_head * K * E + key[:, None] * E + column[None, :]
        added = tl.dot(closing_k, u, input_precision="ieee")
        kept = tl.exp(total) + tl.zeros((K, NARROW), dtype=tl.float32)
        closed = tl.fma(kept, tl.load(state_ptr + place), added)
        tl.store(state_ptr + place, closed)
        tl.store(rounded_ptr + place, closed.to(k.dtype))


@triton.jit
def decode_row(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    positions_ptr,
    slot_ptr,
    state_ptr,
    rounded_ptr,
    k_cache_ptr,
    v_cache_ptr,
    u_cache_ptr,
    beta_cache_ptr,
    decay_cache_ptr,
    inverse_cache_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    heads,
    scale,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row of a sequence and head for BLOCK columns: reads lanes before its own, writes its own; row 63 closes the chunk."""
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    q_ptr = q_ptr + n * q_stride + head // REPEAT * K
    k_ptr = k_ptr + n * k_stride + head // REPEAT * K
    v_ptr += n * v_stride + head * E
    key = tl.arange(0, K)
    column = part * BLOCK + tl.arange(0, BLOCK)
    # these loads wait for nothing
    k_new = tl.load(k_ptr + key)
    v_new = tl.load(v_ptr + column)
    log_decay = tl.load(log_decay_ptr + n * heads + head)
    beta_new = tl.load(beta_ptr + n * heads + head)
    i = tl.load(positions_ptr + n).to(tl.int32) & (J - 1)
    slot = tl.load(slot_ptr + n)
    tl.store(v_cache_ptr + ((slot * heads + head) * J + i) * E + column, v_new)
    if (part == 0) & (head % REPEAT == 0):
        tl.store(k_cache_ptr + ((slot * (heads // REPEAT) + head // REPEAT) * J + i) * K + key, k_new)
    operands = (
        i,
        slot,
        log_decay,
        beta_new,
        q_ptr,
        k_ptr,
        v_ptr,
        rounded_ptr,
        k_cache_ptr,
        v_cache_ptr,
        u_cache_ptr,
        beta_cache_ptr,
        decay_cache_ptr,
        inverse_cache_ptr,
        out_ptr,
        heads,
        scale,
    )
    if i < 16:
        replay_row(*operands, REPEAT, K, E, BLOCK, ROWS, STAGES, 16)
    elif i < 32:
        replay_row(*operands, REPEAT, K, E, BLOCK, ROWS, STAGES, 32)
    else:
        replay_row(*operands, REPEAT, K, E, BLOCK, ROWS, STAGES, J)
    if i == J - 1:
        caches = (k_cache_ptr, u_cache_ptr, decay_cache_ptr)
        close_chunk(slot, k_ptr, log_decay, state_ptr, rounded_ptr, *caches, heads, REPEAT, K, E, BLOCK, NARROW)
