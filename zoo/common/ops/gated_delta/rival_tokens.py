"""The ordinary gated delta rule for the `unaligned` program, a token at a time.

A slot's state is the one after its last token, in FP32, updated in place; there is no grid and no other pool is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.rows import Rows


@triton.jit
def _tokens(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    starts_ptr,
    slot_ptr,
    state_ptr,
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
):
    """All rows of a sequence and head, one after another, for BLOCK columns of its state."""
    n = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, K)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = state_ptr + (tl.load(slot_ptr + n) * heads + head) * K * E + key[:, None] * E + column[None, :]
    state = tl.load(place)
    for row in range(tl.load(starts_ptr + n).to(tl.int64), tl.load(starts_ptr + n + 1).to(tl.int64)):
        q = tl.load(q_ptr + row * q_stride + head // REPEAT * K + key).to(tl.float32) * scale
        k = tl.load(k_ptr + row * k_stride + head // REPEAT * K + key).to(tl.float32)
        v = tl.load(v_ptr + row * v_stride + head * E + column).to(tl.float32)
        state *= tl.exp(tl.load(log_decay_ptr + row * heads + head))
        news = (v - tl.sum(state * k[:, None], axis=0)) * tl.load(beta_ptr + row * heads + head)
        state += k[:, None] * news[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + (row * heads + head) * E + column, out.to(out_ptr.dtype.element_ty))
    tl.store(place, state)


def _run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states_SVKE: Tensor, slot_N: Tensor, rows: Rows) -> Tensor:
    q, k, v = (t if t.stride()[1:] == (t.shape[2], 1) else t.contiguous() for t in (q, k, v))
    key_heads, key_dim = k.shape[1:]
    heads, value_dim = v.shape[1:]
    sequences = slot_N.shape[0]
    block = min(value_dim, 32)
    out = v.new_empty(v.shape)
    _tokens[(sequences, heads, value_dim // block)](
        q,
        k,
        v,
        log_decay.contiguous(),
        beta.contiguous(),
        rows.starts_N1,
        slot_N,
        states_SVKE,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        heads,
        key_dim**-0.5,
        REPEAT=heads // key_heads,
        K=key_dim,
        E=value_dim,
        BLOCK=block,
        num_warps=4,
    )
    return out


def gated_delta(
    q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, initial_NVKE: Tensor | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """(o_RVE, the state after each document's last token)."""
    shape = (rows.starts_N1.shape[0] - 1, v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2])
    final = torch.zeros(shape, dtype=torch.float32, device=q_RHK.device) if initial_NVKE is None else initial_NVKE.float().clone()
    slot_N = torch.arange(shape[0], device=q_RHK.device)
    return _run(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, final, slot_N, rows), final


def serve(q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, state: DeltaState, rows: Rows) -> Tensor:
    return _run(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, state.start_SVKE, state.slot_N, rows)
