"""code_round and hadamard against a transcription that uses nothing of the zoo, on every BF16 number; straight-through gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import plain_rows
import pytest
import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.program import resolve
from zoo.testing import LawBroken, assert_same_bytes

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)


def drawn(rows: int, width: int) -> Tensor:
    """Rows of 24 binades, some of them below every floor."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=generator) * 2.0 ** torch.randint(-12, 12, (rows, width), generator=generator)
    x[1] *= 2.0**-30
    x[2] *= 2.0**-120
    x[3] = -0.0
    x[4] = (x[4] * 4).round() / 8  # halves between codes
    return x.bfloat16()


def row(x: Tensor, grid: ops.Grid = ops.FP8_ROWS) -> Tensor:
    return ops.code_round(x, x.shape[1] - 8, grid, program=ALIGNED)


def vector(x: Tensor, grid: ops.Grid = ops.FP4_INDEX) -> Tensor:
    return ops.code_round(ops.hadamard(x, program=ALIGNED), x.shape[-1], grid, program=ALIGNED)


@pytest.mark.parametrize("width", [24, 72, 512])
def test_a_cached_row_is_the_released_one(width: int) -> None:
    x = drawn(64, width)
    found = row(x)
    assert_same_bytes(found, plain_rows.cached_row(x, width - 8))
    assert_same_bytes(found[:, -8:], x[:, -8:])  # rotated columns stay
    assert_same_bytes(row(found), found)  # what is cached is a code already


@pytest.mark.parametrize("width", [16, 32, 128])
def test_an_index_vector_is_the_released_one(width: int) -> None:
    x = drawn(64, width)
    assert_same_bytes(vector(x), plain_rows.index_vector(x))
    heads = x.unflatten(0, (8, 8))
    assert_same_bytes(vector(heads).flatten(0, 1), vector(x))


@pytest.mark.parametrize("change", [{"group": 32}, {"floor": 1e-2}, {"mantissa": 2}, {"least": -5}, {"largest": 256.0}])
def test_another_grid_is_caught(change: dict[str, float]) -> None:
    x = drawn(64, 512)
    with pytest.raises(LawBroken):
        assert_same_bytes(row(x, replace(ops.FP8_ROWS, **change)), plain_rows.cached_row(x, 504))


@pytest.mark.parametrize("change", [{"group": 64}, {"mantissa": 2}, {"least": 1}, {"largest": 4.0}])
def test_another_grid_of_four_bits_is_caught(change: dict[str, float]) -> None:
    x = drawn(64, 128)
    with pytest.raises(LawBroken):
        assert_same_bytes(vector(x, replace(ops.FP4_INDEX, **change)), plain_rows.index_vector(x))


@pytest.mark.parametrize(("grid", "largest"), [(ops.FP8_ROWS, 448.0), (ops.FP4_INDEX, 6.0)])
def test_every_number_of_bf16_has_the_released_scale(grid: ops.Grid, largest: float) -> None:
    """The released code multiplies by the FP32 reciprocal where this divides: rounded up to a power of two they are one number."""
    every = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float().clamp(min=grid.floor)
    by_reciprocal = plain_rows.up_to_a_power_of_two(every * torch.tensor(1 / largest))
    assert_same_bytes(plain_rows.up_to_a_power_of_two(every / largest), by_reciprocal)
    below = every[every < largest * 2.0**110]
    alone = ops.code_round(below.bfloat16()[:, None], 1, grid, program=ALIGNED)
    scales = plain_rows.up_to_a_power_of_two(below * torch.tensor(1 / largest))
    codes = below / scales
    wanted = codes.to(torch.float8_e4m3fn).float() if largest == 448 else plain_rows.four_bits(codes)
    assert_same_bytes(alone[:, 0], (wanted * scales).bfloat16())


def test_what_is_no_number_stays_in_its_group() -> None:
    x = torch.ones(3, 128).bfloat16()
    x[0, 3] = torch.nan
    x[1, 70] = torch.inf
    found = ops.code_round(x, 128, ops.FP8_ROWS, program=ALIGNED)
    assert found.isnan().sum(1).tolist() == [64, 64, 0]
    assert found[0, :64].isnan().all() and found[1, 64:].isnan().all()


def test_gradients() -> None:
    """A step has no slope: what comes goes through. A rotation's is the rotation, and twice is nothing."""
    x = drawn(16, 64).requires_grad_()
    upstream = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    (found,) = torch.autograd.grad(row(x), x, upstream)
    assert_same_bytes(found, upstream)
    (found,) = torch.autograd.grad(ops.hadamard(x, program=ALIGNED), x, upstream)
    assert_same_bytes(found, ops.hadamard(upstream, program=ALIGNED))
    exact = torch.arange(64.0)[None].bfloat16()
    assert_same_bytes(ops.hadamard(ops.hadamard(exact, program=ALIGNED), program=ALIGNED), exact)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.code_round(torch.ones(2, 4).bfloat16(), 5, ops.FP8_ROWS, program=ALIGNED), "5 columns of rows of 4"),
        (lambda: ops.code_round(torch.ones(2, 4).bfloat16(), 0, ops.FP8_ROWS, program=ALIGNED), "0 columns of rows of 4"),
        (lambda: ops.hadamard(torch.ones(2, 12).bfloat16(), program=ALIGNED), "a width must be a power of two, it is 12"),
    ],
)
def test_refusals(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
