"""Kernels of latent attention and biased routing in Triton's interpreter, against the CPU references.

In FP32, since the interpreter's products of bf16 tiles are wrong. Bytes are equal where no exp is taken and the products are exact;
integers are equal everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton")

from tests.memories import latent_memory  # noqa: E402
from zoo.common.memory.kernels import write_token_rows  # noqa: E402
from zoo.common.ops import rope_table  # noqa: E402
from zoo.common.ops.biased_route import Choice  # noqa: E402
from zoo.common.ops.biased_route import kernels as route_kernels  # noqa: E402
from zoo.common.ops.biased_route import reference as route_reference  # noqa: E402
from zoo.common.ops.head_linear import kernels as head_kernels  # noqa: E402
from zoo.common.ops.head_linear import reference as head_reference  # noqa: E402
from zoo.common.ops.layer_norm import kernels as norm_kernels  # noqa: E402
from zoo.common.ops.layer_norm import reference as norm_reference  # noqa: E402
from zoo.common.ops.rope import kernels as rope_kernels  # noqa: E402
from zoo.common.ops.rope import reference as rope_reference  # noqa: E402
from zoo.common.ops.select import kernels as select_kernels  # noqa: E402
from zoo.common.ops.select import reference as select_reference  # noqa: E402
from zoo.common.ops.sparse_attention import backward as attention_backward  # noqa: E402
from zoo.common.ops.sparse_attention import kernels as attention_kernels  # noqa: E402
from zoo.common.ops.sparse_attention import kernels_backward as gradient_kernels  # noqa: E402
from zoo.common.ops.sparse_attention import kernels_flash_mla as flash_mla  # noqa: E402
from zoo.common.ops.sparse_attention import reference as attention_reference  # noqa: E402
from zoo.common.ops.sparse_attention.cases import lists  # noqa: E402
from zoo.common.rows import Rows  # noqa: E402

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
LENGTHS = [37, 2, 11]


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quarters(seed: int, *shape: int) -> Tensor:
    """Small multiples of a quarter: products and sums of them are exact in FP32, and many are equal."""
    return (floats(seed, *shape) * 2).round() / 4


def packed() -> Rows:
    return Rows.packed(torch.tensor([0, *LENGTHS]).cumsum(0))


def paged(rows_RE: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The packed documents in shuffled pages of a memory full of NaN, and the table."""
    memory = latent_memory([True], 16, page_size, rows_RE.shape[1], 1, rows_RE.dtype, "cpu")
    pages = memory.tensors()["latent"]
    pages.fill_(torch.nan)
    owned = []
    free = [7, 3, 9, 1, 13, 10, 4, 11, 2, 8, 12, 5, 6]
    for length in LENGTHS:
        owned.append([free.pop() for _ in range(memory.pages_for(length))])
    memory.clear([page for mine in owned for page in mine])
    table = memory.table(owned, [], max(map(len, owned)))
    write_token_rows(rows_RE, pages[0], table, packed())
    [layer] = memory.view(table)
    wanted = pages[0].clone()
    layer.append(rows_RE, packed())
    assert torch.equal(wanted.nan_to_num(7), pages[0].nan_to_num(7)), "the kernel writes what the CPU writes"
    return pages[0], table


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("width", "rotated"), [(8, 8), (16, 6), (64, 64)])
def test_rope_of_neighbours(inverse: bool, width: int, rotated: int) -> None:
    x = floats(0, 9, 3, width + 5)[..., 5:]
    table = rope_table(50, rotated, 1e4)
    positions = torch.arange(9) * 5
    wanted = rope_reference.rope(x, table, positions, inverse, True)
    assert torch.equal(rope_kernels.rope(x, table, positions, inverse, True), wanted)
    assert not torch.equal(rope_kernels.rope(x, table, positions, inverse, False), wanted)
    back = rope_reference.rope(wanted, table, positions, not inverse, True)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("width", [1, 7, 128])
def test_layer_norm(width: int) -> None:
    x = floats(1, 5, width + 3)[:, 3:]
    weight = floats(2, width)
    bias = floats(3, width)
    got = norm_kernels.layer_norm(x, weight, bias, 1e-6)
    wanted = norm_reference.layer_norm(x, weight, bias, 1e-6)
    torch.testing.assert_close(got, wanted, rtol=2**-21, atol=2**-21)  # numpy's rsqrt is another one
    assert (norm_kernels.layer_norm(x + 1, weight, bias * 0, 1e-6) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 5, 3), (17, 70, 65), (70, 33, 128)])
def test_head_linear(transposed: bool, rows: int, columns: int, depth: int) -> None:
    x = quarters(4, rows, 3, depth)
    weight = quarters(5, 3, columns, depth)
    laid = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
    wanted = head_reference.head_linear(x, weight)
    assert torch.equal(head_kernels.head_linear(x, laid), wanted)
    assert not torch.equal(head_kernels.head_linear(x, laid.flip(0)), wanted)


@pytest.mark.parametrize(
    "choice", [Choice(1), Choice(6, scale=2.5), Choice(3, 4, 2), Choice(5, 4, 3, False, 1.5)], ids=lambda choice: str(tuple(choice))
)
def test_biased_route(choice: Choice) -> None:
    logits = quarters(6, 40, 16) * 4
    bias = floats(7, 16) * 0.1
    for given in (bias, bias * 0):  # without biases many scores are equal
        weights, experts = route_kernels.biased_route(logits, given, choice)
        wanted, chosen = route_reference.biased_route(logits, given, choice)
        assert torch.equal(experts, chosen)
        torch.testing.assert_close(weights, wanted, rtol=2**-20, atol=0)
    assert not torch.equal(route_kernels.biased_route(logits, bias + torch.arange(16) % 2, choice)[1], chosen)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of the NaN and infinity below
@pytest.mark.parametrize("page_size", [None, 16, 5])
@pytest.mark.parametrize(("heads", "width", "top_k"), [(1, 8, 4), (5, 13, 16), (32, 16, 7), (3, 8, 64)])
def test_select(monkeypatch: pytest.MonkeyPatch, page_size: int | None, heads: int, width: int, top_k: int) -> None:
    monkeypatch.setattr(select_kernels, "HELD", 400)  # so that rows are scored a few at a time
    q = quarters(8, 50, heads, width)
    weights = quarters(9, 50, heads)
    keys = quarters(10, 50, width)
    weights[4] = torch.nan
    keys[3, 0] = torch.inf
    rows = packed()
    table = None
    wanted = select_reference.select(q, weights, keys, None, rows, top_k)
    if page_size is not None:
        keys, table = paged(keys, page_size)
    mine = packed()
    assert torch.equal(select_kernels.select(q, weights, keys, table, mine, top_k), wanted)
    for flagged in (rows, mine):  # row 4 chooses where it sees more than top_k tokens, and later ones meet the infinity times 0
        if top_k < 37:
            with pytest.raises(ValueError, match="score is NaN"):
                flagged.check_flags()
        else:
            flagged.check_flags()
    if top_k < 37:
        assert not torch.equal(select_kernels.select(-q, weights, keys, table, rows, top_k), wanted)


@pytest.mark.parametrize("page_size", [None, 16, 5])
@pytest.mark.parametrize(("heads", "width", "values", "top_k"), [(1, 8, 8, 4), (3, 24, 16, 16), (18, 72, 64, 80)])
def test_sparse_attention(page_size: int | None, heads: int, width: int, values: int, top_k: int) -> None:
    q = floats(11, 50, heads, width)
    latent = floats(12, 50, width)
    positions = lists(LENGTHS, top_k, 3)
    positions[7] = -1  # a row that reads nothing
    rows = packed()
    table = None
    wanted, wanted_lse = attention_reference.sparse_attention(q, latent, None, positions, rows, values, width**-0.5)
    assert not wanted[7].any() and bool((wanted_lse[7] == -torch.inf).all())
    if page_size is not None:
        latent, table = paged(latent, page_size)
    out, lse = attention_kernels.sparse_attention(q, latent, table, positions, rows, values, width**-0.5)
    torch.testing.assert_close(out, wanted, rtol=2**-18, atol=2**-18)
    torch.testing.assert_close(lse, wanted_lse, rtol=2**-18, atol=2**-18)
    moved = attention_kernels.sparse_attention(q, latent, table, positions, rows, values, width**-1.0)[0]
    assert heads == 1 or (moved - wanted).abs().max() > 0.01


def test_sparse_attention_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tiles added is rescaled each time that a later one has a larger score: the largest stands last here."""
    monkeypatch.setattr(attention_kernels, "LANES", 16)
    q = floats(11, 50, 3, 24)
    latent = floats(12, 50, 24)
    positions = lists(LENGTHS, 40, 3)
    latent *= torch.linspace(0.5, 3.0, 50)[:, None]
    rows = packed()
    wanted, wanted_lse = attention_reference.sparse_attention(q, latent, None, positions, rows, 16, 24**-0.5)
    out, lse = attention_kernels.sparse_attention(q, latent, None, positions, rows, 16, 24**-0.5)
    assert int((positions[36] >= 0).sum()) > 2 * 16  # row 36 reads three tiles
    torch.testing.assert_close(out, wanted, rtol=2**-18, atol=2**-18)
    torch.testing.assert_close(lse, wanted_lse, rtol=2**-18, atol=2**-18)
    first_tile = torch.where(torch.arange(40) < 16, positions, -1)
    alone = attention_kernels.sparse_attention(q, latent, None, first_tile, rows, 16, 24**-0.5)[0]
    assert (alone[36] - wanted[36]).abs().max() > 0.01  # the control: later tiles matter


@pytest.mark.parametrize(
    ("heads", "width", "values", "top_k", "base"), [(1, 8, 8, 4, math.e), (3, 24, 16, 40, math.e), (18, 40, 32, 20, 2.0)]
)
def test_gradients_of_sparse_attention(
    monkeypatch: pytest.MonkeyPatch, heads: int, width: int, values: int, top_k: int, base: float
) -> None:
    """Of the listed rows alone, whatever a block of query rows holds, against the closed form over all rows in float64."""
    monkeypatch.setattr(gradient_kernels, "LANES", 16)
    q = floats(11, 50, heads, width)
    latent = floats(12, 50, width)
    positions = lists(LENGTHS, top_k, 3)
    positions[7] = -1  # a row that reads nothing, though its gradient is asked for
    rows = packed()
    scale = width**-0.5
    wide = (q.double(), latent.double())
    out, lse = attention_reference.sparse_attention(*wide, None, positions, rows, values, scale)
    grad = floats(13, 50, heads, values)
    wanted = attention_backward.sparse_attention_backward(grad.double(), *wide, positions, out, lse, rows, scale)

    def found(positions: Tensor = positions) -> tuple[Tensor, Tensor]:
        given = (lse / math.log(base)).float()
        return gradient_kernels.sparse_attention_backward(grad, q, latent, positions, out.float(), given, rows, scale, base=base)

    whole = found()
    for mine, exact in zip(whole, wanted, strict=True):
        torch.testing.assert_close(mine, exact.float(), rtol=2**-16, atol=2**-16)
    assert not whole[0][7].any()
    if heads != 1:
        return
    for held, most in ((1, 1), (5000, 12)):  # a query row at a time, and a few
        monkeypatch.setattr(gradient_kernels, "HELD", held)
        assert gradient_kernels.rows_at_once(heads, width, top_k, 4) == most
        assert all(torch.equal(a, b) for a, b in zip(found(), whole, strict=True)), "a block's size moved a byte"
    shorter = torch.where(torch.arange(top_k) < 3, positions, -1)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(found(shorter), whole, strict=True)), "the control: lists cut to three"


@pytest.mark.parametrize("page_size", [None, 16, 5])
def test_places_of_lists(page_size: int | None) -> None:
    """Where listed tokens lie among all token rows, -1 behind the last; made once for layers that share a list."""
    latent = floats(12, 50, 8)
    positions = lists(LENGTHS, 200, 3)
    positions[7] = -1
    rows = packed()
    flat = latent
    table = None
    if page_size is not None:
        pages, table = paged(latent, page_size)
        flat = pages.flatten(0, 1)
    found = flash_mla.lists_of(positions, rows, table, page_size or 0)
    assert found.places_R1K.shape == (50, 1, 128), "no row sees more than 37 tokens"
    for row in range(50):
        listed = positions[row][positions[row] >= 0]
        places = found.places_R1K[row, 0]
        begin = int(rows.starts_N1[rows.sequence_R[row]])
        assert torch.equal(flat[places[: len(listed)].long()], latent[begin + listed.long()])
        assert bool((places[len(listed) :] == -1).all()) and int(found.counts_R[row]) == max(1, len(listed))
    assert flash_mla.lists_of(positions, rows, table, page_size or 0) is found
    other = positions.clone()
    other[20, 0] = -1
    assert flash_mla.lists_of(other, rows, table, page_size or 0) is not found
    assert flash_mla.lists_of(positions, packed(), table, page_size or 0) is not found


class NoWait(TorchDispatchMode):
    """Raises where the host would wait for the device, or where a shape comes from data: neither can be captured."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "bincount", "repeat_interleave")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not any(name == waits or name.startswith(f"_{waits}") for waits in self.WAITS), f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


def test_a_decode_step_waits_for_nothing() -> None:
    """Every kernel's host side that a captured step of this architecture runs, beside those that other models share."""
    rows = Rows.pushed([1, 1], [36, 1], "cpu")
    keys, table = paged(floats(1, 50, 16), 16)
    q = floats(2, 2, 4, 16)
    weights = floats(3, 2, 4)
    positions = torch.tensor([[3, 30], [1, -1]], dtype=torch.int32)
    weight = floats(4, 3, 8, 16)
    x = floats(5, 2, 3, 16)
    some = table[:2].contiguous()
    turn = rope_table(50, 8, 1e4)
    with NoWait():
        write_token_rows(floats(6, 2, 16), keys, some, rows)
        select_kernels.select(q, weights, keys, some, rows, 5)
        select_kernels.select(q, weights, keys, some, rows, 64)
        attention_kernels.sparse_attention(q, keys, some, positions, rows, 8, 0.25)
        flash_mla.lists_of(positions, rows, some, 16)
        head_kernels.head_linear(x, weight)
        route_kernels.biased_route(floats(7, 2, 16), floats(8, 16), Choice(3, 4, 2))
        norm_kernels.layer_norm(x, floats(9, 16), floats(10, 16), 1e-6)
        rope_kernels.rope(x, turn, rows.positions_R, False, True)
    with NoWait(), pytest.raises(AssertionError, match="waits for the device"):
        positions.max().item()
