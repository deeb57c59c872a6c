"""Qwen3.5 in training: packed rows, live keys and values, states from zero, gradients."""

from __future__ import annotations

from zoo.common.delta_memory import DeltaLayer
from zoo.common.history import PackedDelta
from zoo.common.memory import PackedKeyValues
from zoo.common.rows import Rows
from zoo.common.training import ForRL


class Qwen35ForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    def packed_memory(self, rows: Rows) -> list[PackedKeyValues | DeltaLayer]:
        return [PackedKeyValues() if full else DeltaLayer(PackedDelta(), PackedDelta()) for full in self.config.full]
