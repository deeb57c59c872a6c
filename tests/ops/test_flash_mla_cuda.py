"""sparse_attention by FlashMLA on a GPU: what its class rests on, and the gradient of lists at a published layer's sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.history import TokenRows
from zoo.common.ops.contract import CONTRACTS
from zoo.common.ops.sparse_attention.cases import lists
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import Args, as_integers, assert_same_bytes, gradients

PROVIDER = next(p for p in CONTRACTS["sparse_attention"].providers if p.name == "flash_mla")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and not PROVIDER.installed(), reason="needs FlashMLA (the extra flashmla)"),
]

HEADS = 64
WIDTH = 576
VALUES = 512
TOP_K = 2048
SCALE = 256**-0.5
ROWS = 2200


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def packed(*lengths: int) -> Rows:
    return Rows.packed(torch.tensor([0, *lengths], device="cuda").cumsum(0))


def recent(rows: int, listed: int) -> Tensor:
    """Each row's last `listed` tokens, ascending, -1 behind them."""
    first = (torch.arange(rows, device="cuda") - listed + 1).clamp(min=0)
    place = first[:, None] + torch.arange(listed, device="cuda")
    return torch.where(place <= torch.arange(rows, device="cuda")[:, None], place, -1).to(torch.int32)


def run(q: Tensor, latent: Tensor, positions: Tensor, rows: Rows, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return PROVIDER.functions.forward(q, latent, table, positions, rows, VALUES, SCALE)


@pytest.fixture(scope="module")
def whole() -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Queries, latent rows, lists and what a document of 2200 tokens gives."""
    q = floats(0, ROWS, HEADS, WIDTH)
    latent = floats(1, ROWS, WIDTH)
    positions = lists([ROWS], TOP_K, 0).cuda()
    return q, latent, positions, run(q, latent, positions, packed(ROWS))


def test_pages_and_row_counts_move_no_byte(whole: tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]) -> None:
    """Rows decoded from pages of several sizes among dead pages of NaN, in tables of several widths, 1 to 64 at a time."""
    q, latent, positions, (out, lse) = whole
    at = torch.tensor([0, 1, 63, 64, 127, 128, 129, 1000, 2047, 2048, 2199], device="cuda")
    for page in (16, 64, 80, 128):
        blocks = -(-ROWS // page)
        pool = torch.full((2 * blocks + 1, page, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
        owned = torch.arange(2 * blocks, 0, -2, device="cuda")
        pool[owned] = 0
        pool[owned[torch.arange(ROWS, device="cuda") // page], torch.arange(ROWS, device="cuda") % page] = latent
        for width in (blocks, blocks + 7):
            table = torch.zeros(1, width, dtype=torch.int32, device="cuda")
            table[0, :blocks] = owned
            for some in (at, at[:1], at[-1:], at.repeat(6)[:64]):
                rows = Rows.pushed([1] * len(some), some.tolist(), "cuda")
                wide = table.expand(len(some), -1).contiguous()
                assert_same_bytes(run(q[some], pool, positions[some], rows, wide), (out[some], lse[some]), f"pages of {page}")
    changed = positions[at].clone()
    changed[-1, int((changed[-1] >= 0).sum()) - 1] = -1
    rows = Rows.pushed([1] * len(at), at.tolist(), "cuda")
    other = run(q[at], pool, changed, rows, table.expand(len(at), -1).contiguous())[0]
    assert_same_bytes(other[:-1], out[at][:-1], "the other rows")
    assert not torch.equal(other[-1], out[at][-1]), "the control: one listed token less"


@pytest.mark.parametrize("heads", [1, 8, 32, 64, 65, 128, 200])
def test_heads_are_apart(heads: int) -> None:
    """Any number of them: padded, or in several launches."""
    q = floats(2, 140, heads, WIDTH)
    latent = floats(3, 140, WIDTH)
    positions = lists([140], 100, 4).cuda()
    out, lse = run(q, latent, positions, packed(140))
    assert out.shape == (140, heads, VALUES) and lse.shape == (140, heads)
    for first, last in ((0, 1), (heads // 2, heads)):
        assert_same_bytes(run(q[:, first:last], latent, positions, packed(140)), (out[:, first:last], lse[:, first:last]))
    assert not torch.equal(run(q.flip(1), latent, positions, packed(140))[0], out) or heads == 1


def test_against_float64_and_empty_lists(whole: tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]) -> None:
    q, latent, positions, (out, lse) = whole
    some = slice(2100, 2120)
    seen = torch.zeros(20, ROWS + 1, dtype=torch.bool, device="cuda")
    seen.scatter_(1, torch.where(positions[some] < 0, ROWS, positions[some]).long(), True)
    scores = torch.einsum("rhc,tc->rht", q[some].double(), latent.double()) * SCALE
    scores = scores.masked_fill(~seen[:, None, :ROWS], -torch.inf)
    exact = torch.einsum("rht,tv->rhv", scores.softmax(-1), latent[:, :VALUES].double())
    assert float((out[some].double() - exact).norm() / exact.norm()) < 2**-7
    natural = lse[some].double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
    assert float((natural - scores.logsumexp(-1)).abs().max()) < 1e-4
    empty = positions[:5].clone()
    empty[3] = -1
    found = run(q[:5], latent[:5], empty, packed(5))[0]
    assert not found[3].any() and bool(found.isfinite().all())
    assert run(q[:0], latent, positions[:0], packed(ROWS))[0].shape == (0, HEADS, VALUES)


@pytest.mark.parametrize(("lengths", "top_k"), [((65, 130, 2), 40), ((700,), 256)])
def test_gradients_of_a_published_layer(lengths: tuple[int, ...], top_k: int) -> None:
    """Against autograd in float64; twice the same bytes."""
    rows = sum(lengths)
    args = {"q": floats(1, rows, HEADS, WIDTH), "latent": floats(2, rows, WIDTH)}
    positions = lists(list(lengths), top_k, 5).cuda()
    at = packed(*lengths)
    program = resolve("aligned", "cuda", torch.bfloat16, 16)

    def call(a: Args) -> Tensor:
        return ops.sparse_attention(a["q"], TokenRows(a["latent"]), positions, at, VALUES, SCALE, program=program)

    def plain(a: Args) -> Tensor:
        parts = []
        for n, length in enumerate(lengths):
            some = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
            seen = torch.zeros(length, length + 1, dtype=torch.bool, device="cuda")
            seen.scatter_(1, torch.where(positions[some] < 0, length, positions[some]).long(), True)
            scores = torch.einsum("rhc,tc->rht", a["q"][some].double(), a["latent"][some].double()) * SCALE
            shares = scores.masked_fill(~seen[:, None, :length], -torch.inf).softmax(-1)
            parts.append(torch.einsum("rht,tv->rhv", shares, a["latent"][some, :VALUES].double()))
        return torch.cat(parts).to(torch.bfloat16)

    found, again, wanted = (gradients(f, args, ("q", "latent"))[1] for f in (call, call, plain))
    assert_same_bytes(found, again)
    for name in found:
        error = float((found[name].double() - wanted[name].double()).norm() / wanted[name].double().norm())
        assert error < 2**-6, f"{name}: {error}"
    other = gradients(call, args, ("q", "latent"), seed=1)[1]
    assert float((other["latent"].double() - wanted["latent"].double()).norm() / wanted["latent"].double().norm()) > 0.1


def backward_of(rows: int, heads: int = HEADS) -> tuple[float, int, Tensor]:
    """(milliseconds, peak scratch in bytes, d latent rows) of one document, beyond inputs, outputs and their gradients."""
    q = floats(1, rows, heads, WIDTH)
    latent = floats(2, rows, WIDTH)
    positions = recent(rows, TOP_K)
    at = packed(rows)
    out, lse = run(q, latent, positions, at)
    grad = floats(3, rows, heads, VALUES)
    backward = PROVIDER.functions.backward
    backward(grad, q, latent, positions, out, lse, at, SCALE)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    grads = backward(grad, q, latent, positions, out, lse, at, SCALE)
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held - sum(g.nbytes for g in grads)
    return begin.elapsed_time(end), peak, grads[1]


def test_the_backward_grows_with_the_lists_and_holds_little() -> None:
    """Beyond the length of a list, twice the tokens take at most 2.2 times as long; 32,768 of them hold less than 2 GiB."""
    torch.cuda.empty_cache()
    times = {rows: backward_of(rows)[0] for rows in (8192, 16384)}
    assert times[16384] < 2.2 * times[8192], times
    _, scratch, grad = backward_of(32768)
    assert scratch < 2 << 30, scratch
    assert_same_bytes(as_integers(backward_of(32768)[2]), as_integers(grad))
