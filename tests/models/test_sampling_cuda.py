"""The sampling program on a GPU: laws, the cut against its definition, the noise, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from cut_harness import KINDS, cut_by_sort, filters_of, rows_of_kind  # noqa: E402

from zoo.common import ops  # noqa: E402
from zoo.common.ops.sample import kernels, kernels_draw, launches, reference, sample, score_filtered, support  # noqa: E402  # noqa: E402
from zoo.common.program import resolve  # noqa: E402
from zoo.common.rollouts import SamplingParams  # noqa: E402
from zoo.common.row_sampling import RowSampling  # noqa: E402
from zoo.testing import LawBroken, assert_same_bytes  # noqa: E402

pytestmark = pytest.mark.gpu

PROGRAM = resolve("aligned", "cuda", torch.bfloat16)
VOCABULARY = 151936
MIXED = (
    SamplingParams(seed=1),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6, top_p=0.95, top_k=20, seed=2),
    SamplingParams(top_k=300, seed=3),
    SamplingParams(top_p=0.5, seed=4),
    SamplingParams(temperature=1.7, min_p=0.05, seed=5),
    SamplingParams(temperature=3.0, seed=2**64 - 1),
)


def made(rows: int, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, RowSampling]:
    x = torch.randn(rows, vocabulary, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)) * 4
    return x, RowSampling.of([MIXED[r % 7] for r in range(rows)], [5 * r for r in range(rows)], "cuda")


@triton.jit
def _noise(out, seed_R, position_R, N: tl.constexpr):
    lane = tl.arange(0, N)
    w0, w1, w2, w3 = kernels_draw.philox_words(tl.load(seed_R), tl.load(position_R), lane.to(tl.uint32))
    tl.store(out + lane, kernels_draw.gumbel(w0))
    tl.store(out + N + lane, kernels_draw.gumbel(w1))
    tl.store(out + 2 * N + lane, kernels_draw.gumbel(w2))
    tl.store(out + 3 * N + lane, kernels_draw.gumbel(w3))


def test_noise_against_the_reference() -> None:
    """Both logarithms keep their relative accuracy where u is next to 1: the largest noise is what decides a draw."""
    seed = torch.tensor([-7], device="cuda")
    position = torch.tensor([2**40 + 5], device="cuda")
    out = torch.empty(4096, device="cuda")
    _noise[(1,)](out, seed, position, N=reference.LANES)
    torch.testing.assert_close(out.cpu(), reference.gumbel(seed.cpu(), position.cpu(), 4096)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out.cpu(), reference.gumbel(seed.cpu(), position.cpu() + 1, 4096)[0], rtol=1e-5, atol=1e-5)


def test_support_against_a_sort() -> None:
    """top_k exactly; top_p and min_p up to the rounding of a float64 mass (1e-5)."""
    x, rows = made(14)
    scaled = x * rows.inverse_temperature_R[:, None]
    lse = ops.log_prob_of_logits(scaled, torch.zeros(14, dtype=torch.int64, device="cuda"), program=PROGRAM).lse_R
    kept = support(scaled, lse, rows, PROGRAM)
    wide = scaled.double().softmax(1)
    for r in range(14):
        params = MIXED[r % 7]
        count = int(kept[r].sum())
        order = scaled[r].argsort(descending=True, stable=True)
        assert kept[r, order[:count]].all()
        mass = float(wide[r, order[: count - 1]].sum())
        least = float(wide[r, order[count - 1]] / wide[r].max())
        if not params.filters:
            assert count == VOCABULARY
            continue
        assert mass <= params.top_p + 1e-5 and least >= params.min_p - 1e-6 and (params.top_k <= 0 or count <= params.top_k)
        more = mass + float(wide[r, order[count - 1]])
        ratio = float(wide[r, order[count]] / wide[r].max())
        assert count == params.top_k or more > params.top_p - 1e-5 or ratio < params.min_p + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_cut_is_its_definition(kind: str) -> None:
    """Byte for byte, of the device's own probabilities; whatever a program's share of a row is."""
    x = rows_of_kind(kind, 20, VOCABULARY, "cuda")
    row = filters_of(20, "cuda")
    lse = x.logsumexp(1)
    wanted = list(cut_by_sort(x, lse, *row))
    for chunks in (None, 2, 32):
        assert_same_bytes(list(kernels.cut(x, lse, *row, chunks=chunks)), wanted, f"{chunks} chunks")
    for index in ([2], [19, 4, 4]):
        pick = torch.tensor(index, device="cuda")
        alone = kernels.cut(x[pick], lse[pick], *(t[pick] for t in row))
        assert_same_bytes(list(alone), [t[pick] for t in wanted], "row law")
    with pytest.raises(LawBroken):  # control: one token less by top_k
        assert_same_bytes(list(kernels.cut(x, lse, row[0] - 1, *row[1:])), wanted, "control")


def test_more_rows_than_a_grid_takes() -> None:
    """Every way of cutting them into launches gives the same bytes, and so does a row alone."""
    most = launches.GRID_ROWS
    rows = 2 * most + 3
    columns = 37
    x = rows_of_kind("rounded", rows, columns, "cuda")
    row = filters_of(rows, "cuda")
    lse = x.logsumexp(1)
    index = torch.arange(rows, device="cuda")

    def results(pick: torch.Tensor) -> list[torch.Tensor]:
        cut = kernels.cut(x[pick], lse[pick], *(t[pick] for t in row))
        return [*cut, kernels.restrict(x[pick], *cut, 0, -1e30), kernels.draw(x[pick], pick, 3 * pick, pick % 7 == 0)]

    whole = results(index)
    parts = [results(part) for part in index.split(50000)]
    assert_same_bytes([torch.cat(part) for part in zip(*parts, strict=True)], whole, "launches")
    ends = index[[0, most - 1, most, most + 1, rows - 1]]
    assert_same_bytes(results(ends), [t[ends] for t in whole], "row law")
    with pytest.raises(LawBroken):  # control: the rows behind them
        assert_same_bytes(results(ends[1:]), [t[ends[:-1]] for t in whole], "control")


def test_bounds_batches_and_ties() -> None:
    x, rows = made(64)
    whole = sample(x, rows, PROGRAM)
    for index in ([0], [1], [2], [63, 5, 4, 17]):
        pick = torch.tensor(index, device="cuda")
        assert_same_bytes(list(sample(x[pick], rows[pick], PROGRAM)), [t[pick] for t in whole], "row law")
    plain = RowSampling.of([SamplingParams(seed=r) for r in range(64)], range(64), "cuda")
    cheap = sample(x, plain, PROGRAM)
    assert_same_bytes(list(sample(x, replace(plain, scales=True, filters=True), PROGRAM)), list(cheap), "bounds")
    native = ops.log_prob_of_logits(x, cheap.token_R, program=PROGRAM).log_prob_R
    assert_same_bytes([cheap.log_prob_R, cheap.filtered_log_prob_R], [native, native], "identity rows")
    with pytest.raises(LawBroken):
        assert_same_bytes(whole.filtered_log_prob_R, whole.log_prob_R, "control: filters change the score")
    x[1] = 0.0
    assert int(sample(x, rows, PROGRAM).token_R[1]) == 0


def test_graph_replay() -> None:
    x, rows = made(8)
    buffer = RowSampling.buffer(8, "cuda")
    static = torch.zeros_like(x)
    sample(static, buffer, PROGRAM)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(static, buffer, PROGRAM)
    for shift in (0, 1):
        moved = rows[torch.arange(8, device="cuda").roll(shift)]
        buffer.copy_(moved)
        static.copy_(x)
        graph.replay()
        assert_same_bytes(list(out), list(sample(x, moved, PROGRAM)), "graph replay")


def test_replay_and_its_gradient() -> None:
    random = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(140, 1024, device="cuda", generator=random).bfloat16()
    weight = (torch.randn(20000, 1024, device="cuda", generator=random) / 8).bfloat16()
    rows = made(140, 1)[1]
    token, _, reported = sample(ops.logits(hidden, weight, program=PROGRAM), rows, PROGRAM)
    h = hidden.requires_grad_()
    w = weight.requires_grad_()
    scored = score_filtered(h, w, token, rows, PROGRAM).log_prob_R
    assert_same_bytes(scored.detach(), reported, "replay")
    found = torch.autograd.grad(scored.sum(), (h, w))
    x = ops.logits(hidden.detach(), weight.detach(), program=PROGRAM) * rows.inverse_temperature_R[:, None]
    kept = support(x, ops.log_prob_of_logits(x, token, program=PROGRAM).lse_R, rows, PROGRAM)
    h64 = hidden.detach().double().requires_grad_()
    w64 = weight.detach().double().requires_grad_()
    wide = (h64 @ w64.T) * rows.inverse_temperature_R.double()[:, None]
    exact = wide.gather(1, token[:, None])[:, 0] - wide.masked_fill(~kept, -torch.inf).logsumexp(1)
    for mine, true in zip(found, torch.autograd.grad(exact.sum(), (h64, w64)), strict=True):
        assert float((mine.double() - true).norm() / true.norm()) < 0.02
