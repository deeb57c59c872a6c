"""The sample kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")

from cut_harness import KINDS, cut_by_sort, filters_of, ranked, rows_of_kind  # noqa: E402

from zoo.common.ops.sample import kernels, launches, reference  # noqa: E402
from zoo.common.row_sampling import MASS_ONE, NO_CUT  # noqa: E402
from zoo.testing import LawBroken, assert_same_bytes  # noqa: E402

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

# (top_k, mass limit, min_p) per row
FILTERS = [
    (NO_CUT, NO_CUT, 0.0),
    (1, NO_CUT, 0.0),
    (5, NO_CUT, 0.0),
    (NO_CUT, MASS_ONE // 2, 0.0),
    (NO_CUT, 1, 0.0),
    (NO_CUT, NO_CUT, 0.3),
    (20, MASS_ONE * 9 // 10, 0.01),
    (3, MASS_ONE * 99 // 100, 1.0),
]


def made(vocabulary: int, kind: str) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    x = torch.randn(len(FILTERS), vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    if kind == "ties":
        x = x.round()
    if kind == "special":
        x[:, ::7] = -0.0
        x[:, 1::7] = 0.0
        x[:, 2::7] = -torch.inf
        x[:, 3::7] = -300.0
    columns = zip(*FILTERS, strict=True)
    row = tuple(torch.tensor(c, dtype=t) for c, t in zip(columns, (torch.int64, torch.int64, torch.float32), strict=True))
    return x, x.logsumexp(1), row


@pytest.mark.parametrize("vocabulary", [1, 257, 4097])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_cut_is_the_reference(vocabulary: int, kind: str) -> None:
    x, lse, row = made(vocabulary, kind)
    found = kernels.restrict(x, *kernels.cut(x, lse, *row), 0, -torch.inf)
    wanted = reference.restrict(x, *reference.cut(x, lse, *row), 0, -torch.inf)
    assert torch.equal(found, wanted)
    assert torch.equal(found[0], x[0])
    if vocabulary > 1:
        assert not torch.equal(found, x)  # control: the filters do take tokens away


def test_restrict_knows_its_first_column() -> None:
    x, lse, row = made(9000, "ties")
    cut = kernels.cut(x, lse, *row)
    whole = kernels.restrict(x, *cut, 0, -1e30)
    parts = [kernels.restrict(x[:, c : c + 2500], *cut, c, -1e30) for c in range(0, 9000, 2500)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert not torch.equal(torch.cat([kernels.restrict(x[:, c : c + 2500], *cut, 0, -1e30) for c in range(0, 9000, 2500)], 1), whole)


@triton.jit
def one_more_fits(count, mass, top_k, limit):
    """A broken `_fits`: one token too many stays."""
    few = tl.where((top_k < 1) | (limit < 0), 1, top_k)
    return (count <= few) & (mass <= tl.maximum(limit, 0))


@triton.jit
def room_for_one_more(count, mass, tied, top_k, limit):
    """A broken `_room`, which is what decides among equals."""
    room = tl.where(tied > 0, (limit - mass) // tl.maximum(tied, 1) + 1, kernels._NO_CUT)
    return tl.maximum(tl.minimum(room, top_k - count), 1) + 1


@triton.jit
def fits_as_given(count, mass, top_k, limit):
    """A broken `_fits`: not even the first token has to stay."""
    return (count < top_k) & (mass <= limit)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_of_many_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a list holds: every way in which a row's cut is found."""
    x = rows_of_kind(kind, 10, 5001)
    row = filters_of(10)
    lse = x.logsumexp(1)
    wanted = cut_by_sort(x, lse, *row)

    def check(rows: slice) -> None:
        found = kernels.cut(x[rows], lse[rows], *(t[rows] for t in row), chunks=(2, 4)[KINDS.index(kind) % 2])
        assert_same_bytes(list(found), [t[rows].clone() for t in wanted], kind)

    check(slice(0, 10))
    monkeypatch.setattr(kernels, "_fits", one_more_fits)
    monkeypatch.setattr(kernels, "_room", room_for_one_more)
    with pytest.raises(LawBroken):  # the control, at a top_k that no other filter undercuts
        check(slice(3, 4))


def edges() -> Tensor:
    """Logits at and beside the first thresholds below a log-sum-exp of 2, the ends of a row's range, equals, and nothing."""
    steps = 2 - kernels.FIRST_STEP * torch.arange(1.0, kernels.FIRST_THRESHOLDS)
    beside = torch.cat([steps[::3], steps[::3].nextafter(torch.full((), 99.0)), steps[1::3].nextafter(torch.full((), -99.0)), steps])
    return torch.cat([torch.tensor([-torch.inf, -0.5, torch.nan, -1e-40, -3e38, -0.5, -0.0, 0.0]), beside.flip(0)])


def test_cut_at_every_place_and_limit() -> None:
    """Numbers of tokens by top_k; then limits of the mass before a token, exactly, and of min_p that is a token's own."""
    x = edges()[None]
    count = x.shape[1]
    lse = torch.full((1,), 2.0)
    logit, order, p, mass = (t[0] for t in ranked(x, lse))
    place = torch.arange(1, count - 5, 3)
    before = (mass.cumsum(0) - mass)[place]

    def cut(top_k: Tensor, limit: Tensor, min_p: Tensor) -> list[Tensor]:
        rows = max(len(t) for t in (top_k, limit, min_p))
        row = (lse, top_k, limit, min_p)
        return list(kernels.cut(x.expand(rows, -1).contiguous(), *(t.expand(rows).contiguous() for t in row)))

    all_k = torch.tensor([NO_CUT])
    all_mass = torch.tensor([NO_CUT])
    none = torch.zeros(1)
    assert_same_bytes(cut(torch.arange(1, count, 2), all_mass, none), [logit[:-1:2], order[:-1:2]], "top_k")
    assert mass[place].all()
    at_limit, below = (cut(all_k, before - less, none) for less in (0, 1))
    assert_same_bytes(at_limit, [logit[place], order[place]], "limit")
    assert_same_bytes(below, [logit[place - 1], order[place - 1]], "below the limit")
    with pytest.raises(LawBroken):  # control: one unit of mass
        assert_same_bytes(at_limit, below, "control")
    for ratio in (p / p[0])[::5]:
        wanted = cut_by_sort(x, lse, all_k, all_mass, ratio[None])
        assert_same_bytes(cut(all_k, all_mass, ratio[None]), list(wanted), "min_p")


def test_cut_is_independent_of_its_programs() -> None:
    """Other shares of a row, and other rows beside it, move no byte; one logit's last bit does."""
    pick = torch.tensor([5, 6])
    x = rows_of_kind("flat", 2, 4998)
    row = tuple(t[pick] for t in filters_of(10))
    x[:, ::3] = x[:, 1::3]
    lse = x.logsumexp(1)
    whole = kernels.cut(x, lse, *row)
    for chunks in (1, 8):
        assert_same_bytes(list(kernels.cut(x, lse, *row, chunks=chunks)), list(whole), f"{chunks} chunks")
    alone = kernels.cut(x[1:], lse[1:], *(t[1:] for t in row))
    assert_same_bytes(list(alone), [t[1:] for t in whole], "row law")
    moved = x.clone()
    moved[0, whole[1][0]] = x[0, whole[1][0]].nextafter(torch.full((), -9.0))
    with pytest.raises(LawBroken):
        assert_same_bytes(list(kernels.cut(moved, lse, *row)), list(whole), "control")


def test_cut_of_filters_without_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least the first token stays, and a min_p above 1 keeps the first alone, as in the reference."""
    x = rows_of_kind("flat", 6, 257)
    top_k = [0, -5, 300, 300, 257, 5]
    limit = [NO_CUT, NO_CUT, 0, -1, MASS_ONE * 2, NO_CUT]
    row = (torch.tensor(top_k), torch.tensor(limit), torch.tensor([0.0] * 5 + [2.0]))
    wanted = reference.cut(x, x.logsumexp(1), *row)

    def check() -> None:
        found = kernels.cut(x, x.logsumexp(1), *row)
        assert_same_bytes([found[0], found[1][:5]], [wanted[0], wanted[1][:5]], "filters")
        assert x[5, found[1][5]] == x[5].amax()

    check()
    monkeypatch.setattr(kernels, "_fits", fits_as_given)
    with pytest.raises(LawBroken):  # the control
        check()


def test_operands_may_lie_in_memory_in_any_way() -> None:
    """Logits by columns or with gaps, and one parameter for all rows, as views without copies."""
    x = rows_of_kind("normal", 4, 300).contiguous()
    one = (torch.tensor([20]), torch.tensor([MASS_ONE // 2]), torch.tensor([0.01]))
    draw = (torch.tensor([7]), torch.tensor([40]), torch.tensor([False]))

    def results(logits: Tensor, columns: list[Tensor]) -> list[Tensor]:
        cut = kernels.cut(logits, logits.contiguous().logsumexp(1), *columns[:3])
        return [*cut, kernels.restrict(logits, *cut, 0, -1e30), kernels.draw(logits, *columns[3:])]

    plain = results(x, [t.repeat(4) for t in (*one, *draw)])
    spread = [t.expand(4) for t in (*one, *draw)]
    for logits in (x.T.contiguous().T, torch.stack([x, -x], 2)[..., 0], torch.cat([x, x], 1)[:, :300]):
        assert not logits.is_contiguous() and torch.equal(logits, x)
        assert_same_bytes(results(logits, spread), plain)
    with pytest.raises(LawBroken):  # control: the same memory in another order
        assert_same_bytes(results(x.view(300, 4).T, spread), plain)


def test_more_rows_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 3 of 8 rows, as CUDA's grids have sides of 65535 behind the first one."""
    x, lse, row = made(257, "ties")
    draw = (torch.arange(8), torch.arange(8) * 5, torch.arange(8) % 3 == 0)

    def results(logits: Tensor = x) -> list[Tensor]:
        cut = kernels.cut(logits, lse, *row, chunks=1)
        return [*cut, kernels.restrict(logits, *cut, 0, -torch.inf), kernels.draw(logits, *draw)]

    whole = results()
    monkeypatch.setattr(launches, "GRID_ROWS", 3)
    plain = interpreter.GridExecutor.__call__
    grids = []

    def seen(self: Any, *args: Any, **options: Any) -> Any:
        grids.append(max(self.grid[1:], default=1))
        return plain(self, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", seen)
    assert_same_bytes(results(), whole, "launches")
    assert max(grids) == 3
    with pytest.raises(LawBroken):  # the control: each row's logits in the next one's place
        assert_same_bytes(results(x.roll(1, 0)), whole, "control")


@pytest.mark.parametrize("vocabulary", [1, 257, 1025, 4097, 9000])
def test_draw_is_the_reference(vocabulary: int) -> None:
    x = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 0.3
    seeds = torch.tensor([0, 1, -1, -(2**63), 5, 6])
    positions = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**40 + 3, 7])
    greedy = torch.tensor([False, False, False, False, False, True])
    found = kernels.draw(x, seeds, positions, greedy)
    assert torch.equal(found, reference.draw(x, seeds, positions, greedy))
    if vocabulary > 1:
        assert not torch.equal(found, reference.draw(x, seeds, positions + 1, greedy))


def test_draw_of_ties_and_nothing() -> None:
    x = torch.full((3, 9000), -torch.inf)
    x[1, [8000, 4999, 4998]] = 1.0
    x[2, 5:] = torch.nan
    x[2, 3] = -5.0
    zero = torch.zeros(3, dtype=torch.int64)
    assert kernels.draw(x, zero, zero, torch.ones(3, dtype=torch.bool)).tolist() == [0, 4998, 3]
    assert kernels.draw(x, zero, zero, torch.zeros(3, dtype=torch.bool)).tolist()[::2] == [0, 3]
