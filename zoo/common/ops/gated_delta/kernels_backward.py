"""The backward of gated_delta on CUDA: `backward`'s formulas as kernels of a chunk and head, around a scan over states each way.

Nothing is saved but the inputs: the forward's kernels make T, w, u and the states' images again. Operands of products have q's dtype,
P, T, the scores' gradients and, but in the scan, grad_u are two of them each (`_fine`); the rest is FP32. The sums over rows and
columns of grad_P P + grad_A A are q and k times products that their own gradients need, so neither P nor A is made for them, nor
k H for grad_beta = grad_r . v + k . (grad_A / beta k - exp(G) grad_r H^T).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.gated_delta import kernels
from zoo.common.ops.gated_delta.kernels import J, _fade, _heads_contiguous
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.rows import Rows

SCAN_SHAPE = (32, 4)  # columns of a state's gradient that a program holds, warps; (64, 8) fits too
KEY_COLUMNS = 64  # of k's gradient that a program holds at once: with more it spills
SUM_ROWS = 16


@triton.jit
def _lanes(x_ptr, stride, high, WIDTH: tl.constexpr):
    """[64, WIDTH] of a chunk and head whose first row is at x_ptr: zeros from lane `high` on."""
    lane, column = tl.arange(0, J)[:, None], tl.arange(0, WIDTH)[None, :]
    return tl.load(x_ptr + (lane * stride + column), mask=lane < high, other=0.0)


@triton.jit
def _fine(x, y, start):
    """start + x y of FP32 x, as two operands in y's dtype: its rounding and what that leaves."""
    high = x.to(y.dtype)
    total = tl.dot(high, y, start, input_precision="ieee")
    if y.dtype != tl.float32:
        total = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, total, input_precision="ieee")
    return total


@triton.jit
def _outputs_back(q_ptr, k_ptr, grad_ptr, chunk_ptr, decay_ptr, grad_u_ptr, q_stride, k_stride, grad_stride, heads, scale,
                  REPEAT: tl.constexpr, K: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """The outputs' part of u's gradient, [C, V, 64, E] in FP32: P^T grad."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, high = tl.load(chunk_ptr + c * 4).to(tl.int64), tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane, at = tl.arange(0, J), c * heads + head
    q = _lanes(q_ptr + row * q_stride + head // REPEAT * K, q_stride, high, K)
    k = _lanes(k_ptr + row * k_stride + head // REPEAT * K, k_stride, high, K)
    decay = tl.load(decay_ptr + at * J + lane)
    fade = tl.exp(tl.where(lane[:, None] <= lane[None, :], decay[None, :] - decay[:, None], float("-inf")))  # [j, i]
    p = tl.dot(k, tl.trans(q), input_precision="ieee") * fade * scale
    grad = _lanes(grad_ptr + row * grad_stride + head * E, grad_stride, high, E)
    own = _fine(p, grad, tl.zeros((J, E), dtype=tl.float32))
    tl.store(grad_u_ptr + at * J * E + (lane[:, None] * E + tl.arange(0, E)[None, :]), own)


@triton.jit
def _scan_back(q_ptr, grad_ptr, w_ptr, leave_ptr, decay_ptr, chunk_ptr, sequence_ptr, grad_u_ptr, final_ptr, grad_next_ptr, initial_ptr,
               q_stride, grad_stride, heads, scale, REPEAT: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
               BLOCK: tl.constexpr, FINAL: tl.constexpr):  # fmt: skip
    """Gradients of u (over the outputs' part of it), of the states after chunks and of the first, of one sequence and head for BLOCK
    columns, its last chunk first."""
    # a head's columns side by side: they read the same w, leave and q
    n, begin, head = (tl.program_id(0) // (E // BLOCK)).to(tl.int64), tl.program_id(0) % (E // BLOCK) * BLOCK, tl.program_id(1)
    lane, key, column = tl.arange(0, J), tl.arange(0, K), begin + tl.arange(0, BLOCK)
    first, count = tl.load(sequence_ptr + n * 2).to(tl.int64), tl.load(sequence_ptr + n * 2 + 1)
    tile, q_ptr = key[:, None] * E + column[None, :], q_ptr + head // REPEAT * K
    state = tl.load(final_ptr + (n * heads + head) * K * E + tile) if FINAL else tl.zeros((K, BLOCK), dtype=tl.float32)
    for step in range(count):
        c = first + count - 1 - step
        at = c * heads + head
        row, high = tl.load(chunk_ptr + c * 4).to(tl.int64), tl.load(chunk_ptr + c * 4 + 2)
        after = tl.where(high == J, state, 0.0)  # an unfinished chunk hands its state on as it is
        leave = tl.load(leave_ptr + at * J * K + (lane[:, None] * K + key[None, :]))
        image = after.to(leave.dtype)
        tl.store(grad_next_ptr + at * K * E + tile, image)
        rows = lane[:, None] * E + column[None, :]
        news = tl.dot(leave, image, tl.load(grad_u_ptr + at * J * E + rows), input_precision="ieee")
        tl.store(grad_u_ptr + at * J * E + rows, news)
        decay = tl.load(decay_ptr + at * J + lane)
        q = _lanes(q_ptr + row * q_stride, q_stride, high, K)
        grad = _lanes(grad_ptr + row * grad_stride + head * E + begin, grad_stride, high, BLOCK)
        grad = (grad.to(tl.float32) * (tl.exp(decay) * scale)[:, None]).to(q.dtype)
        w = tl.load(w_ptr + at * J * K + (lane[:, None] * K + key[None, :]))
        before = tl.dot(tl.trans(q), grad, after * tl.exp(tl.load(decay_ptr + at * J + J - 1)), input_precision="ieee")
        before = tl.dot(tl.trans(w), (-news).to(w.dtype), before, input_precision="ieee")
        state = tl.where(high == J, before, before + state)
    tl.store(initial_ptr + (n * heads + head) * K * E + tile, state)


@triton.jit
def _inner_back(grad_ptr, v_ptr, beta_ptr, chunk_ptr, decay_ptr, tile_ptr, u_ptr, grad_u_ptr, grad_r_ptr, grad_v_ptr, of_p_ptr, of_a_ptr,
                of_beta_ptr, grad_stride, v_stride, heads, scale, E: tl.constexpr):  # fmt: skip
    """grad_r = T^T grad_u, grad_v, grad_r . v, and of_p, of_a [C, V, 64, 64]: the gradients of q_i . k_j and of k_i . k_j / beta_i."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, high = tl.load(chunk_ptr + c * 4).to(tl.int64), tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane, column, at = tl.arange(0, J), tl.arange(0, E), c * heads + head
    square, rows = lane[:, None] * J + lane[None, :], lane[:, None] * E + column[None, :]
    turned = tl.load(tile_ptr + at * J * J + (lane[None, :] * J + lane[:, None]), mask=(lane < high)[None, :], other=0.0)
    grad_u = tl.load(grad_u_ptr + at * J * E + rows)
    high_u = grad_u.to(u_ptr.dtype.element_ty)
    grad_r = _fine(turned, high_u, tl.zeros((J, E), dtype=tl.float32))
    if high_u.dtype != tl.float32:
        grad_r = tl.dot(turned.to(high_u.dtype), (grad_u - high_u.to(tl.float32)).to(high_u.dtype), grad_r, input_precision="ieee")
    beta = tl.load(beta_ptr + row * heads + head + lane * heads, mask=lane < high, other=0.0)
    v = _lanes(v_ptr + row * v_stride + head * E, v_stride, high, E)
    tl.store(of_beta_ptr + at * J + lane, tl.sum(grad_r * v.to(tl.float32), axis=1))
    place = grad_v_ptr + (row * heads + head) * E + (lane[:, None] * (heads * E) + column[None, :])
    tl.store(place, grad_r * beta[:, None], mask=(lane < high)[:, None])
    grad_r = grad_r.to(high_u.dtype)
    tl.store(grad_r_ptr + at * J * E + rows, grad_r)
    u, fade = tl.trans(tl.load(u_ptr + at * J * E + rows)), _fade(tl.load(decay_ptr + at * J + lane))
    grad = _lanes(grad_ptr + row * grad_stride + head * E, grad_stride, high, E)
    of_p = tl.dot(grad, u, input_precision="ieee") * fade * scale
    tl.store(of_p_ptr + at * J * J + square, of_p)
    of_a = tl.dot(grad_r, u, input_precision="ieee") * fade
    tl.store(of_a_ptr + at * J * J + square, tl.where(lane[None, :] < lane[:, None], -of_a, 0.0))


@triton.jit
def _queries_back(q_ptr, k_ptr, grad_ptr, chunk_ptr, decay_ptr, image_ptr, of_p_ptr, grad_q_ptr, of_g_ptr, q_stride, k_stride, grad_stride,
                  heads, scale, REPEAT: tl.constexpr, K: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """A value head's part of grad_q, and q . grad_q: what q gives the gradient of G."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, high = tl.load(chunk_ptr + c * 4).to(tl.int64), tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane, key, column, at = tl.arange(0, J), tl.arange(0, K), tl.arange(0, E), c * heads + head
    start = tl.load(image_ptr + at * K * E + (key[:, None] * E + column[None, :]))
    grad = _lanes(grad_ptr + row * grad_stride + head * E, grad_stride, high, E)
    rise = tl.exp(tl.load(decay_ptr + at * J + lane)) * scale
    grad_q = tl.dot(grad, tl.trans(start), input_precision="ieee") * rise[:, None]
    k = _lanes(k_ptr + row * k_stride + head // REPEAT * K, k_stride, high, K)
    grad_q = _fine(tl.load(of_p_ptr + at * J * J + (lane[:, None] * J + lane[None, :])), k, grad_q)
    place = (row * heads + head) * K + (lane[:, None] * (heads * K) + key[None, :])
    tl.store(grad_q_ptr + place, grad_q, mask=(lane < high)[:, None])
    q = _lanes(q_ptr + row * q_stride + head // REPEAT * K, q_stride, high, K)
    tl.store(of_g_ptr + at * J + lane, tl.sum(grad_q * q.to(tl.float32), axis=1))


@triton.jit
def _keys_back(q_ptr, k_ptr, beta_ptr, chunk_ptr, decay_ptr, image_ptr, u_ptr, grad_r_ptr, grad_next_ptr, of_p_ptr, of_a_ptr, grad_k_ptr,
               gate_ptr, q_stride, k_stride, heads, REPEAT: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """As `_queries_back` of grad_k, BLOCK columns. G gets k as a row of A less k as a column, beta k as a row."""
    # a head's columns side by side: they read the same rest
    c, part, head = (tl.program_id(0) // (K // BLOCK)).to(tl.int64), tl.program_id(0) % (K // BLOCK), tl.program_id(1)
    row, high = tl.load(chunk_ptr + c * 4).to(tl.int64), tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane, key, column, at = tl.arange(0, J), part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, E), c * heads + head
    rows, tile = lane[:, None] * E + column[None, :], key[:, None] * E + column[None, :]
    square, turned = lane[:, None] * J + lane[None, :], lane[None, :] * J + lane[:, None]
    of_p_ptr += at * J * J
    of_a_ptr += at * J * J
    decay, last = tl.load(decay_ptr + at * J + lane), tl.load(decay_ptr + at * J + J - 1)
    beta = tl.load(beta_ptr + row * heads + head + lane * heads, mask=lane < high, other=0.0)
    start, after = tl.load(image_ptr + at * K * E + tile), tl.load(grad_next_ptr + at * K * E + tile)
    ends = tl.exp(last) * tl.sum(tl.sum(start.to(tl.float32) * after.to(tl.float32), axis=1), axis=0)
    reads = tl.dot(tl.load(grad_r_ptr + at * J * E + rows), tl.trans(start), input_precision="ieee") * -tl.exp(decay)[:, None]
    k = _lanes(k_ptr + row * k_stride + head // REPEAT * K + part * BLOCK, k_stride, high, BLOCK)
    reads = _fine(tl.load(of_a_ptr + square), k, reads)
    grad_beta = tl.sum(reads * k.to(tl.float32), axis=1)

    left = tl.dot(tl.load(u_ptr + at * J * E + rows), tl.trans(after), input_precision="ieee") * tl.exp(last - decay)[:, None]
    ends += tl.sum(tl.sum(left * k.to(tl.float32), axis=1), axis=0)
    q = _lanes(q_ptr + row * q_stride + head // REPEAT * K + part * BLOCK, q_stride, high, BLOCK)
    left = _fine(tl.load(of_p_ptr + turned), q, left)
    left = _fine(tl.load(of_a_ptr + turned) * beta[None, :], k, left)
    place = (row * heads + head) * K + (lane[:, None] * (heads * K) + key[None, :])
    tl.store(grad_k_ptr + place, reads * beta[:, None] + left, mask=(lane < high)[:, None])
    gate_ptr += ((part * (tl.num_programs(0) // (K // BLOCK)) + c) * heads + head) * 2 * J + lane
    grad_g = grad_beta * beta - tl.sum(left * k.to(tl.float32), axis=1)
    tl.store(gate_ptr, grad_g + tl.where(lane == J - 1, ends, 0.0))
    tl.store(gate_ptr + J, grad_beta)


@triton.jit
def _add_heads(x_ptr, out_ptr, count, REPEAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """The sums of `count` rows and key heads over their value heads, in order."""
    at, key = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, K)[None, :]
    total = tl.zeros((ROWS, K), dtype=tl.float32)
    for r in tl.static_range(REPEAT):
        total += tl.load(x_ptr + (at * REPEAT + r) * K + key, mask=at < count, other=0.0)
    tl.store(out_ptr + at * K + key, total, mask=at < count)


@triton.jit
def _gates_back(gate_ptr, of_g_ptr, of_beta_ptr, chunk_ptr, grad_g_ptr, grad_beta_ptr, heads, PARTS: tl.constexpr):
    """Gradients of log_decay, from those of its running sums in a chunk and head, and of beta."""
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, high = tl.load(chunk_ptr + c * 4).to(tl.int64), tl.load(chunk_ptr + c * 4 + 2)
    if high == 0:
        return
    lane, at = tl.arange(0, J), c * heads + head
    grad_g, grad_beta = tl.load(of_g_ptr + at * J + lane), tl.load(of_beta_ptr + at * J + lane)
    for part in tl.static_range(PARTS):
        gate = gate_ptr + ((part * tl.num_programs(0) + c) * heads + head) * 2 * J + lane
        grad_g += tl.load(gate)
        grad_beta += tl.load(gate + J)
    grad_g = tl.sum(tl.where(lane[:, None] >= lane[None, :], grad_g[:, None], 0.0), axis=0)
    tl.store(grad_g_ptr + row * heads + head + lane * heads, grad_g, mask=lane < high)
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
    q, k, v, grad = (_heads_contiguous(t) for t in (q_RHK, k_RHK, v_RVE, grad_RVE.to(v_RVE.dtype)))
    beta, (chunk, sequence) = beta_RV.contiguous(), kernels.plan(rows)
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    sequences, chunks, repeat, scale = sequence.shape[0], chunk.shape[0], heads // key_heads, key_dim**-0.5
    sizes, exact = {"REPEAT": repeat, "K": key_dim, "E": value_dim}, {"dtype": torch.float32, "device": q.device}
    tile, w, leave, decay, u, image, _ = kernels.states(k, v, log_decay_RV.contiguous(), beta, initial_NVKE, None, rows)

    grad_u, grad_initial = torch.empty(u.shape, **exact), torch.empty(sequences, heads, key_dim, value_dim, **exact)
    _outputs_back[(chunks, heads)](
        q, k, grad, chunk, decay, grad_u, q.stride(0), k.stride(0), grad.stride(0), heads, scale, **sizes, num_warps=4, num_stages=1,
        **EXACT,
    )  # fmt: skip
    grad_next = torch.empty_like(image)
    final = chunk if grad_final_NVKE is None else grad_final_NVKE.float().contiguous()  # a table in its place is never read
    columns, warps = min(value_dim, SCAN_SHAPE[0]), SCAN_SHAPE[1]
    _scan_back[(sequences * (value_dim // columns), heads)](
        q, grad, w, leave, decay, chunk, sequence, grad_u, final, grad_next, grad_initial, q.stride(0), grad.stride(0), heads, scale,
        **sizes, BLOCK=columns, FINAL=grad_final_NVKE is not None, num_warps=warps, num_stages=2, **EXACT,
    )  # fmt: skip
    del w, leave

    grad_v, grad_r = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (v, u))
    of_p, of_a = torch.empty(tile.shape, **exact), tile  # of_a takes T's place
    of_beta, of_g = (torch.empty(decay.shape, **exact) for _ in range(2))
    _inner_back[(chunks, heads)](
        grad, v, beta, chunk, decay, tile, u, grad_u, grad_r, grad_v, of_p, of_a, of_beta, grad.stride(0), v.stride(0), heads, scale,
        E=value_dim, num_warps=4, num_stages=1, **EXACT,
    )  # fmt: skip
    del grad_u
    by_head = q.new_empty(rows.count, heads, key_dim, dtype=q.dtype if repeat == 1 else torch.float32)
    _queries_back[(chunks, heads)](
        q, k, grad, chunk, decay, image, of_p, by_head, of_g, q.stride(0), k.stride(0), grad.stride(0), heads, scale, **sizes,
        num_warps=4, num_stages=1, **EXACT,
    )  # fmt: skip
    grad_q = _key_heads(by_head, key_heads, q.dtype)
    by_head, columns = torch.empty_like(by_head) if repeat == 1 else by_head, min(key_dim, KEY_COLUMNS)
    gates = torch.empty(key_dim // columns, chunks, heads, 2, CHUNK, **exact)
    _keys_back[(chunks * (key_dim // columns), heads)](
        q, k, beta, chunk, decay, image, u, grad_r, grad_next, of_p, of_a, by_head, gates, q.stride(0), k.stride(0), heads, **sizes,
        BLOCK=columns, num_warps=4, num_stages=1, **EXACT,
    )  # fmt: skip
    grad_k, grad_g, grad_beta = _key_heads(by_head, key_heads, k.dtype), torch.empty_like(beta), torch.empty_like(beta)
    _gates_back[(chunks, heads)](gates, of_g, of_beta, chunk, grad_g, grad_beta, heads, PARTS=key_dim // columns, num_warps=4, **EXACT)
    return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial


def _key_heads(by_head_RVK: Tensor, key_heads: int, dtype: torch.dtype) -> Tensor:
    """[R, G, K]: the sums over the value heads of each key head."""
    count, heads, key_dim = by_head_RVK.shape
    if heads == key_heads:
        return by_head_RVK
    out = by_head_RVK.new_empty(count, key_heads, key_dim, dtype=dtype)
    _add_heads[(triton.cdiv(count * key_heads, SUM_ROWS),)](
        by_head_RVK, out, count * key_heads, REPEAT=heads // key_heads, K=key_dim, ROWS=SUM_ROWS, num_warps=4, **EXACT
    )
    return out
