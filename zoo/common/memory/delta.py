"""Slots of Gated DeltaNet layers: the state at the live chunk's start with the chunk's rows, and the convolution's carried rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zoo.common.history import ConvCarry, DeltaState
from zoo.common.memory.parts import SlotPart
from zoo.common.ops.causal_conv import CARRY
from zoo.common.ops.gated_delta.slots import CHUNK, FROM_ZERO, begin_at, live_bytes, slot_tensors


class DeltaSlots(SlotPart):
    """States of `layers` layers. Rows of a live chunk may hold anything in a fresh slot, as they are read once they are written.

    ValueError for fewer than 2 slots, and unless the key heads divide the value heads.
    """

    grain = CHUNK

    def __init__(
        self,
        layers: int,
        slots: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        kept = slot_tensors(key_heads, value_heads, key_dim, value_dim, dtype)
        super().__init__("delta", layers, slots, kept, device, FROM_ZERO)

    @property
    def snapshot_nbytes(self) -> int:
        return self.pools["start_SVKE"].nbytes // self.slots

    def layer(self, index: int, slot_N: Tensor) -> DeltaState:
        return DeltaState(**{name: pool[index] for name, pool in self.pools.items()}, slot_N=slot_N)

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """The state alone, since a chunk begins there."""
        self._check_grain(length)
        return {"start_SVKE": self.pools["start_SVKE"][:, slot].clone()}

    def restore(self, slot: int, snapshot: Mapping[str, Tensor]) -> None:
        begin_at(self.pools, slot, snapshot["start_SVKE"])

    def written(self, slot: int, length: int) -> dict[str, Tensor]:
        return {f"delta_{name}": live for name, live in live_bytes(self.pools, slot, length).items()}


class CarrySlots(SlotPart):
    """The last rows before each layer's convolution, of `channels` channels."""

    def __init__(self, layers: int, slots: int, channels: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__("carry", layers, slots, {"carry_SWC": (dtype, (CARRY, channels))}, device)

    def layer(self, index: int, slot_N: Tensor) -> ConvCarry:
        return ConvCarry(self.pools["carry_SWC"][index], slot_N)

    def written(self, slot: int, length: int) -> dict[str, Tensor]:
        return {"delta_carry": self.pools["carry_SWC"][:, slot].clone()}
