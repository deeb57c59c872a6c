"""Qwen3.5 in training: packed rows, live keys and values, states from zero or from where another rank stopped, gradients."""

from __future__ import annotations

from zoo.common.history import PackedDelta
from zoo.common.memory import DeltaMemory, PackedKeyValues
from zoo.common.rows import Rows
from zoo.common.training import ForRL


class Qwen35ForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    def layer_memory(self, layer: int, rows: Rows) -> PackedKeyValues | DeltaMemory:
        return PackedKeyValues() if self.config.full[layer] else DeltaMemory(PackedDelta(), PackedDelta())

    def layer_memory_after(self, layer: int, rows: Rows, start: PackedDelta) -> DeltaMemory:
        """Documents cut on the grid of chunks: a recurrent layer goes on from the state and the rows before the convolution."""
        if self.config.full[layer]:
            super().layer_memory_after(layer, rows, start)
        return DeltaMemory(start, start)
