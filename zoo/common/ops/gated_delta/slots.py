"""What a sequence's slot holds between two calls of gated_delta, and which of its bytes say something.

Chunks lie on each sequence's own grid of CHUNK absolute positions. A slot has the state at the live chunk's start and the rows of the
live chunk (J).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.history import DeltaState

CHUNK = 64
FROM_ZERO = ("start_SVKE", "rounded_SVKE")  # zeros in a sequence of length 0; rows of a chunk are read once they are written


def slot_tensors(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of one slot of each pool of a `DeltaState`. ValueError unless the key heads divide the value heads."""
    if value_heads % key_heads:
        raise ValueError(f"delta memory: {value_heads} value heads are not a multiple of {key_heads} key heads")
    exact = torch.promote_types(dtype, torch.float32)
    return {
        "start_SVKE": (exact, (value_heads, key_dim, value_dim)),
        "rounded_SVKE": (dtype, (value_heads, key_dim, value_dim)),
        "k_SHJK": (dtype, (key_heads, CHUNK, key_dim)),
        "v_SVJE": (dtype, (value_heads, CHUNK, value_dim)),
        "u_SVJE": (dtype, (value_heads, CHUNK, value_dim)),
        "beta_SVJ": (exact, (value_heads, CHUNK)),
        "decay_SVJ": (exact, (value_heads, CHUNK)),
        "inverse_SVJJ": (exact, (value_heads, CHUNK, CHUNK)),
    }


def empty_state(slots: int, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device | str) -> DeltaState:
    """One layer's pools of `slots` sequences of length 0, all of them pushed in this order."""
    pools = {name: torch.zeros(slots, *shape, dtype=dtype, device=device) for name, (dtype, shape) in tensors.items()}
    return DeltaState(**pools, slot_N=torch.arange(slots, device=device))


def begin_at(pools: dict[str, Tensor], slot: int, start_LVKE: Tensor) -> None:
    """Slot `slot` of pools [L, S, ...] becomes a sequence that stands at a chunk's start with this state."""
    pools["start_SVKE"][:, slot] = start_LVKE
    pools["rounded_SVKE"][:, slot] = start_LVKE.to(pools["rounded_SVKE"].dtype)


def live_bytes(pools: dict[str, Tensor], slot: int, length: int) -> dict[str, Tensor]:
    """Copies of what says something of a sequence of `length` tokens in pools [L, S, ...], [L, ...] each."""
    live = length % CHUNK
    found = {}
    for name, pool in pools.items():
        mine = pool[:, slot]
        # J comes third in every pool of rows; inverse rows hold zeros beyond their diagonal
        found[name.split("_")[0]] = (mine[:, :, :live] if "J" in name else mine).clone()
    return found
