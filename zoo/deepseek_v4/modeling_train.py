"""DeepSeek-V4 in training: packed rows, live rows and compressed rows, gradients."""

from __future__ import annotations

from zoo.common.memory import PackedCompressed
from zoo.common.rows import Rows
from zoo.common.training import ForRL
from zoo.deepseek_v4.model import NAMES


class DeepseekV4ForRL(ForRL):
    """Token ids in, log-probabilities out. `forward`, `score`, `from_pretrained`, `save_pretrained`: see ForRL and Pretrained."""

    def layer_memory(self, layer: int, rows: Rows) -> PackedCompressed:
        kind = self.config.kinds_of_layers[layer]
        return PackedCompressed(NAMES.get(kind, "hca"), self.config.rate(kind))
