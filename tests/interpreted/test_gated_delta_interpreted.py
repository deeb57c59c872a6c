"""The gated_delta kernels in Triton's interpreter, in FP32 (its bf16 products are wrong): chunks, steps, slots, the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from zoo.common.memory import DeltaSlots
from zoo.common.ops.cases import trial
from zoo.common.ops.gated_delta import cases, kernels, kernels_backward, kernels_chunks, reference, rival_tokens
from zoo.common.ops.gated_delta.cases import OPERANDS, SlotPlace, packed_rows, push
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import Args, Plan

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

FP32 = resolve("transformers", "cpu", torch.float32)
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def made(lengths: list[int], widths: tuple[int, int] = (16, 32), decay: float = 0.3) -> Args:
    return cases._case("made", lengths, 1, 2, *widths, decay).make(0, "cpu", torch.float32)


def pushed(args: Args, plan: Plan, serve: object) -> dict[str, object]:
    def op(*operands: object, program: object) -> object:
        return serve(*operands)  # type: ignore[operator]

    case = cases._case("made", args["lengths"], 1, 2, 16, 16)
    return push(trial(case, FP32, replace={"gated_delta": op}), args, plan, SlotPlace(1), every_step=True)


@pytest.mark.parametrize(
    ("counts", "contexts"),
    [([1], [0]), ([64, 3], None), ([1, 66, 127, 2], [63, 63, 1, 128]), ([200], [7]), ([5] * 9, None)],
)
def test_plan_lists_every_chunk(counts: list[int], contexts: list[int] | None) -> None:
    rows = Rows.pushed(counts, contexts, "cpu")
    expected = []
    firsts = []
    for n, (count, context) in enumerate(zip(counts, contexts or [0] * len(counts))):
        firsts.append(len(expected))
        held = context % 64
        begin = int(rows.starts_N1[n])
        for inside in range(0, held + count, 64):
            expected.append([begin - held + inside, max(held - inside, 0), min(held + count - inside, 64), n])
    chunk, sequence = kernels.plan(rows)
    assert chunk[: len(expected)].tolist() == expected
    assert not chunk[len(expected) :, 2].any()
    assert sequence[:, 0].tolist() == firsts
    assert sequence[:, 1].sum() == len(expected)


@pytest.mark.parametrize(("lengths", "widths", "decay"), [([1, 66], (16, 32), 0.3), ([64], (32, 16), 0), ([130, 3], (16, 16), 0)])
def test_chunks_are_the_reference(lengths: list[int], widths: tuple[int, int], decay: float) -> None:
    args = made(lengths, widths, decay)
    initial = torch.randn(len(lengths), 2, *widths, generator=torch.Generator().manual_seed(1))
    for start in (None, initial):
        got, wanted = (m.gated_delta(*(args[n] for n in OPERANDS), start, packed_rows(args)) for m in (kernels, reference))
        torch.testing.assert_close(got, wanted, **CLOSE)
    other = kernels.gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other, wanted, **CLOSE)  # control: without the initial state


def fused(a: Any, b: Any, c: Any) -> Any:
    """An FMA of FP32 but for double rounding; the interpreter's own rounds the product, whose underflow then has no sign."""
    with np.errstate(all="ignore"):
        return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def chains(a: Any, high: int, signed: bool | None = None) -> Any:
    """T [64, 64] of strictly lower a: each element one chain of FMAs, j ascending, of factors whose -0 is +0.

    `signed` is a fault: factors keep their -0 if row j is one of row i's block of INVERT_ROWS (True), or of an earlier one (False).
    """
    inverse = np.eye(64, dtype=np.float32)
    for i in range(high):
        for j in range(i):
            same_block = i // kernels.INVERT_ROWS == j // kernels.INVERT_ROWS
            factor = inverse[j] if same_block is signed else inverse[j] + np.float32(0)
            inverse[i] = fused(np.float32(0) - a[i, j], factor, inverse[i])
    return inverse


def test_inverse_is_chains_of_fmas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Underflow leaves T -0, which is +0 as a factor; NaN and infinity spread to all columns; rows beyond the chunk's are left."""

    def create_fma(_: Any, *operands: Any) -> Any:
        return interpreter.TensorHandle(fused(*np.broadcast_arrays(*(o.data for o in operands))), operands[2].dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
    # 3: both controls change a byte
    random = np.random.default_rng(3)
    highs = [64, 17, 0, 8, 64]
    a = random.standard_normal((5, 64, 64)).astype(np.float32) * np.tri(64, k=-1, dtype=np.float32)
    a[[0, 3]] *= np.where(random.random((2, 64, 64)) < 0.7, 0, 10.0 ** random.integers(-38, -15, (2, 64, 64))).astype(np.float32)
    a[4, 20, 3] = np.nan
    a[4, 30, 9] = np.inf
    upper = np.where(np.tri(64, k=-1), 0, np.nan).astype(np.float32)  # never read
    tile = torch.from_numpy(np.float32(0) - a + upper)
    before = tile.numpy().copy()
    chunk = torch.tensor([[0, 0, high, 0] for high in highs], dtype=torch.int32)
    kernels_chunks.invert_triangle[(5, 1)](tile, chunk, 1, ROWS=kernels.INVERT_ROWS)
    for got, mine, high, was in zip(tile.numpy(), a, highs, before, strict=True):
        wanted = chains(mine, high)[:high]
        nan = np.isnan(wanted)
        assert np.array_equal(np.isnan(got[:high]), nan)
        assert np.array_equal(got[:high].view(np.int32)[~nan], wanted.view(np.int32)[~nan])
        done = -(-high // kernels.INVERT_ROWS) * kernels.INVERT_ROWS
        assert np.array_equal(got[done:].view(np.int32), was[done:].view(np.int32))
    first = tile.numpy()[0]
    assert (np.signbit(first) & (first == 0)).any() and ((first != 0) & (abs(first) < 1e-38)).any()
    for signed in (True, False):  # the controls
        assert not np.array_equal(first.view(np.int32), chains(a[0], 64, signed).view(np.int32))
    assert np.isnan(tile.numpy()[4, 20]).all()


@pytest.mark.parametrize(
    "plan",
    [
        ((66, 3),),
        ((60, 1), (6, 2)),
        ((64, 0), (2, 3)),
        ((63, 3), (1, 0), (1, 0), (1, 0)),
        (*(((1, 1),) * 3), (60, 0), *(((1, 0),) * 3)),
    ],
)
def test_pushes_are_the_reference(plan: Plan) -> None:
    args = made([66, 3], (16, 16))
    got, wanted = (pushed(args, plan, m.serve) for m in (kernels, reference))
    torch.testing.assert_close(got, wanted, **CLOSE)
    # rows that are only moved, and sums of two operands, are equal to the byte
    for at, cached in wanted["seen"].items():
        for name in ("k", "v", "beta", "decay"):
            assert torch.equal(got["seen"][at][name], cached[name])


def test_steps_are_the_reference_across_a_chunk() -> None:
    args = made([68], (16, 16), decay=0)
    plan = ((1,), (1,), (54,), *(((1,),) * 12))
    got, wanted = (pushed(args, plan, m.serve) for m in (kernels, reference))
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert got["out"].isfinite().all()
    moved = pushed({**args, "log_decay_RV": args["log_decay_RV"] * 0.9}, plan, kernels.serve)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(moved["out"], wanted["out"], **CLOSE)


def test_steps_are_the_reference_where_their_tiles_grow() -> None:
    """A step's tiles hold 16, 32 or 64 lanes."""
    args = made([35], (16, 16), decay=0)
    plan = ((14,), (1,), (1,), (1,), (13,), *(((1,),) * 5))
    got, wanted = (pushed(args, plan, m.serve) for m in (kernels, reference))
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize(("shape", "rows"), [((16, 1, 1, None), 2), ((64, 8, 2, 128), 16)])
def test_step_shapes_move_no_number(monkeypatch: pytest.MonkeyPatch, shape: tuple[int | None, ...], rows: int) -> None:
    args = made([65], (64, 64))
    plan = ((15,), (1,), (1,), (46,), (1,), (1,))
    whole = pushed(args, plan, kernels.serve)
    monkeypatch.setattr(kernels, "STEP_SHAPES", ((1 << 62, *shape),))
    monkeypatch.setattr(kernels, "STEP_ROWS", rows)
    torch.testing.assert_close(pushed(args, plan, kernels.serve), whole, **CLOSE)


def test_launch_shapes_move_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    args = made([65], (16, 64))
    plan = ((62,), (1,), (1,), (1,))
    whole = pushed(args, plan, kernels.serve)
    monkeypatch.setattr(kernels, "CLOSE_COLUMNS", 16)
    monkeypatch.setattr(kernels, "SUM_HEADS", 1)
    monkeypatch.setattr(kernels, "OUTPUT_COLUMNS", 16)
    monkeypatch.setattr(kernels, "SCAN_SHAPES", ((1 << 62, 16, 4, 2),))
    torch.testing.assert_close(pushed(args, plan, kernels.serve), whole, **CLOSE)


def lived(serve: Any, fill: float, clear: bool = True) -> list[torch.Tensor]:
    """Outputs and bytes of a sequence in a slot that held `fill` and was assigned, and of its snapshot, restored in another."""
    args = made([70], (16, 16))
    memory = DeltaSlots(1, 3, 1, 2, 16, 16, torch.float32, "cpu")
    for pool in memory.pools.values():
        pool.fill_(fill)
    if clear:
        memory.clear([1])
    found = []

    def push(slot: int, *cuts: int) -> None:
        state = memory.layer(0, torch.tensor([slot]))
        for begin, end in pairwise(cuts):
            found.append(serve(*(args[n][begin:end] for n in OPERANDS), state, Rows.pushed([end - begin], [begin], "cpu")))
        found.extend(memory.written(slot, cuts[-1]).values())

    push(1, 0, 1, 3, 62, 63, 64)
    snapshot = memory.snapshot(1, 64)
    push(1, 64, 70)
    memory.restore(2, snapshot)
    push(2, 64, 65, 68, 69, 70)
    return found


@pytest.mark.parametrize("serve", [kernels.serve, reference.serve])
def test_an_assigned_slot_needs_no_zeros_but_its_state(serve: Any) -> None:
    """What a slot held before, here NaN, reaches nobody. The control: a slot that is not cleared."""
    clean = lived(serve, 0.0)
    assigned = lived(serve, torch.nan)
    assert all(t.isfinite().all() for t in clean)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(clean, assigned, strict=True))
    assert lived(serve, torch.nan, clear=False)[0].isnan().all()


def test_rival_is_the_recurrence() -> None:
    args = made([20, 3], (16, 32))
    rows = packed_rows(args)
    got, wanted = (m.gated_delta(*(args[n] for n in OPERANDS), None, rows)[0] for m in (rival_tokens, reference))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    pools, owned = cases.slots_for(args, SlotPlace())
    state = replace(pools, slot_N=torch.tensor(owned))
    served = []
    for row in range(3):
        index = torch.tensor([row, 20 + row])
        served.append(rival_tokens.serve(*(args[n][index] for n in OPERANDS), state, Rows.pushed([1, 1], [row, row], "cpu")))
    torch.testing.assert_close(torch.stack(served, 1), torch.stack([got[:3], got[20:]]), rtol=1e-5, atol=1e-6)


def test_the_plan_is_laid_out_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of every layer share it; other rows, or the same ones after `launch.clear()`, get their own."""
    laid_out: list[Rows] = []
    lay_out = kernels._lay_out
    monkeypatch.setattr(kernels, "_lay_out", lambda rows: laid_out.append(rows) or lay_out(rows))
    args = made([70, 5], (16, 16))
    rows = packed_rows(args)
    operands = [args[name] for name in OPERANDS]
    first, second = (kernels.gated_delta(*operands, None, rows) for _ in range(2))
    kernels_backward.gated_delta_backward(torch.ones_like(first[0]), None, *operands, None, rows)
    assert len(laid_out) == 1 and torch.equal(first[0], second[0])
    rows.launch.clear()
    assert torch.equal(kernels.plan(rows)[0], lay_out(rows)[0]) and len(laid_out) == 2
    kernels.plan(Rows.packed(torch.tensor([0, 5, 75])))
    assert len(laid_out) == 3
