"""MXFP4: codes and scales against the formats' definitions and another transcription, and the experts op on packed weights."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.ops.e2m1 import FLOOR, LARGEST_SCALE, dequantised, packed, quantised, unpacked
from zoo.common.ops.packed_experts.cases import cases
from zoo.common.program import resolve
from zoo.testing import assert_same_bytes

CPU = resolve("aligned", "cpu", torch.bfloat16)
# from the definition of a float: a sign, two bits of exponent with bias 1, one of mantissa
E2M1 = [(1 + m / 2) * 2.0 ** (e - 1) if e else m / 2 for e in range(4) for m in range(2)]


def nearest(size: float) -> int:
    """The code of the value nearest to a size of at most 6, the even one among two."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - size), code % 2))


def transcribed(values: list[float]) -> tuple[list[int], int]:
    """Codes and the scale's byte of one group, in Python's numbers."""
    largest = max(abs(value) for value in values)
    exponent = math.ceil(math.log2(max(largest, FLOOR) / 6))
    codes = [nearest(abs(value) / 2.0**exponent) | (8 if math.copysign(1, value) < 0 else 0) for value in values]
    return codes, exponent + 127


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_byte_has_the_even_column_in_its_low_half() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert packed(codes).view(torch.uint8).tolist() == [[0x21, 0x0F]]
    every = torch.arange(256, dtype=torch.uint8).view(torch.int8)[None]
    assert_same_bytes(packed(unpacked(every)), every)
    assert unpacked(every)[0, :6].tolist() == [0, 0, 1, 0, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_code_at_every_scale_is_exact(dtype: torch.dtype) -> None:
    """Bytes 0 to 252, the largest that may stand in a checkpoint; one more and BF16 has no number for six times it."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    for byte in range(LARGEST_SCALE + 2):
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        found = dequantised(packed(codes[None]), scale, dtype)[0, :16].double().tolist()
        wanted = [sign * value * 2.0 ** (byte - 127) for sign in (1, -1) for value in E2M1]
        assert (found == wanted) == (byte <= LARGEST_SCALE), byte
        assert [math.copysign(1, value) for value in found] == [1.0] * 8 + [-1.0] * 8


@pytest.mark.parametrize("size", [1.0, 2.0**-130, 2.0**100], ids=["usual", "below the floor", "large"])
def test_codes_are_those_of_another_transcription(size: float) -> None:
    values = (normal(3, 4, 64) * size).bfloat16().float()
    values[0, 0, :32] = 0.0
    values[0, 1, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4) * max(size, 2.0**-126)  # ties, scale exactly 1
    values[0, 1, 1:32:2] *= -1
    codes, scales = quantised(values)
    assert codes.dtype == torch.int8 and codes.shape == (3, 4, 32)
    assert scales.dtype == torch.float8_e8m0fnu and scales.shape == (3, 4, 2)
    for i, j, group in itertools.product(range(3), range(4), range(2)):
        mine = slice(group * 32, group * 32 + 32)
        wanted, byte = transcribed(values[i, j, mine].tolist())
        assert int(scales.view(torch.uint8)[i, j, group]) == byte
        assert unpacked(codes)[i, j, mine].tolist() == wanted
    # control: ties to the other side are seen
    assert unpacked(codes)[0, 1, :8].tolist() != [0 + 1, 8 + 1, 3, 8 + 3, 5, 8 + 5, 7, 8 + 7]


def test_values_come_back_from_their_own_codes() -> None:
    """A group whose largest code is 3 is written in the next smaller scale, with other codes of the same values."""
    values = normal(64, 256, seed=1)
    first = quantised(values)
    decoded = dequantised(*first, torch.bfloat16)
    again = quantised(decoded)
    assert_same_bytes(dequantised(*again, torch.bfloat16), decoded)
    assert float((decoded.float() - values).abs().max()) <= float(values.abs().max()) / 6
    three = dequantised(*quantised(torch.tensor([[3.1] + [0.3] * 31])), torch.float32)
    assert three[0, 0] == 3.0 and int(quantised(three)[1].view(torch.uint8)) == 126


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.zeros(2, 48), "rows of 48 values are no whole groups of 32"),
        (torch.tensor([[math.nan] + [0.0] * 31]), "NaN, infinite or beyond"),
        (torch.tensor([[math.inf] + [0.0] * 31]), "NaN, infinite or beyond"),
        (torch.tensor([[3e38] + [0.0] * 31]), "NaN, infinite or beyond"),
    ],
)
def test_what_has_no_codes_is_refused(values: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantised(values)


def given(**changes: Any) -> dict[str, Any]:
    [case] = [case for case in cases(CPU) if case.name == "cut to 10"]
    return {**case.make(0, "cpu", torch.bfloat16), "program": CPU, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limit": 0.0}, "cut to a positive limit, not to 0.0"),
        ({"x_RD": torch.zeros(9, 63).bfloat16()}, "rows of 63 columns, experts of 64"),
        ({"gate_up_X2FC": torch.zeros(4, 192, 33, dtype=torch.int8)}, "hidden size 66 is no multiple of 32"),
        ({"gate_up_X2FC": torch.zeros(4, 128, 32, dtype=torch.int8)}, r"needs gate_up_scales \(4, 128, 2\), got \(4, 192, 2\)"),
        ({"down_XDC": torch.zeros(4, 64, 32, dtype=torch.int8)}, r"needs down \(4, 64, 48\), got \(4, 64, 32\)"),
        (
            {"down_scales_XDG": torch.zeros(4, 64, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
            r"needs down_scales \(4, 64, 3\), got \(4, 64, 4\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    ops.packed_experts(**given())
    with pytest.raises(ValueError, match=words):
        ops.packed_experts(**given(**changes))


def test_a_limit_cuts() -> None:
    free, cut = (ops.packed_experts(**given(limit=limit)) for limit in (None, 0.05))
    assert not torch.equal(free, cut) and float(cut.abs().max()) < float(free.abs().max())
