"""experts on a GPU: equal bytes of the class's providers, the row law, CUDA graphs, gradients against float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zoo.common.ops.experts import kernels
from zoo.common.ops.linear.kernels import linear_triton
from zoo.common.ops.swiglu.kernels import swiglu

pytestmark = pytest.mark.gpu

SHAPES = [(2048, 768, 128, 8), (2048, 512, 256, 8)]
ROWS = [1, 2, 8, 64, 65, 1000]
needs_deepgemm = pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="needs deep_gemm")


def made(hidden: int, inner: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": random}
    return torch.randn(count, 2 * inner, hidden, **kind) / hidden**0.5, torch.randn(count, hidden, inner, **kind) / inner**0.5


def rows_of(rows: int, hidden: int, count: int, slots: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, generator=random)
    # squared: a few experts are chosen often, so that tiles of one expert follow each other
    popular = torch.rand(count, device="cuda", generator=random) ** 2
    chosen = (torch.rand(rows, count, device="cuda", generator=random) * popular).topk(slots, 1).indices
    return x, chosen


def by_linear(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = x.new_empty(*chosen.shape, x.shape[1])
    for e in chosen.unique().tolist():
        row, slot = (chosen == e).nonzero(as_tuple=True)
        hidden = swiglu(linear_triton(x[row], gate_up[e], x.dtype, 1))
        out[row, slot] = linear_triton(hidden, down[e], x.dtype, 1)
    return out


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[tuple[int, int, int, int], Tensor, Tensor]:
    hidden, inner, count, _ = request.param
    return (request.param, *made(hidden, inner, count))


@pytest.mark.parametrize(("rows", "count", "tile"), [(1, 128, 16), (8, 256, 16), (63, 128, 32), (300, 128, 1), (9000, 256, 128)])
def test_layout_is_a_stable_sort(rows: int, count: int, tile: int) -> None:
    chosen = rows_of(rows, 8, count, 8)[1]
    layout = kernels.lay_out(chosen, count, tile)
    pairs = layout.pair_P[layout.pair_P >= 0].long()
    order = chosen.view(-1).argsort(stable=True)
    assert torch.equal(pairs, order)
    assert not torch.equal(pairs, order.flip(0))
    assert torch.equal(layout.pair_P[layout.place_RK.view(-1).long()].long(), torch.arange(rows * 8, device="cuda"))
    tiles = (torch.bincount(chosen.view(-1), minlength=count) + tile - 1) // tile
    owners = torch.arange(count, device="cuda").repeat_interleave(tiles)
    assert torch.equal(layout.expert_B[: len(owners)].long(), owners)
    assert bool((layout.expert_B[len(owners) :] == -1).all())
    assert torch.equal(layout.first_X1[1:].long(), tiles.cumsum(0) * tile)


@pytest.mark.parametrize("rows", ROWS)
def test_triton_equals_linear_by_expert(case: tuple[tuple[int, int, int, int], Tensor, Tensor], rows: int) -> None:
    (hidden, _, count, slots), gate_up, down = case
    x, chosen = rows_of(rows, hidden, count, slots)
    got = kernels.experts_triton(x, chosen, gate_up, down)
    assert torch.equal(got, by_linear(x, chosen, gate_up, down))
    assert not torch.equal(got, by_linear(x, chosen.roll(1, 1), gate_up, down))


@needs_deepgemm
@pytest.mark.parametrize("rows", [*ROWS, 5000])
def test_deepgemm_equals_triton(case: tuple[tuple[int, int, int, int], Tensor, Tensor], rows: int) -> None:
    (hidden, _, count, slots), gate_up, down = case
    x, chosen = rows_of(rows, hidden, count, slots)
    wanted = kernels.experts_triton(x, chosen, gate_up, down)
    assert torch.equal(kernels.through_deepgemm(x, chosen, gate_up, down), wanted)
    assert torch.equal(kernels.experts_deepgemm(x, chosen, gate_up, down), wanted)
    assert not torch.equal(kernels.through_deepgemm(x, chosen.roll(1, 1), gate_up, down), wanted)


@pytest.mark.parametrize("name", ["experts_triton", pytest.param("experts_deepgemm", marks=needs_deepgemm)])
def test_row_law(case: tuple[tuple[int, int, int, int], Tensor, Tensor], name: str) -> None:
    (hidden, _, count, slots), gate_up, down = case
    run: Callable[..., Tensor] = getattr(kernels, name)
    x, chosen = rows_of(5000, hidden, count, slots)
    whole = run(x, chosen, gate_up, down)
    for rows in ([0], [4999], [7, 3], list(range(64)), list(range(1000, 0, -1)), list(range(0, 5000, 2))):
        assert torch.equal(run(x[rows], chosen[rows], gate_up, down), whole[rows])
    other = x.clone()
    elsewhere = chosen.clone()
    other[1:] += 1
    elsewhere[1:] = (elsewhere[1:] + 1) % count
    changed = run(other, elsewhere, gate_up, down)
    assert torch.equal(changed[0], whole[0])
    assert not torch.equal(changed[1], whole[1])


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("name", ["experts_triton", pytest.param("experts_deepgemm", marks=needs_deepgemm)])
def test_graph_replay_equals_eager(case: tuple[tuple[int, int, int, int], Tensor, Tensor], name: str, rows: int) -> None:
    (hidden, _, count, slots), gate_up, down = case
    run: Callable[..., Tensor] = getattr(kernels, name)
    x, chosen = rows_of(rows, hidden, count, slots)
    first = run(x, chosen, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, chosen, gate_up, down)
    graph.replay()
    assert torch.equal(out, first)
    next_x, next_chosen = rows_of(rows, hidden, count, slots, seed=2)
    wanted = run(next_x, next_chosen, gate_up, down)
    assert not torch.equal(out, wanted)
    x.copy_(next_x)
    chosen.copy_(next_chosen)
    graph.replay()
    assert torch.equal(out, wanted)


def in_float64(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [t.double().requires_grad_() for t in (x, gate_up, down)]
    out = torch.zeros(*chosen.shape, x.shape[1], device="cuda", dtype=torch.float64)
    for e in chosen.unique().tolist():
        row, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = (leaves[0][row] @ leaves[1][e].T).chunk(2, -1)
        out = out.index_put((row, slot), (torch.nn.functional.silu(gate) * up) @ leaves[2][e].T)
    return out.detach(), list(torch.autograd.grad(out, leaves, grad.double()))


def far(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 50, 700])
def test_backward_against_float64(rows: int) -> None:
    hidden = 512
    inner = 192
    count = 16
    slots = 4
    gate_up, down = made(hidden, inner, count)
    x, chosen = rows_of(rows, hidden, count - 1, slots)
    grad = torch.randn(rows, slots, hidden, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(3))
    out, wanted = in_float64(x, chosen, gate_up, down, grad)
    assert far(kernels.experts_triton(x, chosen, gate_up, down), out) < 1e-2
    assert far(kernels.experts_grouped_mm(x, chosen, gate_up, down), out) < 1e-2
    got = kernels.experts_backward(grad, x, chosen, gate_up, down)
    for mine, right in zip(got, wanted, strict=True):
        assert far(mine, right) < 1e-2
    assert not got[1][-1].any() and not got[2][-1].any()
    wrong = kernels.experts_backward(grad.flip(1), x, chosen, gate_up, down)
    assert all(far(mine, right) > 1e-1 for mine, right in zip(wrong, wanted, strict=True))
    again = kernels.experts_backward(grad, x, chosen, gate_up, down)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
