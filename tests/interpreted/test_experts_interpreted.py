"""The experts kernels in Triton's interpreter: layout, indexing and gradients, in FP32 (its bf16 products are wrong)."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

from zoo.common.ops.experts import kernels, reference

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

HIDDEN = 80
INNER = 48
EXPERTS = 5
SLOTS = 3


def made(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, chosen experts (distinct in a row, the last expert never chosen), gate_up and down."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=random)
    chosen = torch.rand(rows, EXPERTS - 1, generator=random).argsort(1)[:, :SLOTS]
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=random) / INNER**0.5
    return x, chosen.contiguous(), gate_up, down


@pytest.mark.parametrize("rows", [1, 2, 30, 682, 683, 900, 2001])
@pytest.mark.parametrize("tile", [1, 16, 128])
def test_layout_is_a_stable_sort(rows: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one launch below 2048 pairs here, by two from there on."""
    monkeypatch.setattr(kernels, "ONE_LAUNCH", 2048 * 128)
    chosen = made(rows)[1]
    layout = kernels.lay_out(chosen, EXPERTS, tile)
    order = chosen.view(-1).argsort(stable=True)
    assert torch.equal(layout.pair_P[layout.pair_P >= 0], order.int())
    assert torch.equal(layout.pair_P[layout.place_RK.view(-1).long()], torch.arange(rows * SLOTS).int())
    assert not torch.equal(layout.pair_P[layout.pair_P >= 0], order.flip(0).int())
    counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
    tiles = (counts + tile - 1) // tile
    assert torch.equal(layout.first_X1, torch.cat([tiles.new_zeros(1), tiles.cumsum(0)]).int() * tile)
    owners = torch.arange(EXPERTS).repeat_interleave(tiles)
    assert torch.equal(layout.expert_B[: len(owners)], owners.int())
    assert bool((layout.expert_B[len(owners) :] == -1).all())


def test_tile_bound_holds_for_every_spread() -> None:
    for experts, pairs, tile in ((4, 7, 2), (3, 9, 4), (5, 4, 16)):
        worst = max(sum(-(-n // tile) for n in (a, b, pairs - a - b)) for a in range(pairs + 1) for b in range(pairs + 1 - a))
        assert worst <= kernels._tiles(pairs, experts, tile)


@pytest.mark.parametrize("rows", [1, 2, 7, 40, 170])
def test_forward_is_the_reference(rows: int) -> None:
    operands = made(rows)
    got = kernels.experts_triton(*operands)
    wanted = reference.experts(*operands)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if rows > 1:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(got.roll(1, 0), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 40])
def test_a_limit_cuts_as_the_reference_does(rows: int) -> None:
    operands = made(rows)
    wanted = reference.experts(*operands, 0.5)
    torch.testing.assert_close(kernels.experts_triton(*operands, 0.5), wanted, rtol=1e-5, atol=1e-5)
    grad = torch.randn(rows, SLOTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    mine = kernels.experts_backward(grad, *operands, 0.5)
    for got, exact in zip(mine, reference.experts_backward(grad, *operands, 0.5), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
    for got, exact in zip(
        (kernels.experts_triton(*operands), kernels.experts_backward(grad, *operands)[0]), (wanted, mine[0]), strict=True
    ):
        assert not torch.allclose(got, exact, rtol=1e-3, atol=1e-3)  # control: without it


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("rows", [7, 45])
def test_rows_around_the_grouped_products(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered, through swiglu and back again: nobody reads the positions without a pair, which hold what memory held."""

    def product(a: Tensor, weight: Tensor, out: Tensor, ends_X: Tensor, use_psum_layout: bool) -> None:
        assert use_psum_layout and ends_X.dtype == torch.int32 and len(ends_X) == len(weight)
        for expert, (start, end) in enumerate(pairwise([0, *ends_X.tolist()])):
            out[start:end] = a[start:end] @ weight[expert].T

    library = SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: 16, m_grouped_bf16_gemm_nt_contiguous=product)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    x, chosen, gate_up, down = made(rows)
    wanted = reference.experts(x, chosen, gate_up, down)
    torch.testing.assert_close(kernels.through_deepgemm(x, chosen, gate_up, down), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):  # control: the same slots in another order
        torch.testing.assert_close(kernels.through_deepgemm(x, chosen.roll(1, 1), gate_up, down), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "share"), [(1, 1), (80, 3), (2500, 1)])
def test_copied_rows(width: int, share: int) -> None:
    x = torch.randn(9, width)
    source = torch.tensor([26, -1, 0, 8, -1, 3, 3, 17, 25, 1, -1]).int() // (1 if share == 3 else 3)
    live = source >= 0
    got = kernels._copy_rows(x, source, share, x.new_zeros(len(source), width))
    wanted = x[source[live].long() // share]
    assert torch.equal(got[live], wanted)
    assert not got[~live].any() and bool((got[live] != 0).all())
    moved = kernels._copy_rows(x, source.roll(1), share, x.new_zeros(len(source), width))  # the control: sources a row further
    assert not torch.equal(moved[live], wanted) and bool(moved[~live].any())


def test_no_rows() -> None:
    x, chosen, gate_up, down = made(1)
    assert kernels.experts_triton(x[:0], chosen[:0], gate_up, down).shape == (0, SLOTS, HIDDEN)
    grads = kernels.experts_backward(x.new_zeros(0, SLOTS, HIDDEN), x[:0], chosen[:0], gate_up, down)
    assert [tuple(g.shape) for g in grads] == [(0, HIDDEN), tuple(gate_up.shape), tuple(down.shape)]


def test_row_law() -> None:
    x, chosen, gate_up, down = made(5)
    whole = kernels.experts_triton(x, chosen, gate_up, down)
    for rows in ([0], [4], [3, 1], [4, 3, 2, 1, 0]):
        assert torch.equal(kernels.experts_triton(x[rows], chosen[rows], gate_up, down), whole[rows])
    other = x.clone()
    other[2] += 1
    changed = kernels.experts_triton(other, chosen, gate_up, down)
    assert [torch.equal(changed[r], whole[r]) for r in range(5)] == [True, True, False, True, True]


# NumPy, about padding rows, which hold what the memory held before: they are computed with the others and read by nobody
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("rows", [1, 6, 50])
def test_backward_is_the_reference(rows: int) -> None:
    operands = made(rows)
    grad = torch.randn(rows, SLOTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    got = kernels.experts_backward(grad, *operands)
    for mine, wanted in zip(got, reference.experts_backward(grad, *operands), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    assert not got[1][-1].any() and not got[2][-1].any()
    swapped = kernels.experts_backward(grad.flip(1), *operands)
    assert not torch.allclose(swapped[2], got[2], rtol=1e-4, atol=1e-4)
    again = kernels.experts_backward(grad, *operands)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
