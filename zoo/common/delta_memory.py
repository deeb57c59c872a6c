"""Memory of Gated DeltaNet layers: the state at the live chunk's start, the chunk's cached rows, and the convolution's carry.

Chunks lie on each sequence's own grid of 64 absolute positions. A sequence owns one slot in all layers; slot 0 is for padding
rows. Like `zoo.common.memory` it moves bytes and computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.common.history import ConvCarry, DeltaState, PackedDelta
from zoo.common.ops.causal_conv import CARRY
from zoo.common.ops.gated_delta.slots import CHUNK, FROM_ZERO, begin_at, live_bytes, slot_tensors


@dataclass(frozen=True)
class DeltaSnapshot:
    """A sequence at a multiple of 64 positions: states [L, V, K, E] in FP32 and carries [L, 3, C]. Enough to go on from there."""

    length: int
    start_LVKE: Tensor
    carry_LWC: Tensor


@dataclass(frozen=True)
class DeltaLayer:
    """What one layer reads and writes of its sequences."""

    state: DeltaState | PackedDelta
    carry: ConvCarry | PackedDelta


class DeltaMemory:
    """All layers' pools [L, S, ...]. `view(slot_N)` gives the layers as a batch of sequences sees them.

    ValueError for fewer than 2 slots (slot 0 is for padding rows) and for value heads that aren't a multiple of the key heads.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if slots < 2:
            raise ValueError(f"delta memory needs at least 2 slots (one is reserved for padding), got {slots}")
        self.slots = slots
        self.pools = {
            name: torch.zeros(layers, slots, *shape, dtype=kind, device=device)
            for name, (kind, shape) in slot_tensors(key_heads, value_heads, key_dim, value_dim, dtype).items()
        }
        self.carry_LSWC = torch.zeros(layers, slots, CARRY, channels, dtype=dtype, device=device)

    def _all(self) -> list[Tensor]:
        return [*self.pools.values(), self.carry_LSWC]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._all())

    @property
    def snapshot_nbytes(self) -> int:
        return (self.pools["start_SVKE"].nbytes + self.carry_LSWC.nbytes) // self.slots

    def view(self, slot_N: Tensor) -> list[DeltaLayer]:
        return [
            DeltaLayer(
                DeltaState(**{name: pool[layer] for name, pool in self.pools.items()}, slot_N=slot_N),
                ConvCarry(self.carry_LSWC[layer], slot_N),
            )
            for layer in range(self.carry_LSWC.shape[0])
        ]

    def clear(self, slots: list[int] | Tensor) -> None:
        """Makes slots (a list, or int64 on the device), as they are assigned, sequences of length 0.

        Their states and carried rows become zeros; rows of a live chunk may hold anything, as they are read once they are written.
        """
        index = slots if isinstance(slots, Tensor) else torch.tensor(slots, device=self.carry_LSWC.device)
        for pool in (*(self.pools[name] for name in FROM_ZERO), self.carry_LSWC):
            _in_eights(pool).index_fill_(1, index, 0)

    def copy(self, source: int, target: int) -> None:
        """Moves or forks a sequence at any length: every byte of its slot."""
        for pool in self._all():
            pool[:, target] = pool[:, source]

    def snapshot(self, slot: int, length: int) -> DeltaSnapshot:
        """A sequence of `length` tokens, now in `slot`. ValueError off multiples of 64: cut the prefill there, then go on."""
        if length % CHUNK:
            raise ValueError(f"a snapshot is taken at a multiple of {CHUNK} tokens, not at {length}")
        return DeltaSnapshot(length, self.pools["start_SVKE"][:, slot].clone(), self.carry_LSWC[:, slot].clone())

    def restore(self, slot: int, snapshot: DeltaSnapshot) -> None:
        """A slot just assigned becomes a sequence of `snapshot.length` tokens."""
        begin_at(self.pools, slot, snapshot.start_LVKE)
        self.carry_LSWC[:, slot] = snapshot.carry_LWC

    def written(self, slot: int, length: int) -> dict[str, Tensor]:
        """The live bytes of one sequence after `length` tokens, [L, ...] each, for the ladder's comparisons."""
        return {**live_bytes(self.pools, slot, length), "carry": self.carry_LSWC[:, slot].clone()}


def _in_eights(pool: Tensor) -> Tensor:
    """[L, S, ...] seen as 8-byte integers where a slot has whole ones: an index_fill takes its time by the element."""
    slot = pool.flatten(2)
    return slot.view(torch.int64) if slot.shape[2] * slot.element_size() % 8 == 0 else slot
