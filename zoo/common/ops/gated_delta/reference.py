"""gated_delta in plain torch: the live chunk is advanced by some of its rows, by one function for whole chunks and single steps.

The rule is Gated Delta Networks (arXiv 2412.06464), section 3.1, its chunks section 3.3. For rows i and j of a chunk of one head:

    G_i     log_decay_0 + .. + log_decay_i
    a_ij    (k_i . k_j) exp(G_i - G_j) beta_i  for j < i, else 0
    T       (I + a)^-1, so T_i = e_i - sum_j a_ij T_j
    w_i     sum_j T_ij beta_j exp(G_j) k_j
    u_i     sum_j T_ij beta_j v_j - w_i state
    o_i     K^-0.5 (exp(G_i) q_i state + sum_{j <= i} p_ij u_j),  p_ij = exp(G_i - G_j) (q_i . k_j)
    state'  exp(G_63) state + sum_j exp(G_63 - G_j) k_j u_j

Products are spelled out and added by the pair tree, so that no byte depends on how many rows are pushed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.ops.trees import pair_tree
from zoo.common.rows import Rows


@dataclass
class LiveChunk:
    """The live chunk of one sequence: `DeltaState` without its slots, written in place."""

    start_VKE: Tensor
    rounded_VKE: Tensor
    k_HJK: Tensor
    v_VJE: Tensor
    u_VJE: Tensor
    beta_VJ: Tensor
    decay_VJ: Tensor
    inverse_VJJ: Tensor

    @classmethod
    def fresh(cls, k_RHK: Tensor, v_RVE: Tensor, start_VKE: Tensor) -> LiveChunk:
        _, key_heads, key_dim = k_RHK.shape
        _, heads, value_dim = v_RVE.shape
        exact = start_VKE.dtype
        rows = v_RVE.new_zeros(heads, CHUNK, value_dim)
        gate = rows.new_zeros(heads, CHUNK, dtype=exact)
        inverse = rows.new_zeros(heads, CHUNK, CHUNK, dtype=exact)
        keys = k_RHK.new_zeros(key_heads, CHUNK, key_dim)
        return cls(start_VKE, start_VKE.to(v_RVE.dtype), keys, rows, rows.clone(), gate, gate.clone(), inverse)

    @classmethod
    def of(cls, state: DeltaState, slot: int) -> LiveChunk:
        """Views of one slot's pools."""
        return cls(
            state.start_SVKE[slot],
            state.rounded_SVKE[slot],
            state.k_SHJK[slot],
            state.v_SVJE[slot],
            state.u_SVJE[slot],
            state.beta_SVJ[slot],
            state.decay_SVJ[slot],
            state.inverse_SVJJ[slot],
        )


def gated_delta(
    q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, initial_NVKE: Tensor | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """(o_RVE, the state after each document's last whole chunk, [N, V, K, E])."""
    starts = rows.starts_N1.tolist()
    out = v_RVE.new_empty(v_RVE.shape)
    exact = torch.promote_types(q_RHK.dtype, torch.float32)
    shape = (len(starts) - 1, v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2])
    final = torch.zeros(shape, dtype=exact, device=q_RHK.device) if initial_NVKE is None else initial_NVKE.detach().to(exact).clone()
    for n, (begin, end) in enumerate(zip(starts, starts[1:])):
        mine = slice(begin, end)
        chunk = LiveChunk.fresh(k_RHK, v_RVE, final[n])
        out[mine] = _push(chunk, 0, *(t[mine] for t in (q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV)))
    return out, final


def serve(q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, state: DeltaState, rows: Rows) -> Tensor:
    """o_RVE; the slots of `state` advance in place."""
    starts = rows.starts_N1.tolist()
    lengths = rows.lengths_N.tolist()
    slots = state.slot_N.tolist()
    out = v_RVE.new_empty(v_RVE.shape)
    for n, (begin, end) in enumerate(zip(starts, starts[1:])):
        mine = slice(begin, end)
        live = (lengths[n] - (end - begin)) % CHUNK
        out[mine] = _push(LiveChunk.of(state, slots[n]), live, *(t[mine] for t in (q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV)))
    return out


def _push(chunk: LiveChunk, live: int, *operands: Tensor) -> Tensor:
    """Rows after the `live` ones that the chunk holds; it closes on its row 63 and the next one begins."""
    parts = []
    done = 0
    count = operands[0].shape[0]
    while done < count:
        step = min(CHUNK - live, count - done)
        parts.append(advance(chunk, live, *(t[done : done + step] for t in operands)))
        live = live + step
        done = done + step
        if live == CHUNK:
            close(chunk)
            live = 0
    return torch.cat(parts) if parts else operands[2]  # a sequence without rows


def product(left_VMX: Tensor, right_VXY: Tensor) -> Tensor:
    """[V, M, Y]: each element its own pair tree over X."""
    return pair_tree(left_VMX[:, :, None, :] * right_VXY.transpose(1, 2)[:, None, :, :])


def advance(chunk: LiveChunk, first: int, q_MHK: Tensor, k_MHK: Tensor, v_MVE: Tensor, log_decay_MV: Tensor, beta_MV: Tensor) -> Tensor:
    """Outputs [M, V, E] of rows first .. first + M - 1 of the chunk; their k, v, u, beta, decay and inverse are cached."""
    end = first + q_MHK.shape[0]
    dtype = q_MHK.dtype
    exact = chunk.start_VKE.dtype
    chunk.k_HJK[:, first:end] = k_MHK.transpose(0, 1)
    chunk.v_VJE[:, first:end] = v_MVE.transpose(0, 1)
    chunk.beta_VJ[:, first:end] = beta_MV.T
    # G_i, cached as `decay`
    total = chunk.decay_VJ[:, first - 1] if first else torch.zeros_like(chunk.decay_VJ[:, 0])
    for row in range(first, end):
        total = total + log_decay_MV[row - first]
        chunk.decay_VJ[:, row] = total

    lane = torch.arange(CHUNK)
    row_M = torch.arange(first, end)[:, None]
    written = lane < end
    repeat = v_MVE.shape[1] // k_MHK.shape[1]
    # lanes that nobody wrote are cut by select: they may hold anything
    keys = torch.where(written[:, None], chunk.k_HJK, 0).to(exact).repeat_interleave(repeat, 0)
    values = torch.where(written[:, None], chunk.v_VJE, 0).to(exact)
    decay, beta = (torch.where(written, t, 0) for t in (chunk.decay_VJ, chunk.beta_VJ))
    queries = q_MHK.transpose(0, 1).to(exact).repeat_interleave(repeat, 0)
    rounded = chunk.rounded_VKE.to(exact)
    # exp(G_i - G_j) for j <= i, else 0
    ratio = torch.exp(torch.where(lane <= row_M, decay[:, first:end, None] - decay[:, None, :], -torch.inf))

    # a, and T row by row
    k_dot_k = product(keys[:, first:end], keys.transpose(1, 2))
    a = torch.where(lane < row_M, k_dot_k * ratio * beta[:, first:end, None], 0)
    inverse = chunk.inverse_VJJ
    inverse[:, first:end] = torch.eye(CHUNK, dtype=exact)[first:end]
    for j in range(end - 1):
        later = max(j + 1, first)
        inverse[:, later:end] = inverse[:, later:end] - a[:, later - first :, j, None] * inverse[:, j, None, :]

    # w and u
    mine = inverse[:, first:end]
    w = product((mine * (beta * torch.exp(decay))[:, None, :]).to(dtype).to(exact), keys).to(dtype).to(exact)
    u = product((mine * beta[:, None, :]).to(dtype).to(exact), values) - product(w, rounded)
    chunk.u_VJE[:, first:end] = u.to(dtype)

    # o
    news = torch.where(written[:, None], chunk.u_VJE, 0).to(exact)
    p = torch.where(lane <= row_M, product(queries, keys.transpose(1, 2)) * ratio, 0).to(dtype).to(exact)
    out = product(queries, rounded) * torch.exp(decay[:, first:end, None]) + product(p, news)
    return (out * q_MHK.shape[2] ** -0.5).to(dtype).transpose(0, 1)


def close(chunk: LiveChunk) -> None:
    """All 64 rows are there: state', the next chunk's start."""
    dtype = chunk.v_VJE.dtype
    exact = chunk.start_VKE.dtype
    keys = chunk.k_HJK.to(exact).repeat_interleave(chunk.v_VJE.shape[0] // chunk.k_HJK.shape[0], 0)
    last = chunk.decay_VJ[:, -1:]
    closing_k = (keys * torch.exp(last - chunk.decay_VJ)[:, :, None]).to(dtype).to(exact)
    added = product(closing_k.transpose(1, 2), chunk.u_VJE.to(exact))
    chunk.start_VKE.copy_(torch.exp(last)[:, :, None] * chunk.start_VKE + added)
    chunk.rounded_VKE.copy_(chunk.start_VKE)
