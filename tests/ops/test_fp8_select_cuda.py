"""fp8_select on a GPU beside the laws: bytes of queries, scores of both scorers, exact choices, launches, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zoo.common.history import CodedRows
from zoo.common.ops.fp8_quantise.reference import fp8_quantise
from zoo.common.ops.fp8_select import kernels, reference
from zoo.common.rows import Rows

pytestmark = pytest.mark.gpu

TOP_K = 2048
WIDTH = 128
Select = Callable[[Tensor, Tensor, CodedRows, Rows, int], Tensor]


def needs_deepgemm() -> None:
    pytest.importorskip("deep_gemm")


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def coded(key_RE: Tensor, least: float = 1e-10) -> CodedRows:
    codes, scales = fp8_quantise(key_RE.cpu(), least, False)
    return CodedRows(codes.cuda(), scales.cuda())


def operands(rows: int, heads: int, exact: bool = False, width: int = WIDTH) -> tuple[Tensor, Tensor, CodedRows]:
    """`exact`: of few bits, so that every sum is exact and many scores are equal."""
    parts = (floats(0, rows, heads, width), floats(1, rows, heads), floats(2, rows, width))
    if exact:
        parts = tuple(part.round() for part in parts)  # type: ignore[assignment]
    return parts[0], parts[1], coded(parts[2], 448.0 if exact else 1e-10)


def packed(*lengths: int) -> Rows:
    return Rows.packed(torch.tensor([0, *lengths], device="cuda").cumsum(0))


def paged(keys: CodedRows, page: int = 64, joined: bool = True) -> tuple[CodedRows, Tensor]:
    """One sequence's rows in every second page, backwards, of a memory whose other bytes are NaN; and its table."""
    width = keys.codes.shape[1]
    blocks = -(-len(keys.codes) // page)
    total = 2 * blocks + 1
    if joined:
        block = torch.full((total, page * (width + 4)), 255, dtype=torch.uint8, device="cuda")
        codes = block[:, : page * width].view(torch.float8_e4m3fn).unflatten(1, (page, width))
        scales = block[:, page * width :].view(torch.float32).unflatten(1, (page, 1))
    else:
        codes = torch.full((total, page, width), 255, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        scales = torch.full((total, page, 1), torch.nan, device="cuda")
    owned = [total - 1 - 2 * b for b in range(blocks)]
    for b, one in enumerate(owned):
        some = slice(b * page, min((b + 1) * page, len(keys.codes)))
        codes.view(torch.uint8)[one] = 0
        scales[one] = 0
        codes[one, : some.stop - some.start] = keys.codes[some]
        scales[one, : some.stop - some.start] = keys.scales[some]
    table = torch.tensor([owned], dtype=torch.int32, device="cuda")
    return CodedRows(codes, scales, table), table


def decoding(positions: list[int], capacity: int) -> Rows:
    """A step of one row a sequence, as a graph of so many tokens holds it."""
    at = torch.tensor(positions, device="cuda")
    starts = torch.arange(len(positions) + 1, dtype=torch.int32, device="cuda")
    return Rows(at, starts[:-1].long(), starts, (at + 1).int(), max_rows=1, max_length=capacity)


def wide(pages: CodedRows, rows: int, more: int = 30) -> CodedRows:
    assert pages.page_table_NB is not None
    table = pages.page_table_NB.expand(rows, -1)
    return CodedRows(pages.codes, pages.scales, torch.cat([table, table.new_zeros(rows, more)], 1).contiguous())


def test_queries_are_the_references() -> None:
    q, gates, _ = operands(300, 32)
    q = q * torch.exp2(floats(3, 300, 1, 1).float() * 8).bfloat16()
    q[5, 3, 0] = torch.nan
    q[6, 2, 1] = torch.inf
    found = kernels.fold_queries(q, gates)
    wanted = reference.queries(q.cpu(), gates.cpu())
    assert torch.equal(found[0].cpu().float().nan_to_num(1e9), wanted[0].float().nan_to_num(1e9))
    assert torch.equal(found[1].cpu().nan_to_num(1e9), wanted[1].nan_to_num(1e9))
    assert found[1].isnan().nonzero().tolist() == [[5, 3], [6, 2]]
    assert not torch.equal(kernels.fold_queries(q, gates)[1].cpu().nan_to_num(0), reference.queries(q.cpu(), -gates.cpu())[1].nan_to_num(0))


@pytest.mark.parametrize(
    ("select", "heads"), [("select_deepgemm", 32), ("select_deepgemm", 64), ("select_triton", 16), ("select_triton", 5)]
)
@pytest.mark.parametrize(("lengths", "top_k"), [((130, 1, 66), 16), ((300,), 128), ((2100,), TOP_K)])
def test_it_is_the_reference_where_scores_are_exact(select: str, heads: int, lengths: tuple[int, ...], top_k: int) -> None:
    if select == "select_deepgemm":
        needs_deepgemm()
    q, gates, keys = operands(sum(lengths), heads, exact=True)
    # weights of few bits: what is folded into them has a factor that is not
    run: Select = vars(kernels)[select]
    found = run(q, gates, keys, packed(*lengths), top_k)
    here = CodedRows(keys.codes.cpu(), keys.scales.cpu())
    at = Rows.packed(torch.tensor([0, *lengths]).cumsum(0))
    some = at.positions_R >= top_k
    wanted = reference.select(q.cpu(), gates.cpu(), here, at, top_k)
    assert torch.equal(found.cpu()[~some], wanted[~some])
    # sums of rounded weights are not exact: sets may differ where scores are as near as that
    differing = (found.cpu()[some] != wanted[some]).any(1).float().mean()
    assert differing < 0.2
    other = run(-q, gates, keys, packed(*lengths), top_k)
    assert (other.cpu()[some] != wanted[some]).any(1).float().mean() > 0.2


@pytest.mark.parametrize(
    ("scores", "heads"), [("deepgemm_scores", 32), ("deepgemm_scores", 64), ("triton_scores", 32), ("triton_scores", 5)]
)
def test_scores_against_the_reference(scores: str, heads: int) -> None:
    """To the byte where all sums are exact, near it elsewhere."""
    if scores == "deepgemm_scores":
        needs_deepgemm()
    rows = packed(700)
    seen = torch.ones(700, 700, dtype=torch.bool).tril()
    for exact in (True, False):
        q, gates, keys = operands(700, heads, exact)
        codes, folded = kernels.fold_queries(q, gates)
        folded = gates.float() if exact else folded
        found = torch.cat([block for _, block in vars(kernels)[scores](codes, folded, keys, rows)]).cpu()[seen]
        wanted = reference.index_scores(codes.cpu(), folded.cpu(), keys.codes.cpu(), keys.scales.cpu()[:, 0])[seen]
        if exact:
            assert torch.equal(found + 0.0, wanted)
        error = float((found - wanted).norm() / wanted.norm())
        assert error < 2.0**-10, error
        turned = reference.index_scores(codes.cpu(), folded.cpu().flip(1), keys.codes.cpu(), keys.scales.cpu()[:, 0])[seen]
        assert float((turned - wanted).norm() / wanted.norm()) > 0.1


@pytest.mark.parametrize("columns", [2100, 4096, 9000, 40000])
def test_a_choice_is_a_stable_sort(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ordinary scores, of few values and of one; rows in registers and rows read again."""
    positions = [0, 100, 2046, 2047, 2048, 2049, columns // 2, columns - 1]
    draw = floats(4, len(positions), columns).float()
    rows = decoding(positions, columns)
    at = rows.positions_R
    for scores in (draw, (draw * 2).round(), draw * 0, draw * torch.exp2(floats(5, len(positions), columns).float() * 20)):
        masked = scores.masked_fill(torch.arange(columns, device="cuda") > at[:, None], -torch.inf)
        order = torch.sort(masked + 0.0, dim=1, descending=True, stable=True).indices[:, :TOP_K]
        order = torch.where(order > at[:, None], columns, order).sort(dim=1).values
        wanted = torch.where(order == columns, -1, order).int()
        for few in (0, 1000):
            monkeypatch.setattr(kernels, "FEW_ROWS", few)
            found = torch.empty(len(positions), TOP_K, dtype=torch.int32, device="cuda")
            kernels.choose(scores.clone(), 0, found, rows)
            assert torch.equal(found, wanted)
    kernels.choose(-draw, 0, found, rows)
    assert not torch.equal(found, wanted)
    rows.check_flags()
    draw[7, 5] = torch.nan
    kernels.choose(draw, 0, found, rows)
    with pytest.raises(ValueError, match="score is NaN"):
        rows.check_flags()


@pytest.mark.parametrize("heads", [32, 64, 5])
def test_launches_and_places_move_nothing(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows in one block and in several, pages joined and apart and of other sizes, decode steps and chunks."""
    if heads != 5:
        needs_deepgemm()
    run: Select = kernels.select_triton if heads == 5 else kernels.select_deepgemm
    q, gates, keys = operands(2300, heads)
    whole = run(q, gates, keys, packed(2300), TOP_K)
    assert not torch.equal(run(q.flip(1), gates, keys, packed(2300), TOP_K), whole)
    monkeypatch.setattr(kernels, "HELD", 1 << 20)
    assert torch.equal(run(q, gates, keys, packed(2300), TOP_K), whole)
    monkeypatch.undo()
    some = [0, 1, 63, 64, 2046, 2047, 2048, 2049, 2111, 2299]
    at = torch.tensor(some, device="cuda")
    for page, joined in ((64, True), (64, False), (16, True), (80, False)):
        pages, table = paged(keys, page, joined)
        for capacity in (2300, 2304, 4096):
            assert torch.equal(run(q[at], gates[at], wide(pages, len(some)), decoding(some, capacity), TOP_K), whole[at])
        for first, last in ((2000, 2300), (2299, 2300), (0, 2300)):
            rows = Rows.pushed([last - first], [first], "cuda")
            chunk = CodedRows(pages.codes, pages.scales, table)
            assert torch.equal(run(q[first:last], gates[first:last], chunk, rows, TOP_K), whole[first:last])
    two = torch.cat([q[:2100], q])
    both = CodedRows(torch.cat([keys.codes[:2100], keys.codes]), torch.cat([keys.scales[:2100], keys.scales]))
    found = run(two, torch.cat([gates[:2100], gates]), both, packed(2100, 2300), TOP_K)
    assert torch.equal(found, torch.cat([whole[:2100], whole]))


def test_a_nan_is_flagged() -> None:
    needs_deepgemm()
    for spoilt in ("query", "weight", "key"):
        q, gates, keys = operands(2100, 32)
        if spoilt == "query":
            q[2099, 3, 1] = torch.nan
        elif spoilt == "weight":
            gates[2099, 3] = torch.inf
            gates[2099, 4] = -torch.inf
        else:
            key = floats(2, 2100, WIDTH)
            key[7, 0] = torch.inf
            keys = coded(key)
        rows = packed(2100)
        kernels.select_deepgemm(q, gates, keys, rows, TOP_K)
        with pytest.raises(ValueError, match="fp8_select: an earlier token's score is NaN"):
            rows.check_flags()
    rows = packed(2100)
    kernels.select_deepgemm(*operands(2100, 32), rows, TOP_K)
    rows.check_flags()


def test_a_captured_step_is_an_eager_one() -> None:
    needs_deepgemm()
    q, gates, keys = operands(2600, 32)
    pages, _ = paged(keys)
    static = decoding([2300, 2400, 0], 4096)
    given = wide(pages, 3)
    at = torch.tensor([2300, 2400, 0], device="cuda")
    inputs = (q[at].clone(), gates[at].clone())

    def step() -> Tensor:
        static.launch.clear()  # as rows that a graph makes anew
        return kernels.select_deepgemm(*inputs, given, static, TOP_K)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for positions in ([2301, 2401, 0], [2599, 100, 0], [2048, 2047, 2599]):
        at = torch.tensor(positions, device="cuda")
        inputs[0].copy_(q[at])
        inputs[1].copy_(gates[at])
        static.positions_R.copy_(at)
        graph.replay()
        wanted = kernels.select_deepgemm(q[at], gates[at], given, decoding(positions, 4096), TOP_K)
        assert torch.equal(out, wanted)
    static.positions_R.copy_(at - 1)
    graph.replay()
    assert not torch.equal(out, wanted)
