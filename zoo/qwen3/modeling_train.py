"""Qwen3 in training: packed rows, live keys and values, gradients."""

from __future__ import annotations

from zoo.common.memory import PackedKeyValues
from zoo.common.rows import Rows
from zoo.common.training import ForRL


class Qwen3ForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    def layer_memory(self, layer: int, rows: Rows) -> PackedKeyValues:
        return PackedKeyValues()
