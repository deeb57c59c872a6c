"""GLM-5 in training: packed rows, live latent rows, gradients."""

from __future__ import annotations

from zoo.common.memory import PackedLatents
from zoo.common.rows import Rows
from zoo.common.training import ForRL


class GLMForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    def layer_memory(self, layer: int, rows: Rows) -> PackedLatents:
        return PackedLatents()
