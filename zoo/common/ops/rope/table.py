"""The rotary table, from additions and products of FP64 only: the same bytes on every CPU, with any number of threads.

A library's cosine may differ by a unit in the last place between vector and scalar code, and where one ends depends on the threads that
share the work: two tables made in one process were seen to differ.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# pi / 2 in three parts; the first two have so few bits that FP64 holds their multiples up to MOST_RADIANS
PARTS = (float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a6p-34"), float.fromhex("0x1.3198a2e037073p-69"))
MOST_RADIANS = 1 << 22
BLOCK = 1 << 19  # angles at a time
SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1)]  # Taylor's; below 2^-54 is left out at pi / 4
COSINE = [(-1) ** n / math.factorial(2 * n) for n in range(8, -1, -1)]


def rope_table(positions: int, rope_dim: int, theta: float) -> Tensor:
    """[positions, rope_dim / 2, 2] FP32 on the CPU: cos and sin of p * theta^(-2i / rope_dim), products in FP32 as published models do.

    ValueError beyond 2^22 radians.
    """
    return table_of(_frequencies(rope_dim, theta), positions, f"at theta {theta}")


def _frequencies(rope_dim: int, theta: float) -> Tensor:
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    return 1.0 / torch.tensor([theta**e for e in exponent.tolist()], dtype=torch.float32)


class Yarn(NamedTuple):
    """Frequencies for `factor` times the `original` positions; pairs that turn `fast` times in them or more keep theirs, pairs that
    turn `slow` times or less have theirs divided by the factor, and what lies between goes over in a straight line."""

    factor: float
    original: int
    fast: float
    slow: float


def yarn_table(positions: int, rope_dim: int, theta: float, yarn: Yarn) -> Tensor:
    """`rope_table` with YaRN's frequencies, without its factor on cosine and sine: Peng et al. 2023 (arXiv 2309.00071), section 3.2.

    ValueError beyond 2^22 radians.
    """
    frequency = _frequencies(rope_dim, theta)

    def pair(turns: float) -> float:
        return rope_dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair(yarn.fast)), 0)
    last = min(math.ceil(pair(yarn.slow)), rope_dim - 1)
    ramp = (torch.arange(len(frequency), dtype=torch.float32) - first) / (last - first if last > first else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    # as transformers and the published code write it: products and the sum in FP32
    mixed = frequency / yarn.factor * (1 - kept) + frequency * kept
    return table_of(mixed, positions, f"at theta {theta} and {yarn}")


def table_of(frequency: Tensor, positions: int, words: str) -> Tensor:
    """[positions, len(frequency), 2] FP32 on the CPU: cos and sin of p * frequency. ValueError beyond 2^22 radians."""
    if not positions * float(frequency.max()) <= MOST_RADIANS:
        raise ValueError(
            f"rope: {positions} positions {words} turn by {positions * float(frequency.max()):g} radians, at most {MOST_RADIANS}"
        )
    table = torch.empty(positions, len(frequency), 2, dtype=torch.float32)
    step = max(1, BLOCK // max(len(frequency), 1))
    for first in range(0, positions, step):
        p = torch.arange(first, min(first + step, positions), dtype=torch.float32)
        table[first : first + step, :, 0], table[first : first + step, :, 1] = cosine_and_sine(p[:, None] * frequency)
    return table


def cosine_and_sine(angle: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 angles of 0 to 2^22, any shape; each result within 2^-51 of the true value before its one rounding to FP32."""
    x = angle.to(torch.float64)
    quarter = (x * (2 / math.pi)).round()
    for part in PARTS:
        x = x - quarter * part
    square = x * x
    sine = _horner(SINE, square) * x
    cosine = _horner(COSINE, square)
    turn = quarter.to(torch.int64) & 3
    swapped = (turn & 1).bool()
    cos = torch.where(swapped, sine, cosine)
    sin = torch.where(swapped, cosine, sine)
    cos = torch.where((turn == 1) | (turn == 2), -cos, cos)
    sin = torch.where(turn >= 2, -sin, sin)
    return cos.to(torch.float32), sin.to(torch.float32)


def _horner(coefficients: list[float], x: Tensor) -> Tensor:
    out = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        out = out * x
        out = out + c
    return out
