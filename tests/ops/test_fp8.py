"""FP8: the quantiser's codes and scales, and the product of codes, against float64 and against another transcription."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.codecs import Exponents
from zoo.common.ops import FP32_SCALES, POWERS_OF_TWO, ScaleRule
from zoo.common.ops.fp8_linear.reference import dequantised
from zoo.common.ops.fp8_quantise.reference import dequantise, next_power_of_two
from zoo.common.program import Program, resolve

CPU = resolve("aligned", "cpu", torch.bfloat16)
# every value that E4M3 has, from its definition: four bits of exponent with bias 7, three of mantissa, the last pattern is NaN
E4M3 = sorted({(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} - {480.0} | {m / 8 * 2.0**-6 for m in range(8)})


def devices() -> list[object]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def program_on(device: str) -> Program:
    return resolve("aligned", device, torch.bfloat16)


def rows(count: int, width: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randn(count, 1, generator=draw) * spread)
    return (torch.randn(count, width, generator=draw) * scale).bfloat16()


def nearest(value: float) -> float:
    """The E4M3 value nearest to a number cut to +-448, the one with an even mantissa among two."""
    size = min(abs(value), 448.0)
    best = min(E4M3, key=lambda known: (abs(known - size), E4M3.index(known) % 2))
    return math.copysign(best, value)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", [FP32_SCALES, POWERS_OF_TWO], ids=["fp32", "power of two"])
def test_codes_are_the_nearest_values(device: str, rule: ScaleRule) -> None:
    x = rows(5, 300)
    x[1, :128] = 0
    x[2, 128:256] *= 2.0**-40
    codes, scales = (t.cpu() for t in ops.fp8_quantise(x.to(device), rule, program=program_on(device)))
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (5, 3)
    for r in range(5):
        for group in range(3):
            part = x[r, group * 128 : (group + 1) * 128].float()
            wanted = torch.tensor(max(float(part.abs().max()), rule.floor), dtype=torch.float32) / 448
            if rule.power_of_two:
                wanted = torch.tensor(2.0 ** math.ceil(math.log2(float(wanted))))
            assert float(scales[r, group]) == float(wanted)
            quotients = (part / wanted).tolist()
            assert codes[r, group * 128 : (group + 1) * 128].float().tolist() == [nearest(q) for q in quotients]


@pytest.mark.parametrize("device", devices())
def test_what_is_not_finite_stays_in_its_group(device: str) -> None:
    x = rows(3, 256)
    clean = [t.cpu() for t in ops.fp8_quantise(x.to(device), FP32_SCALES, program=program_on(device))]
    x[0, 5] = torch.nan
    x[1, 200] = torch.inf
    codes, scales = (t.cpu() for t in ops.fp8_quantise(x.to(device), FP32_SCALES, program=program_on(device)))
    assert scales.isnan().tolist() == [[True, False], [False, True], [False, False]]
    assert codes[0, :128].float().isnan().all() and codes[1, 128:].float().isnan().all()
    for r, group in ((0, 1), (1, 0), (2, 0), (2, 1)):
        mine = slice(group * 128, (group + 1) * 128)
        assert torch.equal(codes[r, mine].view(torch.uint8), clean[0][r, mine].view(torch.uint8))


def test_powers_of_two_are_rounded_up() -> None:
    exact = torch.tensor([2.0**-20, 1.0, 4.0])
    assert torch.equal(next_power_of_two(exact), exact)
    assert next_power_of_two(torch.nextafter(exact, torch.full((3,), 100.0))).tolist() == [2.0**-19, 2.0, 8.0]


def scale_of(largest: float) -> float:
    """DeepSeek-V4's rule, transcribed: the amax is at least 1e-4, its 448th part in FP32 is rounded up to a power of two."""
    part = float(torch.tensor(max(largest, float(torch.tensor(1e-4)))) / 448)
    mantissa, exponent = math.frexp(part)  # part = mantissa x 2^exponent, mantissa in [0.5, 1)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


@pytest.mark.parametrize("device", devices())
def test_scales_of_two_at_every_edge(device: str) -> None:
    """The largest value of a group at 448 times a power of two, a BF16 number below it and above it, and around the floor."""
    edges = [448.0 * 2.0**e for e in range(-40, 60)] + [1e-4, 0.0, 2.0**-14, 2.0**-13]
    at = torch.tensor(edges).bfloat16()
    bits = at.view(torch.int16)
    largest = torch.cat([at, (bits + 1).view(torch.bfloat16), (bits.clamp(min=1) - 1).view(torch.bfloat16)])
    x = torch.zeros(len(largest), 128, dtype=torch.bfloat16)
    x[:, 77] = -largest
    codes, scales = (t.cpu() for t in ops.fp8_quantise(x.to(device), POWERS_OF_TWO, program=program_on(device)))
    wanted = [scale_of(float(value)) for value in largest]
    assert scales[:, 0].tolist() == wanted
    assert codes[:, 77].float().tolist() == [nearest(-float(v) / s) for v, s in zip(largest, wanted, strict=True)]
    above = largest.float() > 1e-4
    assert bool((codes[above, 77].float().abs() > 220).all()) and float(scales[100, 0]) == 2.0**-22
    # control: the rule without the power of two has other scales
    assert ops.fp8_quantise(x.to(device), FP32_SCALES, program=program_on(device)).scales_RG.cpu()[:, 0].tolist() != wanted


@pytest.mark.parametrize("device", devices())
def test_weight_scales_that_are_exponents(device: str) -> None:
    """Read from E8M0 bytes; with powers of two on both sides and few bits in the codes every sum is exact, whatever its order."""
    draw = torch.Generator().manual_seed(5)
    n = 136
    k = 384
    bytes_BG = torch.randint(124, 131, (2, 3), generator=draw).to(torch.uint8)
    scales = Exponents(held=torch.float32).decode(bytes_BG.view(torch.float8_e8m0fnu))
    assert scales.tolist() == [[2.0 ** (b - 127) for b in row] for row in bytes_BG.tolist()]
    codes = torch.randint(-4, 5, (n, k), generator=draw).float().to(torch.float8_e4m3fn)
    x = torch.randint(-3, 4, (17, k), generator=draw).bfloat16()
    x[:, ::128] = 7.0  # every group's largest: its scale is 2^-6
    spread = scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    exact = x.double() @ (codes.double() * spread).T
    found = ops.fp8_linear(x.to(device), codes.to(device), scales.to(device), POWERS_OF_TWO, program=program_on(device)).cpu()
    assert torch.equal(found, exact.float().bfloat16())
    other = ops.fp8_linear(x.to(device), codes.to(device), scales.roll(1, 1).to(device), POWERS_OF_TWO, program=program_on(device)).cpu()
    assert not torch.equal(other, found)


def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    codes = (torch.randn(n, k, generator=draw) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, torch.rand(-(-n // 128), -(-k // 128), generator=draw) * 1e-3 + 1e-4


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(1, 128, 128), (17, 136, 384), (33, 2624, 1024)], ids=str)
def test_the_product_errs_by_its_sums_only(device: str, shape: tuple[int, int, int]) -> None:
    """Against float64 on the same codes: its own rounding to BF16, and on Hopper some 14 bits of a sum inside a group."""
    count, n, k = shape
    x = rows(count, k)
    (codes, scales) = weight(n, k)
    x_codes, x_scales = ops.fp8_quantise(x, FP32_SCALES, program=CPU)
    exact = dequantise(x_codes, x_scales).double() @ dequantised(codes, scales, torch.float64).T
    found = ops.fp8_linear(x.to(device), codes.to(device), scales.to(device), FP32_SCALES, program=program_on(device))
    error = float((found.cpu().double() - exact).norm() / exact.norm())
    assert error <= 2.0**-8, error


def test_quantised_rows_are_near_the_rows() -> None:
    """Three bits of mantissa: a value is off by at most 2^-4 of itself, and by far less where nothing is subnormal."""
    x = rows(64, 1024, spread=0.0)
    (codes, scales) = weight(256, 1024)
    found = ops.fp8_linear(x, codes, scales, FP32_SCALES, program=CPU)
    exact = x.double() @ dequantised(codes, scales, torch.float64).T
    assert 2.0**-8 < float((found.double() - exact).norm() / exact.norm()) < 2.0**-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": rows(2, 256)}, "x has 256 columns, the weight takes 384"),
        ({"scales": torch.ones(1, 3)}, "a weight of 200 x 384 has 2 x 3 scales, not 1 x 3"),
        ({"scales": torch.ones(2, 3).bfloat16()}, "scales_BG"),
        ({"codes": torch.zeros(200, 384)}, "codes_NK"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    codes, scales = weight(200, 384)
    given = {"x": rows(2, 384), "codes": codes, "scales": scales} | change
    with pytest.raises(ValueError, match=message):
        ops.fp8_linear(given["x"], given["codes"], given["scales"], FP32_SCALES, program=CPU)
