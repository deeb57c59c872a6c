"""Kernels of mixed streams, compressed rows, their selection and attention, routes and the last columns' rotation in Triton's
interpreter, against the CPU references.

In FP32, since the interpreter's products of bf16 tiles are wrong. Bytes are equal where no exp is taken and the products are exact;
integers are equal everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from zoo.common.history import CompressedRows, OpenWindows, WholeWindows, WindowedRows  # noqa: E402
from zoo.common.ops import FP4_INDEX, FP8_ROWS, Grid, Sinkhorn, rope_table  # noqa: E402
from zoo.common.ops.code_round import kernels as code_kernels  # noqa: E402
from zoo.common.ops.code_round import reference as code_reference  # noqa: E402
from zoo.common.ops.compress import kernels as compress_kernels  # noqa: E402
from zoo.common.ops.compress import reference as compress_reference  # noqa: E402
from zoo.common.ops.compress.windows import Window  # noqa: E402
from zoo.common.ops.compressed_attention import kernels as attention_kernels  # noqa: E402
from zoo.common.ops.compressed_attention import reference as attention_reference  # noqa: E402
from zoo.common.ops.compressed_attention.cases import lists  # noqa: E402
from zoo.common.ops.compressed_select import kernels as select_kernels  # noqa: E402
from zoo.common.ops.compressed_select import reference as select_reference  # noqa: E402
from zoo.common.ops.hadamard import kernels as hadamard_kernels  # noqa: E402
from zoo.common.ops.hadamard import reference as hadamard_reference  # noqa: E402
from zoo.common.ops.hash_route import kernels as hash_kernels  # noqa: E402
from zoo.common.ops.hash_route import reference as hash_reference  # noqa: E402
from zoo.common.ops.hyper_head import kernels as head_kernels  # noqa: E402
from zoo.common.ops.hyper_head import reference as head_reference  # noqa: E402
from zoo.common.ops.hyper_post import kernels as post_kernels  # noqa: E402
from zoo.common.ops.hyper_post import reference as post_reference  # noqa: E402
from zoo.common.ops.hyper_pre import kernels as pre_kernels  # noqa: E402
from zoo.common.ops.hyper_pre import reference as pre_reference  # noqa: E402
from zoo.common.ops.softplus_route import kernels as route_kernels  # noqa: E402
from zoo.common.ops.softplus_route import reference as route_reference  # noqa: E402
from zoo.common.ops.tail_rope import kernels as rope_kernels  # noqa: E402
from zoo.common.ops.tail_rope import reference as rope_reference  # noqa: E402
from zoo.common.rows import Rows  # noqa: E402

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
LENGTHS = [21, 2, 7]
PAGE = 12


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quarters(seed: int, *shape: int) -> Tensor:
    """Small multiples of a quarter: products and sums of them are exact in FP32, and many are equal."""
    return (floats(seed, *shape) * 2).round() / 4


def packed() -> Rows:
    return Rows.packed(torch.tensor([0, *LENGTHS]).cumsum(0))


def paged(row_RE: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The packed documents' rows in shuffled pages of PAGE tokens full of NaN, and the table."""
    needed = [-(-length // PAGE) for length in LENGTHS]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    pages = torch.full((sum(needed) + 2, PAGE // tokens, row_RE.shape[1]), torch.nan)
    table = torch.zeros(len(LENGTHS), max(needed), dtype=torch.int32)
    start = 0
    for n, (length, count) in enumerate(zip(LENGTHS, needed, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[n, :count] = torch.tensor(mine)
        kept = row_RE[start : start + length][tokens - 1 :: tokens]
        for i, row in enumerate(kept):
            pages[mine[i * tokens // PAGE], i % (PAGE // tokens)] = row
        start += length
    return pages, table


@pytest.mark.parametrize(("rows", "streams", "width", "rounds"), [(1, 4, 5, 1), (7, 3, 16, 4), (5, 2, 33, 20)])
def test_streams(rows: int, streams: int, width: int, rounds: int) -> None:
    x = floats(1, rows, streams, width)
    mixed = (2 + streams) * streams
    fn = floats(2, mixed, streams * width) * 0.2
    base = floats(3, mixed)
    scale = floats(4, 3)
    how = Sinkhorn(1e-6, 1e-6, rounds)
    found = pre_kernels.hyper_pre(x, fn, base, scale, how)
    wanted = pre_reference.hyper_pre(x, fn, base, scale, how)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-18, atol=2**-20)
    other = pre_kernels.hyper_pre(x, fn, base, scale * 1.1, how)
    assert not torch.allclose(other[1], wanted[1], rtol=2**-10)
    head = (fn[:streams], base[:streams], scale[:1], 1e-6, 1e-6)
    torch.testing.assert_close(head_kernels.hyper_head(x, *head), head_reference.hyper_head(x, *head), rtol=2**-18, atol=2**-20)
    branch = quarters(5, rows, width)
    post = quarters(6, rows, streams)
    comb = quarters(7, rows, streams, streams)
    x = quarters(8, rows, streams, width)
    wanted_streams = post_reference.hyper_post(branch, x, post, comb)
    assert torch.equal(post_kernels.hyper_post(branch, x, post, comb), wanted_streams)
    assert not torch.equal(post_kernels.hyper_post(branch, x, post, comb.transpose(1, 2)), wanted_streams)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("heads", "width", "rope_dim"), [(1, 8, 8), (3, 24, 8), (70, 40, 2)])
def test_tail_rope(inverse: bool, heads: int, width: int, rope_dim: int) -> None:
    x = floats(9, 6, heads, width + 3)[..., :width]
    table = rope_table(50, rope_dim, 1e4)
    positions = torch.tensor([0, 7, 49, 3, 3, 20])
    wanted = rope_reference.tail_rope(x, table, positions, inverse)
    assert torch.equal(rope_kernels.tail_rope(x, table, positions, inverse), wanted)
    assert not torch.equal(rope_kernels.tail_rope(x, table, positions, not inverse), wanted)


def test_routes() -> None:
    logits = quarters(10, 40, 16) * 4
    bias = floats(11, 16) * 0.1
    for given in (bias, bias * 0):  # without biases many scores are equal
        weights, experts = route_kernels.softplus_route(logits, given, 5, 1.5)
        wanted, chosen = route_reference.softplus_route(logits, given, 5, 1.5)
        assert torch.equal(experts, chosen)
        torch.testing.assert_close(weights, wanted, rtol=2**-20, atol=0)
    assert not torch.equal(route_kernels.softplus_route(logits, bias + torch.arange(16) % 2, 5, 1.5)[1], chosen)
    table = torch.rand(9, 16, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :3].contiguous()
    ids = torch.arange(40) % 9
    weights, experts = hash_kernels.hash_route(logits, ids, table, 2.5)
    wanted, chosen = hash_reference.hash_route(logits, ids, table, 2.5)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, wanted, rtol=2**-20, atol=0)
    assert not torch.equal(hash_kernels.hash_route(logits, (ids + 1) % 9, table, 2.5)[1], chosen)


@pytest.mark.parametrize("window", [Window(4, True), Window(3, False), Window(16, False)], ids=str)
def test_compress(window: Window) -> None:
    width = 5
    columns = width * (2 if window.overlaps else 1)
    rows_RC = floats(12, sum(LENGTHS), 2 * columns)
    ape = floats(13, window.tokens, columns)
    whole = WholeWindows("open")
    wanted = compress_reference.compress(rows_RC, ape, whole, packed(), window, torch.float32)
    found = compress_kernels.compress(rows_RC, ape, whole, packed(), window, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=2**-18, atol=2**-20)
    assert wanted.any() and not torch.allclose(
        compress_kernels.compress(rows_RC, ape + 1e-3 * floats(1, *ape.shape), whole, packed(), window, torch.float32), wanted, rtol=2**-16
    )
    pools = [torch.full((5, window.held, 2 * columns), torch.nan) for _ in range(2)]
    slots = torch.tensor([3, 1, 4])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    done = [0, 0, 0]
    for counts in ([5, 1, 3], [10, 1, 1], [6, 0, 3]):
        live = [n for n, count in enumerate(counts) if count]
        rows = Rows.pushed([counts[n] for n in live], [done[n] for n in live], "cpu")
        where = torch.cat([torch.arange(starts[n] + done[n], starts[n] + done[n] + counts[n]) for n in live])
        for pool, module in zip(pools, (compress_kernels, compress_reference), strict=True):
            history = OpenWindows(pool, slots[live], "open")
            out = module.compress(rows_RC[where], ape, history, rows, window, torch.float32)
            torch.testing.assert_close(out, wanted[where], rtol=2**-18, atol=2**-20)
            module.advance(rows_RC[where], history, rows, window)
        done = [a + b for a, b in zip(done, counts, strict=True)]
        assert torch.equal(pools[0].nan_to_num(7.0), pools[1].nan_to_num(7.0))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of the NaN and infinity below
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize(("heads", "width", "tokens", "top_k"), [(1, 8, 4, 2), (5, 13, 3, 4), (32, 16, 2, 5), (3, 8, 4, 64)])
def test_compressed_select(monkeypatch: pytest.MonkeyPatch, pages: bool, heads: int, width: int, tokens: int, top_k: int) -> None:
    monkeypatch.setattr(select_kernels, "HELD", 400)  # so that rows are scored a few at a time
    q = quarters(14, 30, heads, width)
    weights = quarters(15, 30, heads)
    key = quarters(16, 30, width)
    weights[18] = torch.nan
    rows = packed()
    keys = CompressedRows(key, tokens)
    wanted = select_reference.compressed_select(q, weights, keys, rows, top_k)
    mine = packed()
    given = CompressedRows(*(lambda pages, table: (pages, tokens, table))(*paged(key, tokens))) if pages else keys
    assert torch.equal(select_kernels.compressed_select(q, weights, given, mine, top_k), wanted)
    for flagged in (rows, mine):
        if top_k < 64:
            with pytest.raises(ValueError, match="score is NaN"):
                flagged.check_flags()
        else:
            flagged.check_flags()
    if top_k < 64:
        assert not torch.equal(select_kernels.compressed_select(-q, weights, given, mine, top_k), wanted)


@pytest.mark.parametrize(
    ("heads", "width", "window", "tokens", "top_k", "pages"),
    [(1, 8, 4, 4, 2, True), (3, 24, 12, 0, 0, True), (18, 20, 9, 1, 0, False), (2, 16, 5, 3, 6, False)],
)
def test_compressed_attention(
    monkeypatch: pytest.MonkeyPatch, heads: int, width: int, window: int, tokens: int, top_k: int, pages: bool
) -> None:
    for module in (attention_kernels, attention_reference):  # so that lists have several tiles
        monkeypatch.setattr(module, "LANES", 16)
    q = floats(17, 30, heads, width)
    token_rows = floats(18, 30, width)
    pooled = floats(19, 30, width)
    chosen = lists(LENGTHS, tokens, top_k, 3) if top_k else None
    sinks = floats(20, heads)
    history = WindowedRows(token_rows, pooled if tokens else None, tokens, "compressed")
    operands: tuple[Any, ...] = (chosen, sinks, packed(), window, width**-0.5)
    wanted, wanted_lse = attention_reference.compressed_attention(q, history, *operands)
    if pages:
        held, table = paged(token_rows, 1)
        history = replace(history, window=held, compressed=paged(pooled, tokens)[0] if tokens else None, page_table_NB=table)
    out, lse = attention_kernels.compressed_attention(q, history, *operands)
    torch.testing.assert_close(out, wanted, rtol=2**-14, atol=2**-18)
    torch.testing.assert_close(lse, wanted_lse, rtol=2**-14, atol=2**-18)
    moved = attention_kernels.compressed_attention(q, history, chosen, sinks + 1, *operands[2:])[0]
    assert not torch.allclose(moved, wanted, rtol=2**-8)


@pytest.mark.parametrize("grid", [FP8_ROWS, FP4_INDEX])
@pytest.mark.parametrize(("width", "columns"), [(3, 2), (72, 72), (700, 613)])
def test_code_round(grid: Grid, width: int, columns: int) -> None:
    """Halves between codes, zeros of both signs, numbers below the floor, and groups with what is no number."""
    x = (floats(12, 9, width + 3) * 2.0 ** floats(13, 9, width + 3).mul(9).round())[:, :width]
    x[1] = quarters(14, width)
    x[2] = -0.0
    x[3] *= 1e-38
    x[4, 0] = torch.nan
    x[5, -1] = -torch.inf
    wanted = code_reference.code_round(x, columns, grid)
    found = code_kernels.code_round(x, columns, grid)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(1.0).view(torch.int32), wanted.nan_to_num(1.0).view(torch.int32))
    assert wanted[4, 0].isnan() and wanted[5, -1].isnan() == (columns == width)
    assert not torch.equal(code_kernels.code_round(x[:2] * 1.5, columns, grid), wanted[:2])


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard(width: int) -> None:
    x = floats(15, 37, width + 3)[:, :width]
    wanted = hadamard_reference.hadamard(x)
    assert torch.equal(hadamard_kernels.hadamard(x), wanted)
    assert width == 1 or not torch.equal(hadamard_kernels.hadamard(x.flip(1)), wanted)
