"""The backward of gated_delta on CUDA: `backward`'s formulas as kernels of a chunk and head, around a scan over states each way.

The formulas and letters are those of `kernels_chunks` and `backward`; d x is the gradient of x, and p_ij = exp(G_i - G_j) (q_i . k_j).
Nothing is saved but the inputs: the forward's kernels make T, w, u and the chunks' states again. Operands of products have q's
dtype; p, T, the gradients of the products of rows and, but in the scan, d u are two of them each (`fine_product`); the rest is FP32.

    d u_j       sum_i p_ij d o_i + exp(G_63 - G_j) k_j d state'          values_of_outputs, then scan_gradients
    d state     exp(G_63) d state' + sum_i exp(G_i) scale q_i d o_i^T - sum_i w_i^T d u_i          scan_gradients
    d r         T^T d u, r being what T is applied to                    inner_gradients
    d v         beta d r                                                 inner_gradients
    d q         exp(G) scale d o state^T + (d (q . k)) k                 query_gradients
    d k         what it gives as a row of a, as a column of a, to the products with q, to the closing    key_gradients
    d beta      d r . v + k . (d a / beta k - exp(G) d r state^T)        inner_gradients, key_gradients
    d G         q . d q and k's parts of d k times k                     query_gradients, key_gradients, gate_gradients

The sums over rows and columns of d p p + d a a are q and k times products that their own gradients need, so neither p nor a is made
for them, nor k state for d beta.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.gated_delta import kernels
from zoo.common.ops.gated_delta.kernels import heads_contiguous
from zoo.common.ops.gated_delta.kernels_chunks import J, decay_ratios
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.rows import Rows

# columns of a state's gradient that a program holds, warps; (64, 8) fits too
SCAN_SHAPE = (32, 4)
# columns of k's gradient that a program holds at once: with more it spills
KEY_COLUMNS = 64
SUM_ROWS = 16


@triton.jit
def load_rows(x_ptr, stride, high, WIDTH: tl.constexpr):
    """[64, WIDTH] of a chunk and head whose first row is at x_ptr: zeros from lane `high` on."""
    lane = tl.arange(0, J)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    return tl.load(x_ptr + (lane * stride + column), mask=lane < high, other=0.0)


@triton.jit
def fine_product(x, y, start):
    """start + x y of FP32 x, as two operands in y's dtype: its rounding and what that leaves."""
    rounded = x.to(y.dtype)
    total = tl.dot(rounded, y, start, input_precision="ieee")
    if y.dtype != tl.float32:
        total = tl.dot((x - rounded.to(tl.float32)).to(y.dtype), y, total, input_precision="ieee")
    return total


@triton.jit
def values_of_outputs(
    q_ptr,
    k_ptr,
    grad_ptr,
    chunk_ptr,
    decay_ptr,
    grad_u_ptr,
    q_stride,
    k_stride,
    grad_stride,
    heads,
    scale,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """The outputs' part of d u_j, [C, V, 64, E] in FP32: scale sum_i p_ij d o_i."""
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(chunk_ptr + c * 4).to(tl.int64)
    high = tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane = tl.arange(0, J)
    chunk_head = c * heads + head
    q = load_rows(q_ptr + row * q_stride + head // REPEAT * K, q_stride, high, K)
    k = load_rows(k_ptr + row * k_stride + head // REPEAT * K, k_stride, high, K)
    decay = tl.load(decay_ptr + chunk_head * J + lane)
    ratios = tl.exp(tl.where(lane[:, None] <= lane[None, :], decay[None, :] - decay[:, None], float("-inf")))  # [j, i]
    p = tl.dot(k, tl.trans(q), input_precision="ieee") * ratios * scale
    grad = load_rows(grad_ptr + row * grad_stride + head * E, grad_stride, high, E)
    grad_u = fine_product(p, grad, tl.zeros((J, E), dtype=tl.float32))
    tl.store(grad_u_ptr + chunk_head * J * E + (lane[:, None] * E + tl.arange(0, E)[None, :]), grad_u)


@triton.jit
def scan_gradients(
    q_ptr,
    grad_ptr,
    w_ptr,
    closing_k_ptr,
    decay_ptr,
    chunk_ptr,
    sequence_ptr,
    grad_u_ptr,
    final_ptr,
    grad_next_ptr,
    initial_ptr,
    q_stride,
    grad_stride,
    heads,
    scale,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    FINAL: tl.constexpr,
):
    """One sequence and head, its last chunk first, for BLOCK columns of the state's gradient:

    d u      = the outputs' part of it + (exp(G_63 - G) k) d state'
    d state  = exp(G_63) d state' + (exp(G) scale q)^T d o - w^T d u

    Kept are d u (over the outputs' part), d state' of each chunk as an operand, and d of the first state.
    """
    # a head's columns side by side: they read the same w, closing keys and q
    n = (tl.program_id(0) // (E // BLOCK)).to(tl.int64)
    begin = tl.program_id(0) % (E // BLOCK) * BLOCK
    head = tl.program_id(1)
    lane = tl.arange(0, J)
    key = tl.arange(0, K)
    column = begin + tl.arange(0, BLOCK)
    first = tl.load(sequence_ptr + n * 2).to(tl.int64)
    count = tl.load(sequence_ptr + n * 2 + 1)
    tile = key[:, None] * E + column[None, :]
    q_ptr = q_ptr + head // REPEAT * K
    grad_state = tl.load(final_ptr + (n * heads + head) * K * E + tile) if FINAL else tl.zeros((K, BLOCK), dtype=tl.float32)
    for step in range(count):
        c = first + count - 1 - step
        chunk_head = c * heads + head
        row = tl.load(chunk_ptr + c * 4).to(tl.int64)
        high = tl.load(chunk_ptr + c * 4 + 2)
        after = tl.where(high == J, grad_state, 0.0)  # an unfinished chunk hands its state on as it is
        closing_k = tl.load(closing_k_ptr + chunk_head * J * K + (lane[:, None] * K + key[None, :]))
        rounded = after.to(closing_k.dtype)
        tl.store(grad_next_ptr + chunk_head * K * E + tile, rounded)
        rows = lane[:, None] * E + column[None, :]
        grad_u = tl.dot(closing_k, rounded, tl.load(grad_u_ptr + chunk_head * J * E + rows), input_precision="ieee")
        tl.store(grad_u_ptr + chunk_head * J * E + rows, grad_u)

        decay = tl.load(decay_ptr + chunk_head * J + lane)
        q = load_rows(q_ptr + row * q_stride, q_stride, high, K)
        grad = load_rows(grad_ptr + row * grad_stride + head * E + begin, grad_stride, high, BLOCK)
        grad = (grad.to(tl.float32) * (tl.exp(decay) * scale)[:, None]).to(q.dtype)
        w = tl.load(w_ptr + chunk_head * J * K + (lane[:, None] * K + key[None, :]))
        before = tl.dot(tl.trans(q), grad, after * tl.exp(tl.load(decay_ptr + chunk_head * J + J - 1)), input_precision="ieee")
        before = tl.dot(tl.trans(w), (-grad_u).to(w.dtype), before, input_precision="ieee")
        grad_state = tl.where(high == J, before, before + grad_state)
    tl.store(initial_ptr + (n * heads + head) * K * E + tile, grad_state)


@triton.jit
def inner_gradients(
    grad_ptr,
    v_ptr,
    beta_ptr,
    chunk_ptr,
    decay_ptr,
    inverse_ptr,
    u_ptr,
    grad_u_ptr,
    grad_r_ptr,
    grad_v_ptr,
    grad_qk_ptr,
    grad_kk_ptr,
    of_beta_ptr,
    grad_stride,
    v_stride,
    heads,
    scale,
    E: tl.constexpr,
):
    """d r = T^T d u, d v = beta d r, d r . v, and the gradients [C, V, 64, 64] of the products of rows:

    of q_i . k_j            scale exp(G_i - G_j) (d o_i . u_j)
    of k_i . k_j / beta_i   -exp(G_i - G_j) (d r_i . u_j)  for j < i
    """
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(chunk_ptr + c * 4).to(tl.int64)
    high = tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane = tl.arange(0, J)
    column = tl.arange(0, E)
    chunk_head = c * heads + head
    square = lane[:, None] * J + lane[None, :]
    rows = lane[:, None] * E + column[None, :]
    turned = tl.load(inverse_ptr + chunk_head * J * J + (lane[None, :] * J + lane[:, None]), mask=(lane < high)[None, :], other=0.0)
    grad_u = tl.load(grad_u_ptr + chunk_head * J * E + rows)
    rounded_u = grad_u.to(u_ptr.dtype.element_ty)
    grad_r = fine_product(turned, rounded_u, tl.zeros((J, E), dtype=tl.float32))
    if rounded_u.dtype != tl.float32:
        left = (grad_u - rounded_u.to(tl.float32)).to(rounded_u.dtype)
        grad_r = tl.dot(turned.to(rounded_u.dtype), left, grad_r, input_precision="ieee")
    beta = tl.load(beta_ptr + row * heads + head + lane * heads, mask=lane < high, other=0.0)
    v = load_rows(v_ptr + row * v_stride + head * E, v_stride, high, E)
    tl.store(of_beta_ptr + chunk_head * J + lane, tl.sum(grad_r * v.to(tl.float32), axis=1))
    place = grad_v_ptr + (row * heads + head) * E + (lane[:, None] * (heads * E) + column[None, :])
    tl.store(place, grad_r * beta[:, None], mask=(lane < high)[:, None])
    grad_r = grad_r.to(rounded_u.dtype)
    tl.store(grad_r_ptr + chunk_head * J * E + rows, grad_r)

    u = tl.trans(tl.load(u_ptr + chunk_head * J * E + rows))
    ratios = decay_ratios(tl.load(decay_ptr + chunk_head * J + lane))
    grad = load_rows(grad_ptr + row * grad_stride + head * E, grad_stride, high, E)
    grad_qk = tl.dot(grad, u, input_precision="ieee") * ratios * scale
    tl.store(grad_qk_ptr + chunk_head * J * J + square, grad_qk)
    grad_kk = tl.dot(grad_r, u, input_precision="ieee") * ratios
    tl.store(grad_kk_ptr + chunk_head * J * J + square, tl.where(lane[None, :] < lane[:, None], -grad_kk, 0.0))


@triton.jit
def query_gradients(
    q_ptr,
    k_ptr,
    grad_ptr,
    chunk_ptr,
    decay_ptr,
    rounded_ptr,
    grad_qk_ptr,
    grad_q_ptr,
    of_decay_ptr,
    q_stride,
    k_stride,
    grad_stride,
    heads,
    scale,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """A value head's part of d q_i = exp(G_i) scale state d o_i + sum_j d (q_i . k_j) k_j, and q . d q, which is q's part of d G."""
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(chunk_ptr + c * 4).to(tl.int64)
    high = tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane = tl.arange(0, J)
    key = tl.arange(0, K)
    column = tl.arange(0, E)
    chunk_head = c * heads + head
    state = tl.load(rounded_ptr + chunk_head * K * E + (key[:, None] * E + column[None, :]))
    grad = load_rows(grad_ptr + row * grad_stride + head * E, grad_stride, high, E)
    rise = tl.exp(tl.load(decay_ptr + chunk_head * J + lane)) * scale
    grad_q = tl.dot(grad, tl.trans(state), input_precision="ieee") * rise[:, None]
    k = load_rows(k_ptr + row * k_stride + head // REPEAT * K, k_stride, high, K)
    grad_q = fine_product(tl.load(grad_qk_ptr + chunk_head * J * J + (lane[:, None] * J + lane[None, :])), k, grad_q)
    place = (row * heads + head) * K + (lane[:, None] * (heads * K) + key[None, :])
    tl.store(grad_q_ptr + place, grad_q, mask=(lane < high)[:, None])
    q = load_rows(q_ptr + row * q_stride + head // REPEAT * K, q_stride, high, K)
    tl.store(of_decay_ptr + chunk_head * J + lane, tl.sum(grad_q * q.to(tl.float32), axis=1))


@triton.jit
def key_gradients(
    q_ptr,
    k_ptr,
    beta_ptr,
    chunk_ptr,
    decay_ptr,
    rounded_ptr,
    u_ptr,
    grad_r_ptr,
    grad_next_ptr,
    grad_qk_ptr,
    grad_kk_ptr,
    grad_k_ptr,
    gate_ptr,
    q_stride,
    k_stride,
    heads,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A value head's part of d k, BLOCK columns of it, and what these give d G and d beta.

    as a row of a      (-exp(G_i) state d r_i + sum_j d (k_i . k_j / beta_i) k_j) beta_i, whose sum with k is beta's and G's
    as a column        exp(G_63 - G_j) d state' u_j + sum_i d (q_i . k_j) q_i + sum_i d (k_i . k_j) k_i, whose sum with k G loses
    """
    # a head's columns side by side: they read the same rest
    c = (tl.program_id(0) // (K // BLOCK)).to(tl.int64)
    part = tl.program_id(0) % (K // BLOCK)
    head = tl.program_id(1)
    row = tl.load(chunk_ptr + c * 4).to(tl.int64)
    high = tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane = tl.arange(0, J)
    key = part * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, E)
    chunk_head = c * heads + head
    rows = lane[:, None] * E + column[None, :]
    tile = key[:, None] * E + column[None, :]
    square = lane[:, None] * J + lane[None, :]
    turned = lane[None, :] * J + lane[:, None]
    grad_qk_ptr += chunk_head * J * J
    grad_kk_ptr += chunk_head * J * J
    decay = tl.load(decay_ptr + chunk_head * J + lane)
    last = tl.load(decay_ptr + chunk_head * J + J - 1)
    beta = tl.load(beta_ptr + row * heads + head + lane * heads, mask=lane < high, other=0.0)
    state = tl.load(rounded_ptr + chunk_head * K * E + tile)
    after = tl.load(grad_next_ptr + chunk_head * K * E + tile)
    # G_63's part, through exp(G_63) of the state and of the closing keys
    of_last = tl.exp(last) * tl.sum(tl.sum(state.to(tl.float32) * after.to(tl.float32), axis=1), axis=0)

    as_row = tl.dot(tl.load(grad_r_ptr + chunk_head * J * E + rows), tl.trans(state), input_precision="ieee") * -tl.exp(decay)[:, None]
    k = load_rows(k_ptr + row * k_stride + head // REPEAT * K + part * BLOCK, k_stride, high, BLOCK)
    as_row = fine_product(tl.load(grad_kk_ptr + square), k, as_row)
    grad_beta = tl.sum(as_row * k.to(tl.float32), axis=1)

    u = tl.load(u_ptr + chunk_head * J * E + rows)
    as_column = tl.dot(u, tl.trans(after), input_precision="ieee") * tl.exp(last - decay)[:, None]
    of_last += tl.sum(tl.sum(as_column * k.to(tl.float32), axis=1), axis=0)
    q = load_rows(q_ptr + row * q_stride + head // REPEAT * K + part * BLOCK, q_stride, high, BLOCK)
    as_column = fine_product(tl.load(grad_qk_ptr + turned), q, as_column)
    as_column = fine_product(tl.load(grad_kk_ptr + turned) * beta[None, :], k, as_column)

    place = (row * heads + head) * K + (lane[:, None] * (heads * K) + key[None, :])
    tl.store(grad_k_ptr + place, as_row * beta[:, None] + as_column, mask=(lane < high)[:, None])
    gate_ptr += ((part * (tl.num_programs(0) // (K // BLOCK)) + c) * heads + head) * 2 * J + lane
    of_decay = grad_beta * beta - tl.sum(as_column * k.to(tl.float32), axis=1)
    tl.store(gate_ptr, of_decay + tl.where(lane == J - 1, of_last, 0.0))
    tl.store(gate_ptr + J, grad_beta)


@triton.jit
def add_value_heads(
    x_ptr,
    out_ptr,
    count,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The sums of `count` rows and key heads over their value heads, in order."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, K)[None, :]
    total = tl.zeros((ROWS, K), dtype=tl.float32)
    for r in tl.static_range(REPEAT):
        total += tl.load(x_ptr + (at * REPEAT + r) * K + key, mask=at < count, other=0.0)
    tl.store(out_ptr + at * K + key, total, mask=at < count)


@triton.jit
def gate_gradients(
    gate_ptr,
    of_decay_ptr,
    of_beta_ptr,
    chunk_ptr,
    grad_log_decay_ptr,
    grad_beta_ptr,
    heads,
    PARTS: tl.constexpr,
):
    """d log_decay_j = sum_{i >= j} d G_i in a chunk and head, and d beta, from their parts."""
    c = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(chunk_ptr + c * 4).to(tl.int64)
    high = tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane = tl.arange(0, J)
    chunk_head = c * heads + head
    of_decay = tl.load(of_decay_ptr + chunk_head * J + lane)
    grad_beta = tl.load(of_beta_ptr + chunk_head * J + lane)
    for part in tl.static_range(PARTS):
        gate = gate_ptr + ((part * tl.num_programs(0) + c) * heads + head) * 2 * J + lane
        of_decay += tl.load(gate)
        grad_beta += tl.load(gate + J)
    grad_log_decay = tl.sum(tl.where(lane[:, None] >= lane[None, :], of_decay[:, None], 0.0), axis=0)
    tl.store(grad_log_decay_ptr + row * heads + head + lane * heads, grad_log_decay, mask=lane < high)
    tl.store(grad_beta_ptr + row * heads + head + lane * heads, grad_beta, mask=lane < high)


def gated_delta_backward(
    grad_RVE: Tensor,
    grad_final_NVKE: Tensor | None,
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RVE: Tensor,
    log_decay_RV: Tensor,
    beta_RV: Tensor,
    initial_NVKE: Tensor | None,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """As `backward.gated_delta_backward`, for the widths that CUDA's providers serve."""
    assert q_RHK.shape[2] == v_RVE.shape[2] and q_RHK.dtype != torch.float64, (q_RHK.shape, v_RVE.shape, q_RHK.dtype)
    q = heads_contiguous(q_RHK)
    k = heads_contiguous(k_RHK)
    v = heads_contiguous(v_RVE)
    grad = heads_contiguous(grad_RVE.to(v_RVE.dtype))
    beta = beta_RV.contiguous()
    chunk, sequence = kernels.plan(rows)
    count = chunk.shape[0]
    sequences = sequence.shape[0]
    _, key_heads, key_dim = k.shape
    _, heads, value_dim = v.shape
    repeat = heads // key_heads
    scale = key_dim**-0.5
    sizes = {"REPEAT": repeat, "K": key_dim, "E": value_dim}
    exact = {"dtype": torch.float32, "device": q.device}
    inverse, w, closing_k, decay, u, rounded, _ = kernels.states(k, v, log_decay_RV.contiguous(), beta, initial_NVKE, None, rows)

    grad_u = torch.empty(u.shape, **exact)
    grad_initial = torch.empty(sequences, heads, key_dim, value_dim, **exact)
    values_of_outputs[(count, heads)](
        q,
        k,
        grad,
        chunk,
        decay,
        grad_u,
        q.stride(0),
        k.stride(0),
        grad.stride(0),
        heads,
        scale,
        **sizes,
        num_warps=4,
        num_stages=1,
        **EXACT,
    )
    grad_next = torch.empty_like(rounded)
    final = chunk if grad_final_NVKE is None else grad_final_NVKE.float().contiguous()  # a table in its place is never read
    scan_columns, scan_warps = SCAN_SHAPE
    columns = min(value_dim, scan_columns)
    scan_gradients[(sequences * (value_dim // columns), heads)](
        q,
        grad,
        w,
        closing_k,
        decay,
        chunk,
        sequence,
        grad_u,
        final,
        grad_next,
        grad_initial,
        q.stride(0),
        grad.stride(0),
        heads,
        scale,
        **sizes,
        BLOCK=columns,
        FINAL=grad_final_NVKE is not None,
        num_warps=scan_warps,
        num_stages=2,
        **EXACT,
    )
    del w, closing_k

    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    grad_r = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    grad_qk = torch.empty(inverse.shape, **exact)
    grad_kk = inverse  # takes T's place
    of_beta = torch.empty(decay.shape, **exact)
    of_decay = torch.empty(decay.shape, **exact)
    inner_gradients[(count, heads)](
        grad,
        v,
        beta,
        chunk,
        decay,
        inverse,
        u,
        grad_u,
        grad_r,
        grad_v,
        grad_qk,
        grad_kk,
        of_beta,
        grad.stride(0),
        v.stride(0),
        heads,
        scale,
        E=value_dim,
        num_warps=4,
        num_stages=1,
        **EXACT,
    )
    del grad_u
    by_head = q.new_empty(rows.count, heads, key_dim, dtype=q.dtype if repeat == 1 else torch.float32)
    query_gradients[(count, heads)](
        q,
        k,
        grad,
        chunk,
        decay,
        rounded,
        grad_qk,
        by_head,
        of_decay,
        q.stride(0),
        k.stride(0),
        grad.stride(0),
        heads,
        scale,
        **sizes,
        num_warps=4,
        num_stages=1,
        **EXACT,
    )
    grad_q = _of_key_heads(by_head, key_heads, q.dtype)
    by_head = torch.empty_like(by_head) if repeat == 1 else by_head
    columns = min(key_dim, KEY_COLUMNS)
    gates = torch.empty(key_dim // columns, count, heads, 2, CHUNK, **exact)
    key_gradients[(count * (key_dim // columns), heads)](
        q,
        k,
        beta,
        chunk,
        decay,
        rounded,
        u,
        grad_r,
        grad_next,
        grad_qk,
        grad_kk,
        by_head,
        gates,
        q.stride(0),
        k.stride(0),
        heads,
        **sizes,
        BLOCK=columns,
        num_warps=4,
        num_stages=1,
        **EXACT,
    )
    grad_k = _of_key_heads(by_head, key_heads, k.dtype)
    grad_log_decay = torch.empty_like(beta)
    grad_beta = torch.empty_like(beta)
    gate_gradients[(count, heads)](
        gates,
        of_decay,
        of_beta,
        chunk,
        grad_log_decay,
        grad_beta,
        heads,
        PARTS=key_dim // columns,
        num_warps=4,
        **EXACT,
    )
    return grad_q, grad_k, grad_v, grad_log_decay, grad_beta, grad_initial


def _of_key_heads(by_head_RVK: Tensor, key_heads: int, dtype: torch.dtype) -> Tensor:
    """[R, H, K]: the sums over the value heads of each key head."""
    count, heads, key_dim = by_head_RVK.shape
    if heads == key_heads:
        return by_head_RVK
    out = by_head_RVK.new_empty(count, key_heads, key_dim, dtype=dtype)
    add_value_heads[(triton.cdiv(count * key_heads, SUM_ROWS),)](
        by_head_RVK,
        out,
        count * key_heads,
        REPEAT=heads // key_heads,
        K=key_dim,
        ROWS=SUM_ROWS,
        num_warps=4,
        **EXACT,
    )
    return out
