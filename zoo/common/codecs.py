"""What a weight's values become where they are stored, and what they are again where they are computed with.

A codec belongs to an entry of a weight table. `Rounded` keeps more in the parameter than a checkpoint has; `BlockScaled` keeps exactly what
the checkpoint has, codes and the scales beside them, and decodes where a layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn


class Codec(Protocol):
    """Laws: what was stored comes back, byte for byte, `encode(decode(*stored)) == stored` for whatever `encode` made.

    held    dtype of the parameter
    stored  dtype of the published tensor that is the parameter's; where it is `held`, the parameter has the codes themselves
    """

    @property
    def held(self) -> torch.dtype: ...

    @property
    def stored(self) -> torch.dtype: ...

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """What is stored of values: the tensor itself, then those beside it."""

    def decode(self, *stored: Tensor) -> Tensor:
        """The values of what is stored."""

    def block(self, dims: int, dim: int) -> int:
        """How many elements of values of `dims` dimensions share, along dimension `dim`, one element of what is beside them."""

    def compute(self, values: Tensor, out: Tensor) -> None:
        """Writes `decode(*encode(values))` into `out`, rounded to its dtype: what is computed with of a master."""


@dataclass(frozen=True)
class Rounded:
    """A master in FP32, which a trainer adds small steps to; published, and computed with, rounded once to nearest, ties to even."""

    stored: torch.dtype = torch.bfloat16
    held: torch.dtype = torch.float32

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values.to(self.stored),)

    def decode(self, *stored: Tensor) -> Tensor:
        (values,) = stored
        return values.to(self.held)

    def block(self, dims: int, dim: int) -> int:
        return 1

    def compute(self, values: Tensor, out: Tensor) -> None:
        assert out.dtype == self.stored, f"{self.stored} is computed with, not {out.dtype}"
        out.copy_(values)  # the one rounding


@dataclass(frozen=True)
class BlockScaled:
    """Codes in FP8 (e4m3), and an FP32 scale for each block of `rows` x `columns` of the last two dimensions: value = code x scale.

    The product is rounded to FP32 once. `encode` takes the largest of a block to the largest code; a block of zeros has the scale 1.
    """

    rows: int = 128
    columns: int = 128
    held: torch.dtype = torch.float8_e4m3fn
    stored: torch.dtype = torch.float8_e4m3fn

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of codes of `shape`; blocks at the ends may be smaller."""
        *outer, rows, columns = shape
        return (*outer, -(-rows // self.rows), -(-columns // self.columns))

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        values = values.float()
        *outer, rows, columns = self.scales(tuple(values.shape))
        whole = values.new_zeros(*outer, rows * self.rows, columns * self.columns)
        whole[..., : values.shape[-2], : values.shape[-1]] = values
        largest = whole.abs().unflatten(-1, (columns, self.columns)).unflatten(-3, (rows, self.rows)).amax((-3, -1))
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        # the largest may be divided into a little more than 448, which FP8 has no code for
        codes = (values / self._spread(scales, values)).clamp(-LARGEST, LARGEST)
        return codes.to(self.stored), scales

    def decode(self, *stored: Tensor) -> Tensor:
        codes, scales = stored
        return codes.float() * self._spread(scales, codes)

    def block(self, dims: int, dim: int) -> int:
        return {dims - 2: self.rows, dims - 1: self.columns}.get(dim, 1)

    def compute(self, values: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(*self.encode(values)))

    def _spread(self, scales: Tensor, like: Tensor) -> Tensor:
        """Each element's scale."""
        wide = scales.repeat_interleave(self.rows, -2).repeat_interleave(self.columns, -1)
        return wide[..., : like.shape[-2], : like.shape[-1]]
