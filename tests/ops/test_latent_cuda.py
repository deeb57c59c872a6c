"""GLM-5's ops on a GPU beside the laws: exact choices, launch shapes, large memory, CUDA graphs, accuracy and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.memories import latent_memory
from zoo.common import ops
from zoo.common.history import TokenRows
from zoo.common.memory import PagedLatents, TablePager
from zoo.common.ops.biased_route import Choice
from zoo.common.ops.biased_route import reference as route_reference
from zoo.common.ops.head_linear import kernels as head_kernels
from zoo.common.ops.layer_norm import reference as norm_reference
from zoo.common.ops.linear.kernels import linear_triton
from zoo.common.ops.select import kernels as select_kernels
from zoo.common.ops.select import reference as select_reference
from zoo.common.ops.sparse_attention import kernels as attention_kernels
from zoo.common.ops.sparse_attention.cases import lists
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import Args, assert_same_bytes, gradients

pytestmark = pytest.mark.gpu

HEADS = 64
WIDTH = 576
VALUES = 512
TOP_K = 2048
SCALE = 256**-0.5
INDEX_HEADS = 32
INDEX_WIDTH = 128


def program() -> Any:
    return resolve("aligned", "cuda", torch.bfloat16, 16)


def floats(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) * scale).to(dtype)


def quarters(seed: int, *shape: int) -> Tensor:
    """Small multiples of a quarter: products and sums of them are exact in FP32, and many are equal."""
    return ((floats(seed, *shape, dtype=torch.float32) * 2).round() / 4).to(torch.bfloat16)


def far(found: Tensor, wanted: Tensor) -> float:
    found = found.detach().double()
    wanted = wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def packed(*lengths: int) -> Rows:
    return Rows.packed(torch.tensor([0, *lengths], device="cuda").cumsum(0))


def paged(latent_RC: Tensor, index_RE: Tensor, pages: int, page: int = 64, spread: int = 1) -> tuple[PagedLatents, Tensor]:
    """One sequence's rows in every `spread`-th page of a memory of NaN, backwards; its layer and page table."""
    memory = latent_memory([True], pages, page, latent_RC.shape[1], index_RE.shape[1], latent_RC.dtype, "cuda")
    for pool in memory.tensors().values():
        pool.fill_(torch.nan)
    owned = [pages - 1 - spread * b for b in range(memory.pages_for(len(latent_RC)))]
    assert owned[-1] > 0
    memory.clear(owned)
    table = memory.table([owned], [], len(owned))
    [layer] = memory.view(table)
    rows = Rows.pushed([len(latent_RC)], [0], "cuda")
    layer.append(latent_RC, rows)
    layer.append_index(index_RE, rows)
    return layer, table


def index_operands(rows: int, exact: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = quarters if exact else floats
    q = draw(seed, rows, INDEX_HEADS, INDEX_WIDTH)
    weights = draw(seed + 1, rows, INDEX_HEADS)
    keys = draw(seed + 2, rows, INDEX_WIDTH)
    return q, weights, keys


@pytest.mark.parametrize(("lengths", "top_k"), [((130, 1, 66), 16), ((300,), 128), ((2100,), 2048)])
def test_select_is_the_reference_where_scores_are_exact(lengths: tuple[int, ...], top_k: int) -> None:
    """Integers, equal scores among them; also with NaN weights and infinite keys."""
    q, weights, keys = index_operands(sum(lengths), exact=True)
    weights[4] = torch.nan
    keys[3, 0] = torch.inf
    found = select_kernels.select(q, weights, keys, None, packed(*lengths), top_k)
    at = Rows.packed(torch.tensor([0, *lengths]).cumsum(0))
    some = slice(0, 130) if sum(lengths) < 2000 else slice(2040, 2100)
    wanted = select_reference.select(q.cpu(), weights.cpu(), keys.cpu(), None, at, top_k)
    assert torch.equal(found.cpu()[some], wanted[some])
    other = select_kernels.select(-q, weights, keys, None, packed(*lengths), top_k)
    assert not torch.equal(other.cpu()[some], wanted[some])


def test_select_orders_by_float64_scores() -> None:
    """On ordinary numbers: what is left out scores no more than what is taken, up to FP32's error; and nothing is taken twice."""
    q, weights, keys = index_operands(2600, exact=False)
    found = select_kernels.select(q, weights, keys, None, packed(2600), TOP_K)[2400:].long()
    dots = torch.einsum("rhe,te->rht", q[2400:].double(), keys.double()).relu()
    scores = torch.einsum("rh,rht->rt", weights[2400:].double(), dots)
    future = torch.arange(2600, device="cuda") > torch.arange(2400, 2600, device="cuda")[:, None]
    taken = torch.zeros_like(future).scatter_(1, found, True)
    assert bool((found.diff(dim=1) > 0).all()) and not bool((taken & future).any())
    least = scores.masked_fill(~taken, torch.inf).amin(1)
    most = scores.masked_fill(taken | future, -torch.inf).amax(1)
    spread = scores.abs().amax(1)
    assert bool((most - least < 1e-5 * spread).all())
    assert bool((most.flip(0) - least > 1e-5 * spread).any()), "the control: other rows' bounds"


def test_select_launches_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key tiles, rows held at a time, a wider table of a graph, pages and packed rows."""
    q, weights, keys = index_operands(2300, exact=False)
    whole = select_kernels.select(q, weights, keys, None, packed(2300), TOP_K)
    layer, table = paged(floats(9, 2300, 16), keys, 64)
    pages = layer.index_PSE
    rows = [0, 1, 63, 64, 2046, 2047, 2048, 2049, 2111, 2299]

    def decoded(capacity: int) -> Tensor:
        at = torch.tensor(rows, device="cuda")
        static = Rows(
            at,
            torch.arange(len(rows), device="cuda"),
            torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda"),
            (at + 1).int(),
            max_rows=1,
            max_length=capacity,
        )
        wide = torch.cat([table.expand(len(rows), -1), table.new_zeros(len(rows), 30)], 1).contiguous()
        assert pages is not None
        return select_kernels.select(q[at], weights[at], pages, wide, static, TOP_K)

    for capacity in (2300, 2304, 4096):
        assert torch.equal(decoded(capacity), whole[rows])
    for tile, held in ((32, 1 << 26), (128, 1 << 26), (64, 100_000), (64, 1)):
        monkeypatch.setattr(select_kernels, "KEY_TILE", tile)
        monkeypatch.setattr(select_kernels, "HELD", held)
        some = slice(2200, 2300) if held == 1 else slice(None)
        if held == 1:
            assert torch.equal(decoded(2304), whole[rows])
        else:
            assert torch.equal(select_kernels.select(q, weights, keys, None, packed(2300), TOP_K)[some], whole[some])


def attention_operands(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return floats(seed, rows, HEADS, WIDTH), floats(seed + 1, rows, WIDTH), lists([rows], TOP_K, seed).cuda()


def dense(q: Tensor, latent: Tensor, positions: Tensor, values: int = VALUES) -> Tensor:
    """In float64, [rows, heads, values]."""
    count = len(latent)
    mask = torch.zeros(len(q), count + 1, dtype=torch.bool, device=q.device)
    mask.scatter_(1, torch.where(positions < 0, count, positions).long(), True)
    scores = torch.einsum("rhc,tc->rht", q.double(), latent.double()) * SCALE
    return torch.einsum("rht,tv->rhv", scores.masked_fill(~mask[:, None, :count], -torch.inf).softmax(-1), latent[:, :values].double())


@pytest.mark.parametrize("rows", [1, 65, 300, 2200])
def test_attention_against_float64(rows: int) -> None:
    q, latent, positions = attention_operands(rows)
    found = attention_kernels.sparse_attention(q, latent, None, positions, packed(rows), VALUES, SCALE)[0]
    some = slice(max(0, rows - 200), rows)
    assert far(found[some], dense(q[some], latent, positions[some])) < 2**-7
    assert rows == 1 or far(found[some], dense(q[some], latent.roll(1, 0), positions[some])) > 0.1


def test_attention_launches_move_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a block, rows beside each other, pages of several sizes with NaN around."""
    q, latent, positions = attention_operands(2200)
    out, lse = attention_kernels.sparse_attention(q, latent, None, positions, packed(2200), VALUES, SCALE)
    rows = torch.tensor([0, 1, 62, 63, 64, 127, 128, 1000, 2047, 2048, 2199], device="cuda")

    def decoded(page: int) -> Tensor:
        layer, table = paged(latent, floats(3, 2200, 16), -(-2200 // page) * 2 + 1, page, spread=2)
        at = Rows.pushed([1] * len(rows), rows.tolist(), "cuda")
        wide = table.expand(len(rows), -1).contiguous()
        return attention_kernels.sparse_attention(q[rows], layer.latent_PSC, wide, positions[rows], at, VALUES, SCALE)[0]

    for page in (16, 64, 80, 128):
        assert_same_bytes(decoded(page), out[rows], f"pages of {page}")
    monkeypatch.setattr(attention_kernels, "BLOCK_HEADS", 32)
    assert_same_bytes(attention_kernels.sparse_attention(q, latent, None, positions, packed(2200), VALUES, SCALE), (out, lse))
    assert_same_bytes(decoded(64), out[rows], "32 heads a block, pages of 64")


@pytest.mark.parametrize("what", ["latent", "index"])
def test_memory_beyond_two_billion_elements(what: str) -> None:
    """A layer's rows in its last pages, behind 2^31 elements (4 GB), against a small memory; nothing is written elsewhere."""
    count = 2200
    width = WIDTH if what == "latent" else INDEX_WIDTH
    latent = floats(1, count, width)
    positions = lists([count], TOP_K, 0).cuda()
    rows = Rows.pushed([1, 1], [count - 1, 70], "cuda")
    q = floats(2, 2, HEADS, width)
    weights = floats(3, 2, HEADS)

    def run(pages: int) -> tuple[Tensor, Tensor]:
        pool = torch.zeros(pages, 64, width, dtype=torch.bfloat16, device="cuda")
        owned = list(range(pages - 1, pages - 36, -1))
        table = torch.tensor([owned], dtype=torch.int32, device="cuda")
        PagedLatents(pool, None, TablePager(table)).append(latent, Rows.pushed([count], [0], "cuda"))
        assert not bool(pool[1 : pages - 36].any())
        wide = table.expand(2, -1).contiguous()
        if what == "index":
            return pool[pages - 1], select_kernels.select(q, weights, pool, wide, rows, TOP_K)
        return pool[pages - 1], attention_kernels.sparse_attention(q, pool, wide, positions[rows.positions_R], rows, VALUES, SCALE)[0]

    wanted = run(60)
    found = run(2**31 // (64 * width) + 60)
    assert_same_bytes(found, wanted)


@pytest.mark.parametrize(("columns", "depth", "transposed"), [(512, 192, True), (256, 512, False), (70, 65, False), (33, 40, True)])
def test_head_linear_is_linear_head_by_head(columns: int, depth: int, transposed: bool) -> None:
    """At every row count that changes the tile, and for a subset of rows."""
    heads = 4
    x = floats(1, 700, 4, depth + 8)[..., 8:]
    weight = floats(2, heads, *((depth, columns) if transposed else (columns, depth)), scale=depth**-0.5)
    weight = weight.transpose(1, 2) if transposed else weight
    wanted = torch.stack([linear_triton(x[:, h].contiguous(), weight[h].contiguous(), x.dtype, 1) for h in range(heads)], 1)
    for rows in (1, 2, 16, 17, 64, 65, 512, 513, 700):
        assert_same_bytes(head_kernels.head_linear(x[:rows], weight), wanted[:rows], f"{rows} rows")
    some = torch.tensor([699, 3, 64, 3], device="cuda")
    assert_same_bytes(head_kernels.head_linear(x[some], weight), wanted[some])
    assert not torch.equal(head_kernels.head_linear(x[:16], weight.flip(0)), wanted[:16])


def test_head_linear_gradients() -> None:
    args = {"x": floats(1, 130, 8, 192), "w": floats(2, 8, 512, 192, scale=192**-0.5)}

    def call(a: Args) -> Tensor:
        return ops.head_linear(a["x"], a["w"].transpose(1, 2).contiguous().transpose(1, 2), program=program())

    def plain(a: Args) -> Tensor:
        return torch.einsum("rhk,hnk->rhn", a["x"].double(), a["w"].double()).to(torch.bfloat16)

    found, again, wanted = (gradients(f, args, ("x", "w"))[1] for f in (call, call, plain))
    assert_same_bytes(found, again)
    assert all(far(found[name], wanted[name]) < 2**-7 for name in found)
    assert far(gradients(call, args, ("x", "w"), seed=1)[1]["w"], wanted["w"]) > 0.1


@pytest.mark.parametrize("choice", [Choice(1), Choice(8, scale=2.5), Choice(6, 8, 4, scale=2.5), Choice(5, 4, 3, False, 1.5)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_biased_route_is_the_reference(choice: Choice, biased: bool) -> None:
    """Without biases many experts are equal; logits apart by more than two exponentials' errors, or the same."""
    logits = (floats(1, 500, 256, dtype=torch.float32) * 8).round() / 4
    bias = (floats(2, 256, dtype=torch.float32) * 8).round() / 16 if biased else torch.zeros(256, device="cuda")
    weights, experts = ops.biased_route(logits, bias, choice, program=program())
    wanted, chosen = route_reference.biased_route(logits.cpu(), bias.cpu(), choice)
    same = (experts.cpu() == chosen).all(1)
    assert same.float().mean() > (0.95 if biased else 0.99)  # a score and a bias may add up to nearly another's
    torch.testing.assert_close(weights.cpu()[same], wanted[same], rtol=1e-5, atol=0)
    for row in (0, 77, 499):
        assert_same_bytes(ops.biased_route(logits[row : row + 1], bias, choice, program=program())[0], weights[row : row + 1])
    assert not torch.equal(ops.biased_route(-logits, bias, choice, program=program())[1], experts)


def test_layer_norm_is_the_reference() -> None:
    x = floats(1, 4096, 160)[:, :128] * 3 + 1
    weight = floats(2, 128)
    bias = floats(3, 128)
    found = ops.layer_norm(x, weight, bias, 1e-6, program=program())
    wanted = norm_reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-6)
    assert far(found, wanted) < 2**-8 < far(found, wanted + 0.1)
    assert_same_bytes(ops.layer_norm(x[77:78], weight, bias, 1e-6, program=program()), found[77:78])


def test_graph_replay_equals_eager() -> None:
    """A layer's memory, choice and attention of three sequences and one of padding, captured once and replayed at other places."""
    lengths = [2050, 40, 2200]
    batch = 4
    blocks = 40
    q, latent, _ = attention_operands(2300)
    iq, weights, keys = index_operands(2300, exact=False)
    eager, graphed = (latent_memory([True], 1 + 3 * blocks, 64, WIDTH, INDEX_WIDTH, torch.bfloat16, "cuda") for _ in range(2))
    owned = [list(range(1 + n, 1 + 3 * blocks, 3)) for n in range(3)]
    table = torch.tensor([*owned, [0] * blocks], dtype=torch.int32, device="cuda")

    def step(layer: PagedLatents, rows: Rows, at: Tensor) -> tuple[Tensor, Tensor]:
        keys_of = layer.append_index(keys[at], rows)
        chosen = ops.select(iq[at], weights[at], keys_of, rows, TOP_K, program=program())
        return chosen, ops.sparse_attention(q[at], layer.append(latent[at], rows), chosen, rows, VALUES, SCALE, program=program())

    for memory in (eager, graphed):
        for pool in memory.tensors().values():
            pool[:, 1:] = torch.nan
        memory.clear([page for n, length in enumerate(lengths) for page in owned[n][: length // 64 + 1]])
        for n, length in enumerate(lengths):
            step(memory.view(table[n : n + 1])[0], Rows.pushed([length], [0], "cuda"), torch.arange(length, device="cuda"))
    positions = torch.tensor([*lengths, 0], device="cuda")
    static = Rows(
        positions.clone(),
        torch.arange(batch, device="cuda"),
        torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        torch.ones(batch, dtype=torch.int32, device="cuda"),
        max_rows=1,
        max_length=64 * blocks,
    )
    [layer] = graphed.view(table)
    run = lambda: step(layer, static, static.positions_R)  # noqa: E731
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for more in range(6):
        at = [length + more for length in lengths]
        static.positions_R.copy_(torch.tensor([*at, 0]))
        static.lengths_N.copy_(torch.tensor([*[p + 1 for p in at], 1]))
        graph.replay()
        now = Rows.pushed([1] * 3, at, "cuda")
        wanted = step(eager.view(table[:3])[0], now, now.positions_R)
        assert_same_bytes(tuple(t[:3] for t in out), wanted, f"step {more}")
        for n in range(3):
            assert_same_bytes(graphed.written(owned[n], at[n] + 1), eager.written(owned[n], at[n] + 1), f"memory, step {more}")
    static.positions_R.copy_(torch.tensor([at[0] - 1, *at[1:], 0]))
    graph.replay()
    assert not torch.equal(out[1][0], wanted[1][0]), "the control: a row at another place"


@pytest.mark.parametrize("lengths", [(1,), (65, 130, 2), (300,)])
def test_attention_gradients_against_float64(lengths: tuple[int, ...]) -> None:
    """Twice the same bytes; a latent row's gradient as key and as value."""
    heads = 8
    width = 576
    values = 512
    top_k = 100
    rows = sum(lengths)
    args = {"q": floats(1, rows, heads, width), "latent": floats(2, rows, width)}
    positions = lists(list(lengths), top_k, 5).cuda()
    at = packed(*lengths)

    def call(a: Args) -> Tensor:
        return ops.sparse_attention(a["q"], TokenRows(a["latent"]), positions, at, values, SCALE, program=program())

    def plain(a: Args) -> Tensor:
        parts = []
        begin = 0
        for length in lengths:
            some = slice(begin, begin + length)
            parts.append(dense(a["q"][some], a["latent"][some], positions[some], values))
            begin += length
        return torch.cat(parts).to(torch.bfloat16)

    found, again, wanted = (gradients(f, args, ("q", "latent"))[1] for f in (call, call, plain))
    assert_same_bytes(found, again)
    for name in found:
        if lengths == (1,) and name == "q":  # one token: nothing moves its share of 1
            assert found[name].abs().max() < 2**-6
            continue
        assert far(found[name], wanted[name]) < 2**-6, name
    other = gradients(call, args, ("q", "latent"), seed=1)[1]
    assert far(other["latent"], wanted["latent"]) > 0.1
