"""GLM-5 in training: packed rows, live latent rows, gradients."""

from __future__ import annotations

from zoo.common.latent_memory import PackedLatents
from zoo.common.rows import Rows
from zoo.common.training import ForRL


class GLMForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    def packed_memory(self, rows: Rows) -> list[PackedLatents]:
        return [PackedLatents() for _ in range(self.config.layers)]
