"""Kernels of fp8_select in Triton's interpreter, against the CPU reference.

Codes are handed over as FP32 numbers, since the interpreter multiplies no FP8. Products are exact and so are most sums, so scores are
compared to the byte; choices always are.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from zoo.common.history import CodedRows  # noqa: E402
from zoo.common.memory import PagePart, TablePager  # noqa: E402
from zoo.common.memory.kernels import write_pages  # noqa: E402
from zoo.common.ops.fp8_quantise.reference import fp8_quantise  # noqa: E402
from zoo.common.ops.fp8_select import kernels, reference  # noqa: E402
from zoo.common.ops.select.reference import best  # noqa: E402
from zoo.common.rows import Rows  # noqa: E402

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
LENGTHS = [21, 2, 7]
KINDS = ["normal", "few values", "one value", "odd ones", "tiny and huge"]
CHOICES = [*((1 << 15, kind, top_k) for kind in KINDS for top_k in (1, 7, 64)), *((64, kind, 7) for kind in KINDS)]


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(*lengths: int) -> Rows:
    return Rows.packed(torch.tensor([0, *lengths]).cumsum(0))


def operands(heads: int, width: int) -> tuple[Tensor, Tensor, CodedRows]:
    """Queries and weights of few bits, keys of few values: sums are exact, and many are equal."""
    rows = sum(LENGTHS)
    q = floats(1, rows, heads, width).round()
    codes, _ = fp8_quantise(floats(2, rows, width).round(), 448.0, False)
    scales = torch.exp2(floats(3, rows, 1).round())
    return q, floats(4, rows, heads).round(), CodedRows(codes, scales)


def paged(keys: CodedRows, page: int, joined: bool) -> CodedRows:
    """The documents in shuffled pages full of NaN, codes and scales apart or one block a page."""
    width = keys.codes.shape[1]
    total = 16
    if joined:
        block = torch.full((total, page * (width + 4)), 255, dtype=torch.uint8)
        codes = block[:, : page * width].view(torch.float8_e4m3fn).unflatten(1, (page, width))
        scales = block[:, page * width :].view(torch.float32).unflatten(1, (page, 1))
    else:
        codes = torch.full((total, page, width), torch.nan).to(torch.float8_e4m3fn)
        scales = torch.full((total, page, 1), torch.nan)
    free = [7, 3, 9, 1, 13, 10, 4, 11, 2, 8, 12, 5, 6]
    blocks = -(-max(LENGTHS) // page)
    table = torch.zeros(len(LENGTHS), blocks, dtype=torch.int32)
    start = 0
    for n, length in enumerate(LENGTHS):
        for b in range(-(-length // page)):
            table[n, b] = free.pop()
            some = slice(start + b * page, min(start + (b + 1) * page, start + length))
            codes[int(table[n, b]), : some.stop - some.start] = keys.codes[some]
            scales[int(table[n, b]), : some.stop - some.start] = keys.scales[some]
        start += length
    return CodedRows(codes, scales, table)


def as_numbers(keys: CodedRows) -> CodedRows:
    return CodedRows(keys.codes.float(), keys.scales, keys.page_table_NB)


@pytest.mark.parametrize(("heads", "width"), [(1, 8), (5, 13), (32, 128)])
def test_queries(heads: int, width: int) -> None:
    q = floats(5, 9, heads, width + 3).round()[..., 3:]  # the interpreter rounds 127 to the code of 64
    gates = floats(6, 9, heads + 2)[:, :heads]
    q[3, 0, 1] = torch.inf
    found = kernels.fold_queries(q, gates)
    wanted = reference.queries(q, gates)
    others = torch.arange(9) != 3  # nor has it a code of NaN; a GPU's tests look at both
    assert torch.equal(found[0].view(torch.uint8)[others], wanted[0].view(torch.uint8)[others])
    assert torch.equal(found[1].view(torch.int32), wanted[1].view(torch.int32)) and bool(found[1][3, 0].isnan())
    assert not torch.equal(kernels.fold_queries(q, -gates)[1].nan_to_num(0), wanted[1].nan_to_num(0))


@pytest.mark.parametrize(("page", "heads", "width"), [(None, 1, 8), (16, 5, 13), (5, 5, 13), (None, 32, 40)])
def test_scores(page: int | None, heads: int, width: int) -> None:
    q, gates, keys = operands(heads, width)
    folded = gates  # of few bits, so that sums are exact
    codes = reference.queries(q, gates)[0]
    rows = packed(*LENGTHS)
    given = keys if page is None else paged(keys, page, joined=page == 16)
    found = torch.cat([block for _, block in kernels.triton_scores(codes.float(), folded, as_numbers(given), rows)])
    start = 0
    for n, length in enumerate(LENGTHS):
        mine = slice(start, start + length)
        wanted = reference.index_scores(codes[mine], folded[mine], *keys.of(n, mine.start, mine.stop, length))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        assert torch.equal(found[mine, :length][seen] + 0.0, wanted[seen])
        start += length
    assert not torch.equal(found[:21, :21][seen_of(21)], wanted_of(codes, folded.flip(1), keys) + 0.0) or heads == 1


def seen_of(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def wanted_of(codes: Tensor, folded: Tensor, keys: CodedRows) -> Tensor:
    return reference.index_scores(codes[:21], folded[:21], *keys.of(0, 0, 21, 21))[seen_of(21)]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("kept", "kind", "top_k"), CHOICES)
def test_choice(kept: int, kind: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any scores, held in registers or read again for each probe; rows that see fewer, as many and more."""
    monkeypatch.setattr(kernels, "KEPT", kept)
    monkeypatch.setattr(kernels, "CHOICE_TILE", 4096 if top_k == 7 and kept > 64 else 64)
    monkeypatch.setattr(kernels, "FEW_ROWS", 3)
    positions = [0, 6, 7, 63, 64, 100, 129, 130]
    scores = floats(7, len(positions), 131)
    if kind == "few values":
        scores = scores.round()
    if kind == "one value":
        scores = scores * 0
    if kind == "odd ones":
        scores[:, ::7] = torch.inf
        scores[:, 1::5] = -torch.inf
        scores[4, 2] = torch.nan
        scores[7, 50:80] = torch.nan
    if kind == "tiny and huge":
        scores = scores * torch.exp2(floats(8, *scores.shape) * 30)
    at = torch.tensor(positions)
    ones = torch.arange(len(positions) + 1, dtype=torch.int32)
    rows = Rows(at, ones[:-1].long(), ones, (at + 1).int(), 1, 131)
    wanted = torch.full((len(positions), top_k), -1, dtype=torch.int32)
    for i, position in enumerate(positions):
        count = position + 1
        wanted[i, : min(count, top_k)] = torch.arange(count) if count <= top_k else best(scores[i, :count], top_k)
    spoilt = torch.where(torch.arange(131) > at[:, None], torch.nan, scores)  # what a row does not see may be anything
    found = torch.empty_like(wanted)
    kernels.choose(spoilt, 0, found, rows)
    assert torch.equal(found, wanted)
    if kind == "odd ones":
        with pytest.raises(ValueError, match="score is NaN"):
            rows.check_flags()
    else:
        rows.check_flags()
    if kind == "normal":
        kernels.choose(-spoilt, 0, found, rows)
        assert not torch.equal(found, wanted)


@pytest.mark.parametrize("page", [None, 16])
def test_select(page: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole op by Triton, blocks of rows among it."""
    monkeypatch.setattr(kernels, "HELD", 300)
    monkeypatch.setattr(kernels, "ROW_TILE", 8)
    q, gates, keys = operands(5, 13)
    rows = packed(*LENGTHS)
    wanted = reference.select(q, gates, keys, rows, 6)
    fold = kernels.fold_queries

    def numbers(q: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        codes, folded = fold(q, gates)
        return codes.float(), folded

    monkeypatch.setattr(kernels, "fold_queries", numbers)
    given = keys if page is None else paged(keys, page, joined=True)
    assert torch.equal(kernels.select_triton(q, gates, as_numbers(given), rows, 6), wanted)
    assert not torch.equal(kernels.select_triton(-q, gates, as_numbers(given), rows, 6), wanted)
    assert torch.equal(kernels.select_triton(q, gates, as_numbers(given), rows, 64), reference.select(q, gates, keys, rows, 64))


def test_packed_keys_and_joined_pages() -> None:
    keys = operands(1, 16)[2]
    rows = packed(*LENGTHS)
    for joined in (False, True):
        given = paged(keys, 16, joined)
        codes, scales = kernels.packed_keys(given, rows)
        start = 0
        for n, length in enumerate(LENGTHS):
            mine = slice(n * 21, n * 21 + length)
            assert torch.equal(codes[mine].float(), keys.codes[start : start + length].float())
            assert torch.equal(scales[mine], keys.scales[start : start + length, 0])
            start += length
        assert kernels.joined_pages(given) is None  # DeepGEMM's pages hold 64 tokens
    given = paged(keys, 64, True)
    whole = kernels.joined_pages(given)
    assert whole is not None and whole.shape == (16, 64, 1, 20) and whole.data_ptr() == given.codes.data_ptr()
    page = int(given.page_table_NB[0, 0])  # type: ignore[index]
    as_deepgemm_reads = whole.as_strided((16, 64 * 20), (whole.stride(0), 1))[page]
    assert torch.equal(as_deepgemm_reads[64 * 16 :].view(torch.float32)[:21], keys.scales[:21, 0])
    assert kernels.joined_pages(paged(keys, 64, False)) is None


@pytest.mark.parametrize("page", [64, 5])
def test_codes_and_scales_are_written_into_joined_pages(page: int) -> None:
    """What the kernel writes is what the CPU writes; the other bytes of a page stay."""
    keys = operands(1, 16)[2]
    rows = packed(*LENGTHS)
    kept = {"codes": (torch.float8_e4m3fn, (16,)), "scales": (torch.float32, (1,))}
    table = torch.tensor([[7, 3, 9, 1, 4], [5, 0, 0, 0, 0], [2, 8, 0, 0, 0]], dtype=torch.int32)
    pools = []
    for write in (write_pages, lambda new, pages, table, rows, tokens: TablePager(table).write(new, pages, rows, tokens)):
        part = PagePart("index", 2, 10, page, kept, "cpu", joined=True)
        write((keys.codes, keys.scales), part.layer(1), table, rows, 1)
        pools.append(part)
    for name in kept:
        found, wanted = (pool.tensors[name].contiguous().view(torch.uint8) for pool in pools)
        assert torch.equal(found, wanted) and bool(wanted[1].any()) and not bool(wanted[0].any())
    assert torch.equal(pools[0].written([5], 2)["scales"][1], keys.scales[21:23])


class DeepGEMM(ModuleType):
    """Its two scorers by our reference, from what they read of their arguments; what a row does not see is NaN."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.called: list[str] = []

    def get_num_sms(self) -> int:
        return 2

    def get_paged_mqa_logits_metadata(self, lengths: Tensor, page: int, processors: int) -> Tensor:
        assert lengths.dtype == torch.int32 and lengths.shape[1] == 1 and page == 64
        return lengths.new_zeros(processors + 1, 2)

    def fp8_mqa_logits(
        self, q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, begin: Tensor, end: Tensor, clean: bool, columns: int
    ) -> Tensor:
        self.called.append("packed")
        assert q.is_contiguous() and kv[0].is_contiguous() and kv[1].is_contiguous() and begin.dtype == end.dtype == torch.int32
        out = torch.full((len(q), columns), torch.nan)
        for r, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
            mine = (kv[0][first:last], kv[1][first:last])
            out[r, : last - first] = reference.index_scores(q[r : r + 1], weights[r : r + 1], *mine)[0]
        return out

    def fp8_paged_mqa_logits(
        self, q: Tensor, pages: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, plan: Tensor, columns: int
    ) -> Tensor:
        self.called.append("paged")
        width = pages.shape[3] - 4
        whole = pages.as_strided((len(pages), 64 * (width + 4)), (pages.stride(0), 1))
        codes = whole[:, : 64 * width].view(torch.float8_e4m3fn).unflatten(1, (64, width))
        scales = whole[:, 64 * width :].view(torch.float32)
        out = torch.full((len(q), columns), torch.nan)
        for r, length in enumerate(lengths[:, 0].tolist()):
            mine = table[r, : -(-length // 64)].long()
            keys = (codes[mine].flatten(0, 1)[:length], scales[mine].flatten()[:length])
            out[r, :length] = reference.index_scores(q[r], weights[r : r + 1], *keys)[0]
        return out


def test_deepgemm_is_handed_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows in blocks, chunks behind pages, decode steps from joined pages of 64 and from others; the plan once for all layers."""
    fake = DeepGEMM()
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    monkeypatch.setattr(kernels, "HELD", 200)
    fold = reference.queries
    monkeypatch.setattr(kernels, "fold_queries", fold)  # by torch: the interpreter rounds some codes wrong
    q, gates, keys = operands(32, 32)
    rows = packed(*LENGTHS)
    wanted = reference.select(q, gates, keys, rows, 6)
    assert torch.equal(kernels.select_deepgemm(q, gates, keys, rows, 6), wanted)
    assert set(fake.called) == {"packed"} and len(fake.called) > 1
    assert not torch.equal(kernels.select_deepgemm(-q, gates, keys, rows, 6), wanted)
    last = torch.tensor([20, 22, 29])  # the last row of each document
    for page, joined, kind in ((64, True, "paged"), (64, False, "packed"), (16, True, "packed")):
        given = paged(keys, page, joined)
        fake.called.clear()
        assert torch.equal(kernels.select_deepgemm(q, gates, given, rows, 6), wanted)
        assert set(fake.called) == {"packed"}
        fake.called.clear()
        step = Rows.pushed([1] * 3, [length - 1 for length in LENGTHS], "cpu")
        for _ in range(2):
            assert torch.equal(kernels.select_deepgemm(q[last], gates[last], given, step, 6), wanted[last])
        assert set(fake.called) == {kind}
        assert sum(isinstance(key, tuple) and key[-1] == "plan" for key in step.launch) == (kind == "paged")
