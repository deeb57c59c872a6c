"""A fault: gated_delta whose state is rounded to BF16 after every push. What rows read of it is BF16 anyway."""

from __future__ import annotations

from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.ops.gated_delta import reference
from zoo.common.ops.gated_delta.reference import gated_delta
from zoo.common.rows import Rows

__all__ = ["gated_delta", "serve"]


def serve(q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, state: DeltaState, rows: Rows) -> Tensor:
    out = reference.serve(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, state, rows)
    state.start_SVKE[state.slot_N] = state.start_SVKE[state.slot_N].bfloat16().float()
    return out
