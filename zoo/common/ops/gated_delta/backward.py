"""The backward of gated_delta by chunk, on the CPU: batched products over all chunks, a loop over states each way.

Nothing is saved but the inputs. Everything is FP32 (float64 for float64 operands), without the forward's roundings. The
formulas are the reference's, by matrices of a chunk (rows 64, `state` before it, a and p as there, T = (I + a)^-1):

    u       T r,  r = beta (v - exp(G) k state)
    o       scale (exp(G) q state + p u)
    state'  exp(G_63) state + (exp(G_63 - G) k)^T u
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.rows import Rows

BUDGET = 1 << 26  # elements of one [chunks, heads, 64, width] operand; more are done in several passes over the heads


@dataclass(frozen=True)
class ChunkGrid:
    """Which rows make which chunk of which document; C is a host bound, spare chunks (one for each document without rows) hold no row.

    row_CJ    the row at each place, R (a row of zeros) where there is none
    first_N   a document's first chunk; count_N its chunks, the last of them whole or not (whole_N)
    """

    row_CJ: Tensor
    first_N: Tensor
    count_N: Tensor
    whole_N: Tensor
    steps: int

    @classmethod
    def of(cls, rows: Rows) -> ChunkGrid:
        starts = rows.starts_N1.long()
        length_N = starts[1:] - starts[:-1]
        count_N = (length_N + CHUNK - 1) // CHUNK
        ends_N = count_N.cumsum(0)
        chunks = rows.count // CHUNK + length_N.shape[0]
        chunk_C = torch.arange(chunks, device=starts.device)
        document_C = torch.searchsorted(ends_N, chunk_C, right=True).clamp(max=length_N.shape[0] - 1)
        inside_CJ = (chunk_C - (ends_N - count_N)[document_C])[:, None] * CHUNK + torch.arange(CHUNK, device=starts.device)
        row_CJ = torch.where(inside_CJ < length_N[document_C][:, None], starts[document_C][:, None] + inside_CJ, rows.count)
        return cls(row_CJ, ends_N - count_N, count_N, length_N % CHUNK == 0, -(-rows.max_rows // CHUNK))

    def gather(self, x_RVX: Tensor, exact: torch.dtype) -> Tensor:
        """[R, V, ...] -> [C, V, 64, ...], zeros where there is no row."""
        x = torch.cat([x_RVX.to(exact), x_RVX.new_zeros(1, *x_RVX.shape[1:], dtype=exact)])
        return x[self.row_CJ].transpose(1, 2)

    def scatter(self, x_CVJX: Tensor, rows: int) -> Tensor:
        """[C, V, 64, ...] -> [R, V, ...]."""
        x = x_CVJX.transpose(1, 2).flatten(0, 1)
        out = x.new_empty(rows + 1, *x.shape[1:])
        out[self.row_CJ.flatten()] = x
        return out[:rows]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """(each document's chunk number `step`, its last one or, without rows, a spare one where it has none; whether it has one)."""
        mine_N = self.first_N + (self.count_N - 1).clamp(max=step)
        return torch.where(self.count_N > 0, mine_N, self.row_CJ.shape[0] - 1), step < self.count_N


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, beta and of the initial state (FP32, made even where there was none)."""
    exact = torch.promote_types(q_RHK.dtype, torch.float32)
    key_heads, key_dim = q_RHK.shape[1:]
    heads, value_dim = v_RVE.shape[1:]
    grid = ChunkGrid.of(rows)
    repeat = heads // key_heads
    states = (rows.starts_N1.shape[0] - 1, heads, key_dim, value_dim)
    initial, grad_final = (
        torch.zeros(states, dtype=exact, device=q_RHK.device) if t is None else t.to(exact) for t in (initial_NVKE, grad_final_NVKE)
    )
    block = max(1, BUDGET // (grid.row_CJ.numel() * max(key_dim, value_dim) * repeat))
    parts = []
    for first in range(0, key_heads, block):
        by_key = slice(first, first + block)
        by_value = slice(first * repeat, (first + block) * repeat)
        q, k = (grid.gather(t[:, by_key], exact).repeat_interleave(repeat, 1) for t in (q_RHK, k_RHK))
        v, g, beta, grad = (grid.gather(t[:, by_value], exact) for t in (v_RVE, log_decay_RV, beta_RV, grad_RVE))
        found = _heads(ChunkLoop(grid), q, k, v, g, beta, grad, initial[:, by_value], grad_final[:, by_value])
        parts.append((*(grid.scatter(t, rows.count) for t in found[:5]), found[5]))
    grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial = (torch.cat(t, 1) for t in zip(*parts))
    grad_q, grad_k = (t.unflatten(1, (key_heads, repeat)).sum(2) for t in (grad_q, grad_k))
    return (
        grad_q.to(q_RHK.dtype),
        grad_k.to(k_RHK.dtype),
        grad_v.to(v_RVE.dtype),
        grad_g.to(log_decay_RV.dtype),
        grad_beta.to(beta_RV.dtype),
        grad_initial,
    )


def _heads(
    loop: ChunkLoop, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grad: Tensor, initial: Tensor, grad_final: Tensor
) -> tuple[Tensor, ...]:
    """All chunks of some heads: operands [C, V, 64, ...], states [N, V, K, E]."""
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = g.cumsum(-1)
    ratio = torch.exp((decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -torch.inf))
    rise = torch.exp(decay)[..., None]
    beta_1 = beta[..., None]
    closing = torch.exp(decay[..., -1:])[..., None]
    leave = torch.exp(decay[..., -1:] - decay)[..., None] * k
    kept = (k @ k.mT * ratio).tril(-1)
    a = kept * beta_1
    both = torch.linalg.solve_triangular(a, torch.cat([beta_1 * rise * k, beta_1 * v], -1), upper=False, unitriangular=True)
    w, own = both.split([k.shape[-1], v.shape[-1]], -1)
    start, u = loop.states(w, own, leave, decay, initial)

    grad = grad * q.shape[-1] ** -0.5
    p = q @ k.mT * ratio
    grad_u, grad_next, grad_initial = loop.gradients(w, leave, decay, p.mT @ grad, (rise * q).mT @ grad, grad_final)
    grad_r = torch.linalg.solve_triangular(a.mT, grad_u, upper=True, unitriangular=True)
    grad_a = -(grad_r @ u.mT).tril(-1)
    grad_p = (grad @ u.mT).tril()
    held = k @ start
    read = q @ start
    back = -beta_1 * rise * grad_r  # the gradient of k state
    grad_q = (grad_p * ratio) @ k + rise * (grad @ start.mT)
    grad_kk = grad_a * beta_1 * ratio
    left = torch.exp(decay[..., -1:] - decay)[..., None] * (u @ grad_next.mT)
    grad_k = (grad_p * ratio).mT @ q + grad_kk @ k + grad_kk.mT @ k + back @ start.mT + left
    grad_beta = (grad_r * (v - rise * held)).sum(-1) + (grad_a * kept).sum(-1)
    pairs = grad_p * p + grad_a * a
    at_end = (left * k).sum(-1)
    grad_decay = pairs.sum(-1) - pairs.sum(-2) + (grad * rise * read).sum(-1) + (back * held).sum(-1) - at_end
    grad_decay[..., -1] += at_end.sum(-1) + closing[..., 0, 0] * (start * grad_next).sum((-1, -2))
    grad_g = grad_decay.flip(-1).cumsum(-1).flip(-1)
    return grad_q, grad_k, beta_1 * grad_r, grad_g, grad_beta, grad_initial


@dataclass(frozen=True)
class ChunkLoop:
    """The two passes over a document's chunks: each step takes the chunk of one number of every document that has it.

    Operands are [C, V, ...] in the order of `ChunkGrid`, states [N, V, K, E].
    """

    grid: ChunkGrid

    def states(self, w: Tensor, own: Tensor, leave: Tensor, decay: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each chunk, [C, V, K, E], and u = own - w state; then state' = exp(G_63) state + leave^T u."""
        closing = torch.exp(decay[..., -1:])[..., None]
        start = initial.new_zeros(w.shape[0], *initial.shape[1:])
        u = torch.zeros_like(own)
        state = initial
        for step in range(self.grid.steps):
            chunk, has = self.grid.at(step)
            # a document that has no such chunk writes its last one again, with the same bytes
            start[chunk] = state = torch.where(has[:, None, None, None], state, start[chunk])
            u[chunk] = news = own[chunk] - w[chunk] @ state
            state = closing[chunk] * state + leave[chunk].mT @ news
        return start, u

    def gradients(
        self, w: Tensor, leave: Tensor, decay: Tensor, own_u: Tensor, own_start: Tensor, grad_final: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of u, of state' and of the initial state, backwards. An unfinished chunk hands its state on as it is."""
        closing = torch.exp(decay[..., -1:])[..., None]
        grad_next = torch.zeros_like(own_start)
        grad_u = torch.zeros_like(own_u)
        state = grad_final
        for step in reversed(range(self.grid.steps)):
            chunk, has = self.grid.at(step)
            unfinished = (step == self.grid.count_N - 1) & ~self.grid.whole_N
            has = has[:, None, None, None]
            unfinished = unfinished[:, None, None, None]
            after = torch.where(unfinished, 0.0, state)
            news = own_u[chunk] + leave[chunk] @ after
            before = closing[chunk] * after + own_start[chunk] - w[chunk].mT @ news + torch.where(unfinished, state, 0.0)
            # documents without this chunk are still at their end: what they write here is written again later
            grad_next[chunk] = after
            grad_u[chunk] = news
            state = torch.where(has, before, state)
        return grad_u, grad_next, state
