"""What a server must hold of a sequence between two calls of causal_conv: its last rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CarryWitness:
    """rows_RC: one document's rows before the convolution, as training's call has them; `kept` of them go on."""

    rows_RC: Tensor
    kept: int

    def after(self, length: int) -> dict[str, Tensor]:
        """The newest rows, oldest first, zeros before a document's first."""
        before = self.rows_RC[max(0, length - self.kept) : length]
        return {"delta_carry": torch.cat([before.new_zeros(self.kept - len(before), before.shape[1]), before])}
