"""code_round in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from zoo.common.ops.fp8_quantise.reference import next_power_of_two

if TYPE_CHECKING:
    from zoo.common.ops.code_round import Grid

WHOLE = 1.5 * 2.0**23  # added to a small FP32 number it rounds it to a whole one, ties to even


def code_round(x_RE: Tensor, columns: int, grid: Grid) -> Tensor:
    """Columns beyond the last group are zeros, which change no largest value."""
    coded = functional.pad(x_RE[:, :columns].float(), (0, -columns % grid.group)).unflatten(1, (-1, grid.group))
    largest_RG1 = coded.abs().amax(2, keepdim=True)
    scales_RG1 = next_power_of_two(largest_RG1.clamp(min=grid.floor) / grid.largest)
    scales_RG1 = torch.where(largest_RG1.isfinite(), scales_RG1, torch.nan)
    quotients = (coded / scales_RG1).clamp(-grid.largest, grid.largest)
    rounded = (nearest(quotients.abs(), grid.mantissa, grid.least) * scales_RG1).copysign(coded)
    return torch.cat([rounded.flatten(1)[:, :columns].to(x_RE.dtype), x_RE[:, columns:]], 1)


def nearest(sizes: Tensor, mantissa: int, least: int) -> Tensor:
    """Sizes of at least 0, in FP32, to the nearest number of so many bits of mantissa, ties to even."""
    exponents = (sizes.view(torch.int32) >> 23).clamp(min=least + 127)
    steps = ((exponents - mantissa) << 23).view(torch.float32)
    return (sizes / steps + WHOLE - WHOLE) * steps
