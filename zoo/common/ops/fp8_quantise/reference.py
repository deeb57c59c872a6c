"""fp8_quantise in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128  # columns with one scale
LARGEST = 448.0  # of E4M3 without infinities


def fp8_quantise(x_RK: Tensor, floor: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Columns beyond K are zeros, which change no largest value."""
    rows, width = x_RK.shape
    missing = -width % GROUP
    x = torch.nn.functional.pad(x_RK.float(), (0, missing)).view(rows, -1, GROUP)
    largest_RG = x.abs().amax(2)
    scales_RG = largest_RG.clamp(min=floor) / LARGEST
    if power_of_two:
        scales_RG = next_power_of_two(scales_RG)
    scales_RG = torch.where(largest_RG.isfinite(), scales_RG, torch.nan)
    codes = (x / scales_RG[:, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(rows, -1)[:, :width].contiguous(), scales_RG


def next_power_of_two(scales: Tensor) -> Tensor:
    """The least power of two that is not below a positive normal FP32 number: any bit of its mantissa raises the exponent."""
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def dequantise(codes_RK: Tensor, scales_RG: Tensor) -> Tensor:
    """The values that the codes stand for, FP32: one product each."""
    width = codes_RK.shape[1]
    return codes_RK.float() * scales_RG.repeat_interleave(GROUP, 1)[:, :width]
