"""attention's launches around FlashAttention 4, with a stand-in for it on the CPU and the merge in Triton's interpreter.

The stand-in takes FlashAttention 4's arguments and gives a row the same bytes wherever its keys lie, so the laws can be checked of
all that is around it; what it is handed shows which numbers a launch makes anew.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.common.ops.attention import kernels, reference
from zoo.common.rows import Rows

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

# 12 heads: three programs of the merge a row
HEADS = 12
GROUPS = 2
WIDTH = 16
PAGE = 4
SEGMENT = 8
SCALE = 0.25
LENGTHS = [17, 8, 1, 9, 26]
NUMBERS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")


class StandIn:
    """`_flash_attn_fwd` for packed or paged keys, one query row at a time; `calls` keeps what it was handed."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        num_splits: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        page_table: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k, "page_table": page_table}
        self.calls.append(given)
        assert num_splits == 1
        assert all(t is None or (t.dtype == torch.int32 and t.is_contiguous()) for t in given.values())
        out = torch.empty_like(q) if out is None else out
        batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        starts = list(range(batch + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
        assert starts[0] == 0 and starts[-1] == q.shape[0]
        q_RHE = q.flatten(0, -3)
        out_RHE = out.flatten(0, -3)
        assert out_RHE.data_ptr() == out.data_ptr()
        for n in range(batch):
            if page_table is None:
                assert cu_seqlens_k is not None
                first, last = cu_seqlens_k.tolist()[n : n + 2]
                keys = k[first:last]
                values = v[first:last]
            else:
                assert page_table.shape[0] == batch and seqused_k is not None
                keys, values = (t[page_table[n].long()].flatten(0, 1) for t in (k, v))
            used = len(keys) if seqused_k is None else int(seqused_k[n])
            assert used <= max_seqlen_k and starts[n + 1] - starts[n] <= (max_seqlen_q or 1)
            for row in range(starts[n], starts[n + 1]):
                seen = max(0, used - (starts[n + 1] - 1 - row)) if causal else used
                out_RHE[row], row_lse = attend(q_RHE[row], keys[:seen], values[:seen], softmax_scale)
                if lse is not None:
                    (lse[row, :, 0] if lse.dim() == 3 else lse[:, row]).copy_(row_lse)
        return out, lse


def attend(q_HE: Tensor, k_LGE: Tensor, v_LGE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One row; no key gives zeros and -inf. Its output of keys of -0 alone is -0, which no merge may turn into +0."""
    if len(k_LGE) == 0:
        return torch.zeros_like(q_HE), q_HE.new_full(q_HE.shape[:1], -torch.inf)
    k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k_LGE, v_LGE))
    scores = (q_HE * k).sum(-1) * scale
    top = scores.amax(0)
    weight = torch.exp(scores - top)
    out = weight[0, :, None] * v[0]
    mass = weight[0]
    for w, value in zip(weight[1:], v[1:], strict=True):
        out = out + w[:, None] * value
        mass = mass + w
    return out / mass[:, None], top + torch.log(mass)


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = stand_in  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setattr(kernels, "_primed", set())
    return stand_in


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def documents() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(sum(LENGTHS), heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    v[:3] = -0.0  # of the first document
    return q, k, v


def starts() -> list[int]:
    return [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]


class Pages:
    """The documents' keys and values in shuffled pages, NaN where nothing was written; page 0 is the reserved one."""

    def __init__(self, k: Tensor, v: Tensor, columns: int = 0) -> None:
        needed = [-(-length // PAGE) for length in LENGTHS]
        total = 1 + sum(needed)
        free = (torch.randperm(total - 1) + 1).tolist()
        self.k, self.v = (torch.zeros(total, PAGE, GROUPS, WIDTH) for _ in range(2))
        self.table = torch.zeros(len(LENGTHS), max(needed) + columns, dtype=torch.int32)
        for n, (start, length) in enumerate(zip(starts(), LENGTHS, strict=True)):
            pages = [free.pop() for _ in range(needed[n])]
            self.table[n, : needed[n]] = torch.tensor(pages)
            for pool, packed in ((self.k, k), (self.v, v)):
                pool.view(-1, GROUPS, WIDTH)[[p * PAGE + i for p in pages for i in range(PAGE)][:length]] = packed[start : start + length]


def packed_rows() -> Rows:
    return Rows.pushed(LENGTHS, None, "cpu")


def bounded(rows: Rows) -> Rows:
    """With the bound of a decode graph."""
    return replace(rows, max_length=max(LENGTHS))


def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor]:
    return kernels.attention_fa4(q, k, v, table, rows, SCALE, SEGMENT)


def test_packed_rows_are_near_the_reference(fa4: StandIn) -> None:
    q, k, v = documents()
    out, lse = attention(q, k, v, None, packed_rows())
    wanted, wanted_lse = reference.attention(q.double(), k.double(), v.double(), None, packed_rows(), SCALE, None)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.T.double(), wanted_lse, rtol=1e-5, atol=1e-6)
    assert len(fa4.calls) == 4  # distances 0 to 3
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out.double(), wanted.roll(1, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [0, 5])
def test_pages_and_decode_have_the_packed_bytes(fa4: StandIn, columns: int) -> None:
    q, k, v = documents()
    whole = attention(q, k, v, None, packed_rows())[0]
    pages = Pages(k, v, columns)
    assert same(attention(q, pages.k, pages.v, pages.table, packed_rows())[0], whole)
    # the last 1, 6, ... rows after what lies before them
    counts = [min(length, 6 if n % 2 else 13) for n, length in enumerate(LENGTHS)]
    contexts = [length - count for length, count in zip(LENGTHS, counts, strict=True)]
    index = [start + i for start, c, m in zip(starts(), contexts, counts, strict=True) for i in range(c, c + m)]
    assert same(attention(q[index], pages.k, pages.v, pages.table, Rows.pushed(counts, contexts, "cpu"))[0], whole[index])
    for position in (0, 1, 7, 8, 9, 15, 16, 17, 25):
        live = [n for n, length in enumerate(LENGTHS) if position < length]
        rows = bounded(Rows.pushed([1] * len(live), [position] * len(live), "cpu"))
        index = [starts()[n] + position for n in live]
        got = attention(q[index], pages.k, pages.v, pages.table[live], rows)[0]
        assert same(got, whole[index])
        assert position == 0 or not same(got, whole[[i - 1 for i in index]])  # the control: another row


def test_rows_of_the_first_segment_are_one_pass(fa4: StandIn) -> None:
    """Signs of zero too: a document's first rows don't see how long it grows."""
    q, k, v = documents()
    first = Rows.pushed([SEGMENT], None, "cpu")
    alone = attention(q[:SEGMENT], k[:SEGMENT], v[:SEGMENT], None, first)[0]
    assert len(fa4.calls) == 1
    assert bool(alone[:3].signbit().all()) and not alone[:3].any()
    assert same(attention(q, k, v, None, packed_rows())[0][:SEGMENT], alone)
    assert not same(alone + 0.0, alone)  # the control: a sum that starts from +0


class Made(TorchDispatchMode):
    """Names of the torch calls that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


PLAIN = {"empty", "new_empty", "slice", "select", "view", "unsqueeze", "expand", "clone", "copy", "_unsafe_view", "detach"}


@contextmanager
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a tensor was read by the host: on a GPU each waits for all that was launched."""
    found = [0]
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__int__", "__bool__", "cpu"):
            plain = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, plain: Callable[..., Any] = plain) -> Any:
                found[0] += 1
                return plain(self, *args)

            patch.setattr(Tensor, name, read)
        yield found


def quiet(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
    return q, None


Layer = Callable[[Rows, Tensor | None], Any]
WAYS = ["packed", "paged", "decode"]


def operands(way: str) -> tuple[Layer, Rows, Tensor | None]:
    q, k, v = documents()
    pages = Pages(k, v)
    if way == "packed":
        return (lambda rows, table: attention(q, k, v, None, rows)), packed_rows(), None
    if way == "paged":
        rows = Rows.pushed([5, 8, 1, 4, 16], [12, 0, 0, 5, 10], "cpu")
    else:
        rows = bounded(Rows.pushed([1] * len(LENGTHS), [length - 1 for length in LENGTHS], "cpu"))
    return (lambda rows, table: attention(q[: rows.count], pages.k, pages.v, table, rows)), rows, pages.table


@pytest.mark.parametrize("way", WAYS)
def test_later_layers_make_no_launch_numbers(way: str, fa4: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows, table = operands(way)
    layer(rows, table)
    first = fa4.calls
    fa4.calls = []
    layer(rows, table)
    assert len(first) == len(fa4.calls)
    for one, other in zip(first, fa4.calls, strict=True):
        for name in NUMBERS:
            assert one[name] is other[name] or one[name].data_ptr() == other[name].data_ptr()
    monkeypatch.setattr(kernels, "_merge", lambda *args: None)
    monkeypatch.setattr(kernels, "_fa4", quiet)
    for keep, caught in ((True, False), (False, True)):  # the control: rows that forget
        if not keep:
            rows.launch.clear()
        with host_reads(monkeypatch) as reads, Made() as made:
            layer(rows, table)
        assert bool(set(made.names) - PLAIN) == caught, made.names
        assert bool(reads[0]) == (caught and way != "decode")


@pytest.mark.parametrize("way", ["paged", "decode"])
def test_page_tables_do_not_share(way: str, fa4: StandIn) -> None:
    """One Rows, three tables: other pages, and the same memory seen by other strides."""
    layer, rows, table = operands(way)
    assert table is not None
    n, columns = table.shape
    wide = torch.zeros(n, 2 * columns, dtype=torch.int32)
    wide[:, :columns] = table
    tables = [table, table.roll(1, 0), wide.view(-1)[: n * columns].view(n, columns), wide[:, :columns]]
    assert tables[2].data_ptr() == tables[3].data_ptr() and tables[2].shape == tables[3].shape
    apart = [layer(replace(rows), each)[0] for each in tables]
    together = [layer(rows, each)[0] for each in (*tables, table)]
    assert all(same(one, other) for one, other in zip((*apart, apart[0]), together, strict=True))
    assert same(apart[0], apart[3]) and not same(apart[0], apart[1]) and not same(apart[0], apart[2])


@pytest.mark.parametrize("way", ["paged", "decode"])
def test_an_entry_keeps_its_page_table(way: str, fa4: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the memory that a table gave back could hold the next one, which would be taken for it."""
    layer, rows, table = operands(way)
    assert table is not None

    def kept(each: Rows) -> bool:
        """Whether a table outlives its caller."""
        mine = table.clone()
        layer(each, mine)
        fa4.calls.clear()
        seen = weakref.ref(mine)
        del mine
        return seen() is not None

    def once(rows: Rows, page_table: Tensor, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        return kernels._once(rows, (*key, page_table.data_ptr()), make)

    assert kept(rows)
    monkeypatch.setattr(kernels, "_once_per_table", once)
    assert not kept(replace(rows))  # the control: an entry that knows the address alone


@pytest.mark.parametrize("way", WAYS)
def test_rows_do_not_share(way: str, fa4: StandIn) -> None:
    layer, rows, table = operands(way)
    counts = (rows.starts_N1[1:] - rows.starts_N1[:-1]).tolist()
    contexts = [int(n) - count for n, count in zip(rows.lengths_N, counts, strict=True)]
    contexts[0] = contexts[0] - 1 if contexts[0] else 0
    contexts[4] = contexts[4] - 9 if contexts[4] else 0
    if way == "packed":
        counts[0], counts[4] = counts[4], counts[0]
    other = bounded(Rows.pushed(counts, contexts, "cpu"))
    alone = [layer(replace(each), table)[0] for each in (rows, other)]
    for each, wanted in zip((rows, other), alone, strict=True):
        assert same(layer(each, table)[0], wanted)
    assert not same(*alone)
    # the control: a launch that two Rows share
    fresh = replace(rows)
    layer(fresh, table)
    shared = replace(other)
    shared.launch.update(fresh.launch)
    assert not same(layer(shared, table)[0], alone[1])


@pytest.mark.parametrize("size", [8, 16])
def test_segments_do_not_share(size: int, fa4: StandIn) -> None:
    q, k, v = documents()
    rows = packed_rows()
    first = attention(q, k, v, None, rows)[0]
    wanted = kernels.attention_fa4(q, k, v, None, replace(rows), SCALE, size)[0]
    assert same(kernels.attention_fa4(q, k, v, None, rows, SCALE, size)[0], wanted)
    assert same(first, wanted) == (size == SEGMENT)  # the control: other segments are other bytes
