"""The packed_experts kernels in Triton's interpreter: codes, scales, layout and gradients, with FP32 rows (its bf16 products are wrong)."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

from zoo.common.ops.e2m1 import dequantised
from zoo.common.ops.packed_experts import kernels, reference
from zoo.testing import assert_same_bytes

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

HIDDEN = 160
INNER = 96
EXPERTS = 5
SLOTS = 3
Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def coded(random: torch.Generator, *shape: int, scales: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes [..., K / 2] and scales [..., K / 32]."""
    codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=random).to(torch.uint8).view(torch.int8)
    exponents = torch.randint(*scales, (*shape[:-1], shape[-1] // 32), generator=random)
    return codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def made(rows: int, scales: tuple[int, int] = (119, 123), seed: int = 0) -> tuple[Tensor, Tensor, Weights]:
    """Rows, chosen experts (distinct in a row, the last expert never chosen), and weights."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=random)
    chosen = torch.rand(rows, EXPERTS - 1, generator=random).argsort(1)[:, :SLOTS]
    gate_up = coded(random, EXPERTS, 2 * INNER, HIDDEN, scales=scales)
    down = coded(random, EXPERTS, HIDDEN, INNER, scales=scales)
    return x, chosen.contiguous(), (*gate_up, *down)


def test_every_code_at_every_scale() -> None:
    """Bytes 0 to 252, so subnormal values as well; the control shows that halves of a byte are told apart."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).repeat(253, 1)
    scales = torch.arange(253, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None].repeat(1, 16)
    wanted = dequantised(codes, scales, torch.float32)
    got = kernels.dequantise(codes[None], scales[None], torch.float32)[0]
    assert_same_bytes(got, wanted)
    assert bool((wanted.abs() < 2.0**-126).any() and wanted.isfinite().all())
    swapped = ((codes.view(torch.uint8) << 4) | (codes.view(torch.uint8) >> 4)).view(torch.int8)
    assert not torch.equal(kernels.dequantise(swapped[None], scales[None], torch.float32)[0], wanted)


@pytest.mark.parametrize(("rows", "limit"), [(1, None), (2, 1.0), (30, 1.0)])
def test_forward_is_the_reference(rows: int, limit: float | None) -> None:
    x, chosen, weights = made(rows)
    wanted = reference.packed_experts(x, chosen, *weights, limit)
    torch.testing.assert_close(kernels.packed_experts_triton(x, chosen, *weights, limit), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernels.packed_experts_dequantised(x, chosen, *weights, limit), wanted, rtol=1e-4, atol=1e-4)
    other = kernels.packed_experts_triton(x, chosen.roll(1, 1), *weights, limit)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tile", [kernels.Tile(16, 64, 128, 4, 4), kernels.Tile(64, 128, 64, 8, 3)], ids=str)
def test_every_tile_has_the_rows_of_the_reference(tile: kernels.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_tile", lambda pairs, experts: tile)
    x, chosen, weights = made(9)
    wanted = reference.packed_experts(x, chosen, *weights)
    torch.testing.assert_close(kernels.packed_experts_triton(x, chosen, *weights), wanted, rtol=1e-4, atol=1e-4)


def test_scales_below_the_normal_numbers() -> None:
    x, chosen, weights = made(3, scales=(0, 3))
    x *= 2.0**100
    wanted = reference.packed_experts(x, chosen, weights[0], weights[1], *made(3)[2][2:])
    got = kernels.packed_experts_triton(x, chosen, weights[0], weights[1], *made(3)[2][2:])
    assert bool((wanted != 0).all())
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.usefixtures("poisoned_empty")
def test_many_rows_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: Tensor, weight: Tensor, out: Tensor, ends_X: Tensor, use_psum_layout: bool) -> None:
        for expert, (start, end) in enumerate(pairwise([0, *ends_X.tolist()])):
            out[start:end] = a[start:end] @ weight[expert].T

    library = SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: 16, m_grouped_bf16_gemm_nt_contiguous=product)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    x, chosen, weights = made(20)
    wanted = reference.packed_experts(x, chosen, *weights, 1.0)
    few = kernels.packed_experts_deepgemm(x, chosen, *weights, 1.0)
    assert_same_bytes(few, kernels.packed_experts_triton(x, chosen, *weights, 1.0))
    monkeypatch.setattr(kernels, "DEQUANTISE_ROWS", 1)
    torch.testing.assert_close(kernels.packed_experts_deepgemm(x, chosen, *weights, 1.0), wanted, rtol=1e-4, atol=1e-4)


def test_no_rows() -> None:
    x, chosen, weights = made(1)
    assert kernels.packed_experts_triton(x[:0], chosen[:0], *weights).shape == (0, SLOTS, HIDDEN)
    assert kernels.packed_experts_backward(x.new_zeros(0, SLOTS, HIDDEN), x[:0], chosen[:0], *weights).shape == (0, HIDDEN)


def test_row_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one tile: NumPy's products depend on their shapes, those of a GPU don't."""
    monkeypatch.setattr(kernels, "_tile", lambda pairs, experts: kernels.Tile(16, 64, 64, 4, 3))
    x, chosen, weights = made(5)
    whole = kernels.packed_experts_triton(x, chosen, *weights)
    for rows in ([4], [3, 1]):
        assert torch.equal(kernels.packed_experts_triton(x[rows], chosen[rows], *weights), whole[rows])
    other = x.clone()
    other[2] += 1
    changed = kernels.packed_experts_triton(other, chosen, *weights)
    assert [torch.equal(changed[r], whole[r]) for r in range(5)] == [True, True, False, True, True]


# NumPy, about padding rows, which hold what the memory held before: they are computed with the others and read by nobody
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(("rows", "many"), [(1, 512), (6, 512), (6, 1)])
def test_backward_is_the_reference(rows: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights dequantised inside the products, and before them where there are many rows."""
    monkeypatch.setattr(kernels, "DEQUANTISE_ROWS", many)
    x, chosen, weights = made(rows)
    grad = torch.randn(rows, SLOTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    got = kernels.packed_experts_backward(grad, x, chosen, *weights, 1.0)
    wanted = reference.packed_experts_backward(grad, x, chosen, *weights, 1.0)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(reference.packed_experts_backward(grad.flip(1), x, chosen, *weights, 1.0), got, rtol=1e-2, atol=1e-2)
