"""Memory put together from parts: rows of several tokens, several tensors a row, open windows in slots; and what does not fit together."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.memories import keys_memory
from zoo.common import ops
from zoo.common.history import PackedDelta
from zoo.common.memory import Memory, PagedRows, PagePart, Pager, SlotPart
from zoo.common.ops.causal_conv import CARRY
from zoo.common.rows import Rows
from zoo.qwen3 import SIZES, Qwen3ForRL
from zoo.qwen3_5 import SIZES as HYBRID_SIZES
from zoo.qwen3_5 import Qwen35ForRL
from zoo.testing import LawBroken, assert_same_bytes, split_plans

TOKENS = 4
WIDTH = 6
PAGE = 8
LENGTHS = [13, 3, 24]


class Compressed:
    """Rows of four tokens in codes and a scale, and the up to three tokens of an open window in a slot, as a layer sees them.

    A row's scale is its largest size, its codes the four tokens over it: any four others give other bytes.
    """

    def __init__(self, rows: PagedRows, window: Tensor, slot_N: Tensor) -> None:
        self.rows = rows
        self.window = window
        self.slot_N = slot_N

    def push(self, x_RE: Tensor, rows: Rows) -> None:
        before = torch.stack([self._last(x_RE, rows, r) for r in range(rows.count)]).flatten(1)
        codes, scales = compressed(before)
        self.rows.append((codes, scales), rows)
        for n, slot in enumerate(self.slot_N.tolist()):
            last = int(rows.starts_N1[n + 1]) - 1
            self.window[slot] = self._last(x_RE, rows, last)[1:]

    def _last(self, x_RE: Tensor, rows: Rows, r: int) -> Tensor:
        """The row's token and the three before it, from the window where they were pushed earlier."""
        n = int(rows.sequence_R[r])
        first = int(rows.starts_N1[n])
        return torch.cat([self.window[self.slot_N[n]], x_RE[first : r + 1]])[-TOKENS:]


def compressed(rows_RF: Tensor) -> tuple[Tensor, Tensor]:
    scales = rows_RF.abs().amax(1, keepdim=True).clamp(min=1e-6)
    return (rows_RF / scales * 127).round().to(torch.int8), scales


class Window(SlotPart):
    """The last three tokens of each sequence."""

    def __init__(self, slots: int) -> None:
        super().__init__("window", 1, slots, {"window_SWE": (torch.float32, (TOKENS - 1, WIDTH))}, "cpu")

    def layer(self, index: int, slot_N: Tensor) -> tuple[Tensor, Tensor]:
        return self.pools["window_SWE"][index], slot_N


def memory_of(slots: int = 4, pages: int = 12, fill: float | None = None) -> Memory:
    kept = {"codes": (torch.int8, (TOKENS * WIDTH,)), "scales": (torch.float32, (1,))}
    part = PagePart("rows", 1, pages, PAGE, kept, "cpu", TOKENS)
    window = Window(slots)

    def layer(pager: Pager, slot_N: Tensor | None) -> Compressed:
        assert slot_N is not None
        return Compressed(PagedRows(part.layer(0), pager, TOKENS), *window.layer(0, slot_N))

    memory = Memory([part], [window], [layer])
    if fill is not None:
        memory.tensors()["scales"].fill_(fill)
        memory.tensors()["window_SWE"].fill_(fill)
    return memory


def documents() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randn(length, WIDTH, generator=drawn) for length in LENGTHS]


def whole(document: Tensor) -> dict[str, Tensor]:
    """What must be cached of a document: a row for each four tokens."""
    count = len(document) // TOKENS
    codes, scales = compressed(document[: count * TOKENS].reshape(count, TOKENS * WIDTH))
    return {"codes": codes, "scales": scales}


def push(
    memory: Memory, owned: Sequence[Sequence[int]], slots: Sequence[int], given: Sequence[Tensor], done: list[int], step: Sequence[int]
) -> None:
    """step[n] more tokens of each sequence."""
    live = [n for n, count in enumerate(step) if count]
    rows = Rows.pushed([step[n] for n in live], [done[n] for n in live], "cpu")
    table = memory.table([owned[n] for n in live], [slots[n] for n in live], max(map(len, owned)))
    [layer] = memory.view(table)
    layer.push(torch.cat([given[n][done[n] : done[n] + step[n]] for n in live]), rows)
    for n in live:
        done[n] += step[n]


def caches(memory: Memory, owned: Sequence[list[int]], slots: Sequence[int], done: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    for pages, slot, length in zip(owned, slots, done, strict=True):
        yield {name: rows[0] for name, rows in memory.written(pages, length, slot).items()}


PLANS = split_plans(LENGTHS, (TOKENS, PAGE), 5)


@pytest.mark.parametrize("name", PLANS)
def test_rows_of_four_tokens_are_the_same_in_any_pieces(name: str) -> None:
    """Over pages and slots full of NaN, which nobody reads; pages in any order."""
    memory = memory_of(fill=torch.nan)
    given = documents()
    order = random.Random(1).sample(range(1, 12), 11)
    owned = [[order.pop() for _ in range(memory.pages_for(length))] for length in LENGTHS]
    slots = [3, 1, 2]
    memory.clear([page for pages in owned for page in pages], slots)
    done = [0] * len(LENGTHS)
    for step in PLANS[name]:
        push(memory, owned, slots, given, done, step)
        for found, document, length in zip(caches(memory, owned, slots, done), given, done, strict=True):
            wanted = whole(document[:length])
            assert found["codes"].shape == (length // TOKENS, TOKENS * WIDTH)
            assert all(torch.equal(found[each], wanted[each]) for each in wanted), (name, length)
            # the open window is the last tokens, whatever the pieces
            assert not length or torch.equal(found["window_SWE"][-min(length, 3) :], document[max(0, length - 3) : length])
    assert done == LENGTHS


@pytest.mark.parametrize("length", [4, 6, 8, 11, 19])
def test_a_sequence_goes_on_elsewhere_from_its_snapshot(length: int) -> None:
    """Preempted inside a window and inside a page; the first one goes on meanwhile, its slot and open page are another's then."""
    memory = memory_of()
    document = documents()[2]
    owned = [[1, 2, 3]]
    slots = [1]
    done = [0]
    memory.clear([1, 2, 3], [1])
    push(memory, owned, slots, [document], done, [length])
    snapshot = memory.snapshot(1, length, owned[0])
    assert snapshot.rows["codes"].shape[1] == length % PAGE // TOKENS
    push(memory, owned, slots, [document], done, [24 - length])
    full = length // PAGE
    elsewhere = [*owned[0][:full], *range(5, 8 - full)]  # full pages are shared, the open one is its own
    memory.clear(elsewhere[full:], [2])
    memory.restore(2, elsewhere, snapshot)
    # what the snapshot is of may go
    memory.clear(owned[0][full:], [1])
    push(memory, [elsewhere], [2], [document], [length], [24 - length])
    [found] = caches(memory, [elsewhere], [2], [24])
    wanted = whole(document)
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)
    # control: from a slot without the window's tokens the row that it opens is another
    if length % TOKENS:
        memory.clear(elsewhere[full:], [2])
        memory.page_parts[0].write_open_rows(elsewhere[full], snapshot.rows)
        push(memory, [elsewhere], [2], [document], [length], [24 - length])
        [found] = caches(memory, [elsewhere], [2], [24])
        assert not torch.equal(found["codes"], wanted["codes"])


def test_bytes_of_parts_are_counted() -> None:
    memory = memory_of(slots=5, pages=12)
    row = TOKENS * WIDTH + 4
    window = 3 * WIDTH * 4
    assert memory.page_parts[0].nbytes == 12 * 2 * row and memory.slot_parts[0].nbytes == 5 * window
    # a page of 8 is open with 7 tokens at most, which have one row
    assert memory.snapshot_nbytes == row + window and memory.nbytes == 24 * row + 5 * window + 4 * (row + window)
    assert (memory.slots, memory.grain, memory.parts) == (4, 1, ("rows", "window"))
    assert memory.capacity(memory.table([[1, 2]], [3], 3)) == 24 and memory.columns(3) == 4


class Pair(SlotPart):
    """A part whose second pool is written before it is read, so that only the first must begin as zeros."""

    def __init__(self, name: str, grain: int) -> None:
        kept = {f"{name}_first_SE": (torch.float32, (WIDTH,)), f"{name}_second_SE": (torch.float32, (WIDTH,))}
        super().__init__(name, 2, 4, kept, "cpu", from_zero=[f"{name}_first_SE"])
        self.grain = grain


@pytest.mark.parametrize("slots", [[], [2], [1, 3]])
@pytest.mark.parametrize("pages", [[], [3], [1, 4]])
def test_all_parts_are_cleared_where_they_are_assigned_and_nowhere_else(pages: list[int], slots: list[int]) -> None:
    kept = {"k": (torch.float32, (WIDTH,)), "v": (torch.float32, (WIDTH,))}
    rows = [PagePart(name, 2, 5, PAGE, {f"{name}_{each}": of for each, of in kept.items()}, "cpu") for name in ("near", "far")]
    memory = Memory(rows, [Pair("a", 4), Pair("b", 4)], [])
    for tensor in memory.tensors().values():
        tensor.fill_(torch.nan)
    memory.clear(pages, slots)
    for name, tensor in memory.tensors().items():
        zeroed = pages if name.startswith(("near", "far")) else [] if "second" in name else slots
        for place in range(tensor.shape[1]):
            found = tensor[:, place]
            assert bool((found == 0).all()) if place in zeroed else bool(found.isnan().all()), (name, place)


def test_a_memory_is_copied_out_where_all_its_parts_can_be() -> None:
    rows = PagePart("rows", 1, 4, PAGE, {"k": (torch.float32, (WIDTH,))}, "cpu")
    for grains, whole_grain in (((4, 6), 12), ((6, 4), 12), ((1, 64), 64), ((64, 1), 64)):
        assert Memory([rows], [Pair(name, grain) for name, grain in zip("ab", grains, strict=True)], []).grain == whole_grain


def test_parts_that_do_not_fit_together_are_refused() -> None:
    def part(pages: int = 4, page_size: int = 8, tokens: int = 1) -> PagePart:
        return PagePart("a", 1, pages, page_size, {"x": (torch.float32, (2,))}, "cpu", tokens)

    cases: list[tuple[Any, str]] = [
        (lambda: part(pages=1), "at least 2 pages"),
        (lambda: part(page_size=0), "at least 1 token, not 0"),
        (lambda: part(page_size=10, tokens=4), "a page of 10 tokens does not hold whole rows of 4"),
        (lambda: Memory([part(), part(pages=5)], [], []), "a has 5 pages of 8 tokens, a 4 of 8"),
        (lambda: Memory([part(), part(page_size=16)], [], []), "a has 4 pages of 16 tokens, a 4 of 8"),
        (lambda: Memory([part()], [Window(4), Window(5)], []), "window has 5 slots, window 4"),
        (lambda: Window(1), "window memory needs at least 2 slots"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()
    assert keys_memory(1, 2, 8, 1, 4, torch.bfloat16, "cpu").parts == ("keys",)


# training: where other ranks have the documents' beginnings


def test_a_start_is_of_a_layer_that_hands_on_a_state() -> None:
    rows = Rows.packed(torch.tensor([0, 3]))
    attends = Qwen3ForRL.from_config(SIZES["tiny"], device="cpu")
    with pytest.raises(ValueError, match="layer 1 of Qwen3ForRL hands on no state"):
        attends.packed_memory(rows, {1: PackedDelta()})
    with pytest.raises(ValueError, match=f"a start is given for layer 99, the model has layers 0 .. {attends.config.layers - 1}"):
        attends.packed_memory(rows, {99: PackedDelta()})
    hybrid = Qwen35ForRL.from_config(HYBRID_SIZES["tiny"], device="cpu")
    full = hybrid.config.full.index(True)
    with pytest.raises(ValueError, match=f"layer {full} of Qwen35ForRL hands on no state"):
        hybrid.packed_memory(rows, {full: PackedDelta()})


def starts_at(model: Qwen35ForRL, ids_R: Tensor, cut: int) -> dict[int, PackedDelta]:
    """What each layer of a model of recurrent layers hands on behind `cut` tokens of a document: its state, and the convolution's rows."""
    carries: list[Tensor] = []
    states: list[Tensor] = []

    def keep(contract: Any, seen: dict[str, Any], result: Any) -> None:
        if contract.name == "causal_conv":
            carries.append(seen["args"][0][cut - CARRY : cut][None])
        elif contract.name == "gated_delta" and seen["function"] is ops.gated_delta:
            operands = [operand[:cut] for operand in seen["args"][:5]]
            states.append(ops.gated_delta_states(*operands, None, Rows.packed(torch.tensor([0, cut])), program=model.program)[1])

    with ops.watch(keep):
        model.hidden_rows(ids_R, Rows.packed(torch.tensor([0, len(ids_R)])))
    return {layer: PackedDelta(state, carry) for layer, (state, carry) in enumerate(zip(states, carries, strict=True))}


@pytest.mark.parametrize("cut", [64, 128])
def test_a_document_goes_on_from_what_another_rank_hands_over(cut: int) -> None:
    config = replace(HYBRID_SIZES["tiny"], layers=3, full=(False,) * 3)
    model = Qwen35ForRL.from_config(config, seed=2, device="cpu")
    ids = torch.randint(0, config.vocabulary, (150,), generator=torch.Generator().manual_seed(cut))
    rows = Rows.packed(torch.tensor([0, 150 - cut]))
    with torch.no_grad():
        whole_RD = model.hidden_rows(ids, Rows.packed(torch.tensor([0, 150])))[cut:]
        start = starts_at(model, ids, cut)
        assert_same_bytes(model.hidden_rows(ids[cut:], rows, start), whole_RD)
        # controls: from zero, without the rows before the convolution, and one layer without its start
        stateless = {layer: PackedDelta(before.initial_NVKE, None) for layer, before in start.items()}
        for other in (None, stateless, {layer: start[layer] for layer in (0, 2)}):
            with pytest.raises(LawBroken):
                assert_same_bytes(model.hidden_rows(ids[cut:], rows, other), whole_RD)
    # the gradient reaches the rank that handed it over
    state = start[1].initial_NVKE
    assert state is not None
    state.requires_grad_()
    model.hidden_rows(ids[cut:], rows, start).float().square().sum().backward()
    assert state.grad is not None and state.grad.isfinite().all() and state.grad.any()
