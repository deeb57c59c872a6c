"""E2M1 codes of four bits, two in a byte, and the E8M0 scales beside them, in plain torch.

A code is a sign, two bits of exponent with bias 1 and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. The low half of
a byte is the even column. A scale is a byte b that means 2^(b - 127), one for each row and 32 columns. A product of both has two
significant bits, so BF16 holds it exactly, also where it is subnormal there.

Sources: Rouhani et al. 2023 (arXiv 2310.10537) and the OCP's Microscaling Formats (MX) 1.0; the quantiser's rule is that of DeepSeek-V4's
published code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.fp8_quantise.reference import next_power_of_two

GROUP = 32  # columns that share a scale
LARGEST = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# between neighbours; a number that lies on one goes to the even code, here the one that `right` of bucketize doesn't pick
HALVES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FLOOR = LARGEST * 2.0**-126  # the least that a group's largest value is taken for: its scale is the least normal FP32 number
LARGEST_SCALE = 252  # as a byte: six times 2^125 is the largest product that BF16 holds


def unpacked(packed: Tensor) -> Tensor:
    """int8 [..., K / 2] -> the codes, uint8 [..., K]."""
    both = packed.view(torch.uint8)
    return torch.stack([both & 15, both >> 4], -1).flatten(-2)


def packed(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] -> int8 [..., K / 2]."""
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def dequantised(packed_NC: Tensor, scales_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., K] of codes int8 [..., K / 2] and scales float8_e8m0fnu [..., K / 32], exact in BF16 and in what is wider."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float32, device=packed_NC.device)
    values = table[unpacked(packed_NC).long()].unflatten(-1, (-1, GROUP))
    return (values * scales_NG.float()[..., None]).flatten(-2).to(dtype)


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., K / 2] and scales float8_e8m0fnu [..., K / 32] of values [..., K].

    A group's scale is its largest absolute value, at least 6 x 2^-126, divided by 6 and rounded up to a power of two; a code is the
    nearest to value / scale, ties to the even code, and a zero keeps its sign. ValueError for a width that is not whole groups, and for
    a value that is NaN, infinite or beyond 6 x 2^125.
    """
    width = values.shape[-1]
    if width % GROUP:
        raise ValueError(f"rows of {width} values are no whole groups of {GROUP}")
    groups = values.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    if not bool((largest <= LARGEST * 2.0 ** (LARGEST_SCALE - 127)).all()):
        raise ValueError("a value is NaN, infinite or beyond 6 x 2^125, which codes of four bits have no scale for")
    scales = next_power_of_two(largest.clamp(min=FLOOR) / LARGEST)
    sizes = (groups / scales[..., None]).abs()
    halves = torch.tensor(HALVES, device=values.device)
    below = torch.bucketize(sizes, halves)  # a half goes to the lower code
    above = torch.bucketize(sizes, halves, right=True)  # and here to the upper one
    codes = torch.where(below % 2 == 0, below, above)
    codes = codes | (groups.signbit().long() << 3)
    return packed(codes.flatten(-2).to(torch.uint8)), scales.to(torch.float8_e8m0fnu)
