"""What a weight's values become where they are stored, and what they are again where they are computed with.

A codec belongs to an entry of a weight table. `Rounded` keeps more in the parameter than a checkpoint has; `BlockScaled` and `MxFp4` keep
exactly what the checkpoint has, codes and the scales beside them, which are decoded where a layer computes. `Exponents` is the codec of
such scales where they are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zoo.common.ops.e2m1 import GROUP, LARGEST_SCALE, dequantised, quantised
from zoo.common.ops.fp8_quantise.reference import LARGEST, next_power_of_two


class Codec(Protocol):
    """Laws: what was stored comes back, byte for byte, `encode(decode(*stored)) == stored` for whatever `encode` made.

    Where scales are powers of two the values come back: a block whose largest code is small enough has codes of the same values in the
    next smaller scale.

    held    dtype of the parameter
    stored  dtype of the published tensor that is the parameter's; where it is `held`, the parameter has the codes themselves
    alike   other dtypes that a published tensor may have its bytes in; written back as they were read
    """

    @property
    def held(self) -> torch.dtype: ...

    @property
    def stored(self) -> torch.dtype: ...

    @property
    def alike(self) -> tuple[torch.dtype, ...]: ...

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """What is stored of values: the tensor itself, then those beside it."""

    def decode(self, *stored: Tensor) -> Tensor:
        """The values of what is stored."""

    def check(self, name: str, stored: Tensor) -> None:
        """ValueError for stored bytes, beside NaN and infinity, that mean nothing here."""

    def values(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the values whose codes have `shape`."""

    def block(self, dims: int, dim: int) -> int:
        """How many elements of codes of `dims` dimensions share, along dimension `dim`, one element of what is beside them."""

    def compute(self, values: Tensor, out: Tensor) -> None:
        """Writes `decode(*encode(values))` into `out`, rounded to its dtype: what is computed with of a master."""


@dataclass(frozen=True)
class Rounded:
    """A master in FP32, which a trainer adds small steps to; published, and computed with, rounded once to nearest, ties to even."""

    stored: torch.dtype = torch.bfloat16
    held: torch.dtype = torch.float32
    alike: tuple[torch.dtype, ...] = ()

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values.to(self.stored),)

    def decode(self, *stored: Tensor) -> Tensor:
        (values,) = stored
        return values.to(self.held)

    def check(self, name: str, stored: Tensor) -> None:
        pass

    def values(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def block(self, dims: int, dim: int) -> int:
        return 1

    def compute(self, values: Tensor, out: Tensor) -> None:
        assert out.dtype == self.stored, f"{self.stored} is computed with, not {out.dtype}"
        out.copy_(values)  # the one rounding


@dataclass(frozen=True)
class BlockScaled:
    """Codes in FP8 (e4m3), and an FP32 scale for each block of `rows` x `columns` of the last two dimensions: value = code x scale.

    The product is rounded to FP32 once. `encode` takes the largest of a block to the largest code; a block of zeros has the scale 1. With
    `power_of_two` it rounds scales up to powers of two, which a checkpoint may have as exponents alone.
    """

    rows: int = 128
    columns: int = 128
    held: torch.dtype = torch.float8_e4m3fn
    stored: torch.dtype = torch.float8_e4m3fn
    alike: tuple[torch.dtype, ...] = ()
    power_of_two: bool = False

    def packed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the codes of values of `shape`."""
        return shape

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
        scales = largest / LARGEST
        scales = torch.where(scales > 0, scales, 1.0)  # also where so small a block's scale has no number
        if self.power_of_two:
            scales = next_power_of_two(scales.clamp(min=torch.finfo(torch.float32).tiny))
        # the largest may be divided into a little more than 448, which FP8 has no code for
        codes = (values / self._spread(scales, values)).clamp(-LARGEST, LARGEST)
        return codes.to(self.stored), scales

    def decode(self, *stored: Tensor) -> Tensor:
        codes, scales = stored
        return codes.float() * self._spread(scales.float(), codes)

    def check(self, name: str, stored: Tensor) -> None:
        pass

    def values(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def block(self, dims: int, dim: int) -> int:
        return {dims - 2: self.rows, dims - 1: self.columns}.get(dim, 1)

    def compute(self, values: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(*self.encode(values)))

    def _spread(self, scales: Tensor, like: Tensor) -> Tensor:
        """Each element's scale."""
        wide = scales.repeat_interleave(self.rows, -2).repeat_interleave(self.columns, -1)
        return wide[..., : like.shape[-2], : like.shape[-1]]


@dataclass(frozen=True)
class Exponents:
    """Scales that are powers of two, stored as exponents (E8M0): a byte b is 2^(b - 127), 255 is NaN.

    held     float8_e8m0fnu, or float32 for an op that reads FP32 scales
    largest  the largest byte whose product with every code is a BF16 number
    """

    held: torch.dtype = torch.float8_e8m0fnu
    largest: int = LARGEST_SCALE
    stored: torch.dtype = torch.float8_e8m0fnu
    alike: tuple[torch.dtype, ...] = (torch.uint8,)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        stored = values.to(self.stored)
        if not bool((stored.to(values.dtype) == values).all()):
            raise ValueError("a scale is no power of two, and only its exponent is stored")
        return (stored,)

    def decode(self, *stored: Tensor) -> Tensor:
        (exponents,) = stored
        return exponents.to(self.held)

    def check(self, name: str, stored: Tensor) -> None:
        """ValueError for a scale, NaN among them, whose product with a code may be no BF16 number."""
        most = int(stored.view(torch.uint8).max()) if stored.numel() else 0
        if most > self.largest:
            what = "which is NaN" if most == 255 else f"beyond {self.largest}: times the largest code it is no BF16 number"
            raise ValueError(f"{name} has the scale byte {most}, {what}")

    def values(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def block(self, dims: int, dim: int) -> int:
        return 1

    def compute(self, values: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(*self.encode(values)))


@dataclass(frozen=True)
class MxFp4:
    """MXFP4: E2M1 codes, two in a byte of int8, the low half the even column, and an exponent for each row and 32 columns.

    Every value is exact in BF16. The quantiser's rule stands in `zoo.common.ops.e2m1`.
    """

    held: torch.dtype = torch.int8
    stored: torch.dtype = torch.int8
    alike: tuple[torch.dtype, ...] = (torch.uint8,)

    def packed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the codes of values of `shape`. ValueError for rows that are no whole groups of 32."""
        *outer, columns = shape
        if columns % GROUP:
            raise ValueError(f"rows of {columns} values are no whole groups of {GROUP}, and can't be packed")
        return (*outer, columns // 2)

    def values(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """ValueError for codes whose width is odd: no whole groups."""
        *outer, width = shape
        if width % (GROUP // 2):
            raise ValueError(f"rows of {width} packed bytes are no whole groups of {GROUP // 2}")
        return (*outer, 2 * width)

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of codes of `shape`."""
        *outer, columns = self.values(shape)
        return (*outer, columns // GROUP)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return quantised(values)

    def decode(self, *stored: Tensor) -> Tensor:
        codes, scales = stored
        return dequantised(codes, scales, torch.float32)

    def check(self, name: str, stored: Tensor) -> None:
        pass

    def block(self, dims: int, dim: int) -> int:
        return GROUP // 2 if dim == dims - 1 else 1

    def compute(self, values: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(*self.encode(values)))


PACKED = MxFp4()
