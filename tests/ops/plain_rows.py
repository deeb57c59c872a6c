"""Cached rows and index vectors of DeepSeek-V4, written down from the released code's description alone. Nothing of the zoo is used."""

from __future__ import annotations

import torch
from torch import Tensor


def up_to_a_power_of_two(x: Tensor) -> Tensor:
    """Of positive FP32 numbers, by their bits: one more exponent if any bit of the mantissa is set."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 127 + (bits & 0x7FFFFF).ne(0).int()
    return torch.exp2(exponent.float())


def cached_row(row_RE: Tensor, still: int) -> Tensor:
    """BF16 rows: their first `still` columns, 64 at a time, through E4M3 with a power of two between."""
    out = row_RE.clone()
    for first in range(0, still, 64):
        block = row_RE[:, first : min(first + 64, still)].float()
        largest = block.abs().amax(1, keepdim=True).clamp(min=1e-4)
        scale = up_to_a_power_of_two(largest * (1 / 448))
        codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        out[:, first : first + block.shape[1]] = (codes.float() * scale).bfloat16()
    return out


def turned(x: Tensor) -> Tensor:
    """Hadamard's matrix times FP32 vectors, half by half."""
    if x.shape[-1] == 1:
        return x
    left, right = (turned(half) for half in x.chunk(2, -1))
    return torch.cat([left + right, left - right], -1)


def four_bits(x: Tensor) -> Tensor:
    """FP32 numbers between -6 and 6 to the nearest of E2M1; halfway to the one whose last bit is 0."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    size = x.abs()
    out = torch.zeros_like(x)
    for code in range(1, 8):
        half = (numbers[code - 1] + numbers[code]) / 2
        above = size >= half if code % 2 == 0 else size > half
        out = torch.where(above, numbers[code], out)
    return torch.where(x.signbit(), -out, out)


def index_vector(x: Tensor) -> Tensor:
    """BF16 vectors of an index: turned, rounded to BF16, then 32 columns at a time through E2M1 with a power of two between."""
    spread = (turned(x.float()) * x.shape[-1] ** -0.5).bfloat16()
    parts = []
    for block in spread.float().split(32, -1):
        largest = block.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
        scale = up_to_a_power_of_two(largest * (1 / 6))
        parts.append(four_bits((block / scale).clamp(-6, 6)) * scale)
    return torch.cat(parts, -1).bfloat16()
