"""The sample kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from zoo.common.ops.sample import kernels, reference  # noqa: E402
from zoo.common.sampling import MASS_ONE, NO_CUT  # noqa: E402

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
        x[:, ::7], x[:, 1::7], x[:, 2::7], x[:, 3::7] = -0.0, 0.0, -torch.inf, -300.0
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


@pytest.mark.parametrize("vocabulary", [1, 257, 1025, 4097, 9000])
def test_draw_is_the_reference(vocabulary: int) -> None:
    x = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 0.3
    seeds, positions = torch.tensor([0, 1, -1, -(2**63), 5, 6]), torch.tensor([0, 1, 2**32 - 1, 2**32, 2**40 + 3, 7])
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
