"""The ordinary gated delta rule for the `unaligned` program by flash-linear-attention: its chunks in prefill and training.

Decode goes a token at a time by `rival_tokens`, which updates slots in place, as serving engines do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.ops.gated_delta import rival_tokens
from zoo.common.rows import Rows


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_NVKE: Tensor | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """(o_RVE, the state after each document's last token)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    repeat = v.shape[1] // k.shape[1]
    q, k = (t.repeat_interleave(repeat, 1).contiguous() for t in (q, k))
    out, final = chunk_gated_delta_rule(
        *(t.contiguous()[None] for t in (q, k, v)),
        g=log_decay[None],
        beta=beta[None],
        initial_state=initial_NVKE,
        output_final_state=True,
        cu_seqlens=rows.starts_N1.long(),
    )
    return out[0], final


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
) -> tuple[Tensor | None, ...]:
    """flash-linear-attention's own backward, after its forward once more. Gradients in the operands' order, the initial state's last."""
    operands = (q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, *(() if initial_NVKE is None else (initial_NVKE,)))
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in operands]
        q, k, v, log_decay, beta, initial = (*inputs, None)[:6]
        out, final = gated_delta(q, k, v, log_decay, beta, initial, rows)
        grads = (grad_RVE, torch.zeros_like(final) if grad_final_NVKE is None else grad_final_NVKE)
        found = torch.autograd.grad((out, final), inputs, grads)
    return (*found, *(None for _ in range(6 - len(found))))


def serve(q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, state: DeltaState, rows: Rows) -> Tensor:
    if rows.max_rows == 1:
        return rival_tokens.serve(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, state, rows)
    out, final = gated_delta(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, state.start_SVKE[state.slot_N], rows)
    state.start_SVKE[state.slot_N] = final
    return out
