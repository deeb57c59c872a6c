"""packed_experts on a GPU: one byte class at every row count, the row law, CUDA graphs, the gradient against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from zoo.common.ops.e2m1 import dequantised
from zoo.common.ops.experts import kernels as experts_kernels
from zoo.common.ops.packed_experts import kernels, reference
from zoo.testing import assert_same_bytes

pytestmark = pytest.mark.gpu

LIMIT = 10.0
# hidden, inner, experts, slots: DeepSeek-V4-Flash with fewer experts, and widths that are no whole tiles
SHAPES = [(4096, 2048, 32, 6), (1184, 416, 16, 4)]
ROWS = [1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 129, 257, 512, 1000, 3000]
Weights = tuple[Tensor, Tensor, Tensor, Tensor]
needs_deepgemm = pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="needs deep_gemm")


def coded(random: torch.Generator, *shape: int, scales: tuple[int, int]) -> tuple[Tensor, Tensor]:
    codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=random, device="cuda").to(torch.uint8).view(torch.int8)
    exponents = torch.randint(*scales, (*shape[:-1], shape[-1] // 32), generator=random, device="cuda")
    return codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def made(hidden: int, inner: int, count: int, scales: tuple[int, int] = (117, 121), seed: int = 0) -> Weights:
    random = torch.Generator("cuda").manual_seed(seed)
    return (*coded(random, count, 2 * inner, hidden, scales=scales), *coded(random, count, hidden, inner, scales=scales))


def rows_of(rows: int, hidden: int, count: int, slots: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, generator=random)
    # squared: a few experts are chosen often, so that tiles of one expert follow each other
    popular = torch.rand(count, device="cuda", generator=random) ** 2
    return x, (torch.rand(rows, count, device="cuda", generator=random) * popular).topk(slots, 1).indices


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[tuple[int, int, int, int], Weights]:
    hidden, inner, count, _ = request.param
    return request.param, made(hidden, inner, count)


def test_every_code_at_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.int8).repeat(253, 1)
    scales = torch.arange(253, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)[:, None].repeat(1, 16)
    for dtype in (torch.bfloat16, torch.float32):
        got = kernels.dequantise(codes[None], scales[None], dtype)[0].cpu()
        assert_same_bytes(got, dequantised(codes.cpu(), scales.cpu(), dtype))
        assert not torch.equal(got, got.flip(1))


@pytest.mark.parametrize("rows", ROWS)
def test_inside_the_product_and_before_it(case: tuple[tuple[int, int, int, int], Weights], rows: int) -> None:
    """Dequantised tile by tile, and once for all rows with the experts op's own product: the same bytes."""
    (hidden, _, count, slots), weights = case
    x, chosen = rows_of(rows, hidden, count, slots)
    wanted = kernels.packed_experts_dequantised(x, chosen, *weights, LIMIT)
    got = kernels.packed_experts_triton(x, chosen, *weights, LIMIT)
    assert bool(got.isfinite().all()) and bool((got != 0).any())
    assert_same_bytes(got, wanted)
    assert not torch.equal(kernels.packed_experts_triton(x, chosen.roll(1, 1), *weights, LIMIT), wanted)


@needs_deepgemm
@pytest.mark.parametrize("rows", [*ROWS, 9000])
def test_deepgemm_has_the_same_bytes(case: tuple[tuple[int, int, int, int], Weights], rows: int) -> None:
    (hidden, _, count, slots), weights = case
    if hidden % 64:
        pytest.skip("DeepGEMM takes multiples of 64")
    x, chosen = rows_of(rows, hidden, count, slots)
    wanted = kernels.packed_experts_triton(x, chosen, *weights, LIMIT)
    dense = kernels.dequantised_weights(*weights, x.dtype)
    assert_same_bytes(experts_kernels.through_deepgemm(x, chosen, *dense, LIMIT), wanted)
    assert_same_bytes(kernels.packed_experts_deepgemm(x, chosen, *weights, LIMIT), wanted)


@pytest.mark.parametrize("tile", [(16, 64, 128, 4, 4), (16, 64, 64, 4, 3), (32, 128, 64, 4, 3), (64, 64, 128, 4, 2), (128, 128, 64, 8, 3)])
def test_no_tile_moves_a_byte(tile: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, inner, count, slots = SHAPES[1]
    weights = made(hidden, inner, count)
    x, chosen = rows_of(100, hidden, count, slots)
    wanted = kernels.packed_experts_dequantised(x, chosen, *weights, LIMIT)
    monkeypatch.setattr(kernels, "_tile", lambda pairs, experts: kernels.Tile(*tile))
    assert_same_bytes(kernels.packed_experts_triton(x, chosen, *weights, LIMIT), wanted)


@pytest.mark.parametrize("scales", [(0, 4), (100, 140)], ids=["subnormal", "wide"])
def test_scales_of_all_sizes(scales: tuple[int, int]) -> None:
    hidden, inner, count, slots = SHAPES[1]
    weights = (*made(hidden, inner, count, scales)[:2], *made(hidden, inner, count)[2:])
    x, chosen = rows_of(40, hidden, count, slots)
    x *= 2.0**100 if scales[0] == 0 else 2.0**-12
    wanted = kernels.packed_experts_dequantised(x, chosen, *weights)
    assert bool((wanted != 0).any())
    assert_same_bytes(kernels.packed_experts_triton(x, chosen, *weights), wanted)


@pytest.mark.parametrize("scales", [(0, 4), (117, 121), (100, 140)], ids=["subnormal", "usual", "wide"])
@pytest.mark.parametrize("rows", [1, 40, 1000])
def test_values_that_are_looked_up(rows: int, scales: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By `prmt` and one product in BF16, or by FP32 arithmetic: the same weights."""
    hidden, inner, count, slots = SHAPES[1]
    weights = (*made(hidden, inner, count, scales)[:2], *made(hidden, inner, count)[2:])
    x, chosen = rows_of(rows, hidden, count, slots)
    x *= 2.0**100 if scales[0] == 0 else 2.0**-12 if scales[0] == 100 else 1.0
    found = []
    for looked_up in (0, 128):
        monkeypatch.setattr(kernels, "LOOKED_UP", looked_up)
        found.append(kernels.packed_experts_triton(x, chosen, *weights))
    assert bool((found[0] != 0).any()) and bool(found[0].isfinite().all())
    assert_same_bytes(found[1], found[0])
    weights[0].view(torch.uint8)[...] ^= 0x80  # control: signs of the odd columns
    assert not torch.equal(kernels.packed_experts_triton(x, chosen, *weights), found[0])


def test_row_law(case: tuple[tuple[int, int, int, int], Weights]) -> None:
    (hidden, _, count, slots), weights = case
    x, chosen = rows_of(3000, hidden, count, slots)
    whole = kernels.packed_experts_triton(x, chosen, *weights, LIMIT)
    for rows in ([0], [2999], [7, 3], list(range(64)), list(range(1000, 0, -1)), list(range(0, 3000, 2))):
        assert torch.equal(kernels.packed_experts_triton(x[rows], chosen[rows], *weights, LIMIT), whole[rows])
    other = x.clone()
    elsewhere = chosen.clone()
    other[1:] = torch.nan
    elsewhere[1:] = (elsewhere[1:] + 1) % count
    changed = kernels.packed_experts_triton(other, elsewhere, *weights, LIMIT)
    assert torch.equal(changed[0], whole[0])
    assert not torch.equal(changed[1], whole[1])


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_graph_replay_equals_eager(case: tuple[tuple[int, int, int, int], Weights], rows: int) -> None:
    (hidden, _, count, slots), weights = case
    x, chosen = rows_of(rows, hidden, count, slots)
    first = kernels.packed_experts_triton(x, chosen, *weights, LIMIT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.packed_experts_triton(x, chosen, *weights, LIMIT)
    graph.replay()
    assert torch.equal(out, first)
    next_x, next_chosen = rows_of(rows, hidden, count, slots, seed=2)
    wanted = kernels.packed_experts_triton(next_x, next_chosen, *weights, LIMIT)
    assert not torch.equal(out, wanted)
    x.copy_(next_x)
    chosen.copy_(next_chosen)
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("rows", [1, 50, 400])
def test_gradient_of_x_against_float64(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = 512
    inner = 192
    count = 16
    slots = 4
    weights = made(hidden, inner, count)
    x, chosen = rows_of(rows, hidden, count, slots)
    grad = torch.randn(rows, slots, hidden, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(3))
    wanted = reference.packed_experts_backward(grad.double(), x.double(), chosen, *weights)
    got = kernels.packed_experts_backward(grad, x, chosen, *weights)

    def far(found: Tensor) -> float:
        return float((found.double() - wanted).norm() / wanted.norm())

    assert far(got) < 1e-2
    assert far(kernels.packed_experts_backward(grad.flip(1), x, chosen, *weights)) > 1e-1
    assert_same_bytes(kernels.packed_experts_backward(grad, x, chosen, *weights), got)
    monkeypatch.setattr(kernels, "DEQUANTISE_ROWS", 0)  # all weights before the products: the same order of additions
    assert_same_bytes(kernels.packed_experts_backward(grad, x, chosen, *weights), got)
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "LOOKED_UP", 0)
    assert_same_bytes(kernels.packed_experts_backward(grad, x, chosen, *weights), got)
