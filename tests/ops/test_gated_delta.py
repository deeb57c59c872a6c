"""gated_delta on the CPU: laws and what breaks them, slots, snapshots; accuracy and gradients against a float64 recurrence."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.common.history import DeltaState, PackedDelta
from zoo.common.memory import CarrySlots, DeltaSlots
from zoo.common.ops import CONTRACTS, gated_delta, gated_delta_states
from zoo.common.ops.cases import cases_of, check, trial
from zoo.common.ops.gated_delta import backward, cases, reference, rival_fla
from zoo.common.ops.gated_delta.cases import EDGES, OPERANDS, SlotPlace, packed_rows, push
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import Args, LawBroken, assert_same_bytes, gradients

PROGRAM = resolve("aligned", "cpu", torch.bfloat16)
FP32 = resolve("transformers", "cpu", torch.float32)
FLOAT64 = replace(FP32, dtype="float64")
NAMES = [case.name for case in cases_of("gated_delta", PROGRAM)]


def case_named(name: str) -> Any:
    return next(case for case in cases_of("gated_delta", PROGRAM) if case.name == name)


def made(
    lengths: list[int], *, decay: float = 0.3, heads: tuple[int, int] = (1, 2), dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Args:
    return cases._case("made", lengths, *heads, 16, 16, decay).make(seed, "cpu", dtype)


def recurrence(args: Args, initial_NVKE: Tensor | None = None) -> Tensor:
    """The gated delta rule a token at a time in float64, differentiable."""
    q, k, v, g, beta = (args[name].double() for name in OPERANDS)
    repeat = v.shape[1] // q.shape[1]
    q, k = (t.repeat_interleave(repeat, 1) for t in (q, k))
    out = []
    for n, (begin, end) in enumerate(pairwise(cases.starts_of(args["lengths"]))):
        state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2]) if initial_NVKE is None else initial_NVKE[n].double()
        for r in range(begin, end):
            state = state * g[r].exp()[:, None, None]
            news = beta[r][:, None] * (v[r] - (k[r][:, :, None] * state).sum(1))
            state = state + k[r][:, :, None] * news[:, None, :]
            out.append((q[r][:, :, None] * state).sum(1) * q.shape[2] ** -0.5)
    return torch.stack(out)


def far(found: Tensor, wanted: Tensor) -> float:
    found = found.detach().double()
    wanted = wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.mark.parametrize("program", [PROGRAM, FP32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_laws(name: str, program: Any) -> None:
    for law in (case := case_named(name)).laws:
        check(case, law, program)


def sabotaged(break_it: Callable[..., Tensor]) -> dict[str, Callable[..., Any]]:
    """The op with `break_it(operands, state, rows)` in place of serving's reference."""

    def op(*args: Any, program: Any) -> Tensor:
        *operands, history, rows = args
        return break_it(operands, history, rows) if isinstance(history, DeltaState) else gated_delta(*args, program=program)

    return {"gated_delta": op}


def grid_from_push_start(operands: list[Tensor], state: DeltaState, rows: Rows) -> Tensor:
    """Closes the chunk after every push: the grid begins where the push does."""
    out = reference.serve(*operands, state, Rows.pushed((rows.starts_N1[1:] - rows.starts_N1[:-1]).tolist(), None, "cpu"))
    for slot in state.slot_N.tolist():
        chunk = reference.LiveChunk.of(state, slot)
        chunk.decay_VJ.nan_to_num_(0)
        reference.close(chunk)
    return out


def never_closed(operands: list[Tensor], state: DeltaState, rows: Rows) -> Tensor:
    before = {name: getattr(state, name).clone() for name in ("start_SVKE", "rounded_SVKE")}
    out = reference.serve(*operands, state, rows)
    for name, old in before.items():
        getattr(state, name).copy_(old)
    return out


def rounded_not_refreshed(operands: list[Tensor], state: DeltaState, rows: Rows) -> Tensor:
    before = state.rounded_SVKE.clone()
    out = reference.serve(*operands, state, rows)
    state.rounded_SVKE.copy_(before)
    return out


@pytest.mark.parametrize("break_it", [grid_from_push_start, never_closed, rounded_not_refreshed])
def test_split_law_catches(break_it: Callable[..., Tensor]) -> None:
    with pytest.raises(LawBroken):
        check(case_named("two chunks"), "split", PROGRAM, replace=sabotaged(break_it))


def test_place_law_catches_lanes_cut_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_zero(condition: Tensor, x: Tensor, other: Any) -> Tensor:
        return x * condition if isinstance(other, int) else torch_where(condition, x, other)

    torch_where = torch.where
    case = case_named("two chunks")
    check(case, "place", PROGRAM)
    monkeypatch.setattr(reference.torch, "where", times_zero)
    with pytest.raises(LawBroken):
        check(case, "place", PROGRAM)


def test_row_law_catches_documents_that_share_a_chunk() -> None:
    def packed_as_one(*args: Any, program: Any) -> Tensor:
        return gated_delta(*args[:6], Rows.packed(torch.tensor([0, args[6].count])), program=program)

    with pytest.raises(LawBroken):
        check(case_named("edges"), "row", PROGRAM, replace={"gated_delta": packed_as_one})


@settings(max_examples=12)
@given(st.data())
def test_random_cuts(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 200))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
    pieces = tuple((b - a,) for a, b in pairwise([0, *cuts, length]))
    t = trial(cases._case("made", [length], 1, 2, 16, 16, data.draw(st.sampled_from([0, 0.01, 1.0]))), PROGRAM)
    found, wanted = (push(t, t.args, plan, SlotPlace()) for plan in (pieces, ((length,),)))
    assert_same_bytes(found, wanted)
    assert_same_bytes(wanted["out"], t.call())


@pytest.mark.parametrize("length", [*EDGES, 593, 1000])
def test_accuracy(length: int) -> None:
    """BF16 rounds w, u, the state that rows read and operands, 2^-9 each at most: a few add up to less than 2^-6. FP32 has
    no such rounding."""
    for program, limit in ((PROGRAM, 2**-6), (FP32, 2e-6)):
        args = made([length], dtype=program.torch_dtype)
        wanted = recurrence(args)
        found = gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args), program=program)
        assert far(found, wanted) < limit
        forgetful = {**args, "log_decay_RV": args["log_decay_RV"] * 0.5}
        assert length == 1 or far(found, recurrence(forgetful)) > 4 * limit


@pytest.mark.parametrize("decay", [0, 1e-5, 100.0])
@pytest.mark.parametrize("beta", [1e-4, 1 - 1e-4, None])
def test_accuracy_with_extreme_gates(decay: float, beta: float | None) -> None:
    args = made([130, 5], decay=decay, heads=(1, 3), dtype=torch.float32)
    if beta is not None:
        args["beta_RV"] = torch.full_like(args["beta_RV"], beta)
    found = gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args), program=FP32)
    wanted = recurrence(args)
    assert found.isfinite().all()
    # keys of 16 columns overlap much: with beta near 1 and no decay the inverse grows and FP32 loses some bits
    assert far(found, wanted) < 2e-5


@pytest.mark.parametrize("decay", [0.3, 0])
@pytest.mark.parametrize("lengths", [[1], [3, 64, 4], [65, 63, 1], [130, 2], [128, 129]])
def test_gradients_against_the_recurrence(lengths: list[int], decay: float) -> None:
    args = made(lengths, decay=decay, heads=(2, 6), dtype=torch.float64)

    def call(a: Args) -> Tensor:
        return gated_delta(*(a[n] for n in OPERANDS), None, packed_rows(a), program=FLOAT64)

    found = gradients(call, args, OPERANDS)
    wanted = gradients(recurrence, args, OPERANDS)
    assert far(found[0], wanted[0]) < 1e-11
    for name in OPERANDS:
        assert far(found[1][name], wanted[1][name]) < 1e-9, name
    if sum(lengths) > 1:
        other = gradients(call, {**args, "lengths": [sum(lengths)]}, OPERANDS)[1]
        assert len(lengths) == 1 or far(other["v_RVE"], wanted[1]["v_RVE"]) > 1e-3  # control: documents that mix
        other = gradients(call, args, OPERANDS, seed=1)[1]
        assert far(other["v_RVE"], wanted[1]["v_RVE"]) > 1e-3  # control: another upstream gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0, 1e-5, 100.0])
@pytest.mark.parametrize("beta", [0.0, 1e-4, 1 - 1e-4, 1.0])
def test_gradients_at_extreme_gates(dtype: torch.dtype, decay: float, beta: float) -> None:
    """Decays of a row near 1, near 0, and heads of each; BF16 gradients are the recurrence's own, rounded once."""
    args = made([130, 1, 63], decay=decay, heads=(1, 3), dtype=dtype)
    args["beta_RV"] = torch.full_like(args["beta_RV"], beta)
    assert decay == 0 or (args["log_decay_RV"].exp().min() > 0.999 if decay < 1 else args["log_decay_RV"].median().exp() < 1e-30)
    program = {torch.bfloat16: PROGRAM, torch.float32: FP32, torch.float64: FLOAT64}[dtype]

    def call(a: Args) -> Tensor:
        return gated_delta(*(a[n] for n in OPERANDS), None, packed_rows(a), program=program)

    found = gradients(call, args, OPERANDS)[1]
    wanted = gradients(recurrence, args, OPERANDS)[1]
    bound = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2e-3}[dtype]
    limits = dict.fromkeys(OPERANDS, bound)
    limits["log_decay_RV"] = max(bound, 1e-11 if dtype == torch.float64 else 1e-3)  # a difference of sums, nearly 0 if all is forgotten
    for name in OPERANDS:
        assert found[name].isfinite().all() and far(found[name], wanted[name]) < limits[name], name
    # the control: gates kept away from their extremes
    gates = {"beta_RV": args["beta_RV"].clamp(0.02, 0.98), "log_decay_RV": args["log_decay_RV"].clamp(-5, -1e-3)}
    kept = gradients(call, args | gates, OPERANDS)[1]
    assert all(far(kept[name], wanted[name]) > 3 * limits[name] for name in OPERANDS)


def test_gradients_in_several_passes_over_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.common.ops.gated_delta import backward

    args = made([65, 3], heads=(4, 8), dtype=torch.float64)

    def call(a: Args) -> Tensor:
        return gated_delta(*(a[n] for n in OPERANDS), None, packed_rows(a), program=FLOAT64)

    whole = gradients(call, args, OPERANDS)[1]
    monkeypatch.setattr(backward, "BUDGET", 1)
    for name, grad in gradients(call, args, OPERANDS)[1].items():
        assert far(grad, whole[name]) < 1e-12


def test_documents_do_not_mix_backward() -> None:
    args = made([70, 66], dtype=torch.float32)
    leaves = {name: args[name].clone().requires_grad_() for name in OPERANDS}
    out = gated_delta(*leaves.values(), None, packed_rows(args), program=FP32)
    for name, grad in zip(OPERANDS, torch.autograd.grad(out[:70].square().sum(), list(leaves.values()))):
        assert not grad[70:].any(), name
        assert grad[:70].any(), name


def test_gradients_beside_documents_without_rows() -> None:
    """What they leave to the others; of their own, the states' gradient goes through."""
    lengths = [0, 1, 63, 0, 64, 65, 0, 0]
    live = [n for n, length in enumerate(lengths) if length]
    args = made([1, 63, 64, 65], dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    grad = torch.randn(args["v_RVE"].shape, generator=random, dtype=torch.float64)
    final, initial = (torch.randn(len(lengths), 2, 16, 16, generator=random, dtype=torch.float64) for _ in range(2))

    def by(lengths: list[int], states: list[Tensor]) -> list[Tensor]:
        counts = torch.tensor(lengths)
        starts = torch.tensor(cases.starts_of(lengths))
        sequence = torch.arange(len(lengths)).repeat_interleave(counts)
        rows = Rows(torch.arange(193) - starts[sequence], sequence, starts.int(), counts.int(), max(lengths), max(lengths))
        return list(backward.gated_delta_backward(grad, states[0], *(args[n] for n in OPERANDS), states[1], rows))

    found = by(lengths, [final, initial])
    alone = by([1, 63, 64, 65], [final[live], initial[live]])
    dead = [n for n, length in enumerate(lengths) if not length]
    assert torch.equal(found[5][dead], final[dead])
    found[5] = found[5][live]
    for near, wanted in zip(found, alone, strict=True):
        assert far(near, wanted) < 1e-12
    other = by([1, 62, 65, 65], [final[live], initial[live]])  # control: a document's boundary a row earlier
    assert all(far(near, wanted) > 1e-3 for near, wanted in zip(found, other, strict=True))


def test_context_parallel_parts_equal_the_whole() -> None:
    args = made([200])
    cut = 128
    rows = Rows.packed(torch.tensor([0, 200]))
    whole, final = gated_delta_states(*(args[n] for n in OPERANDS), None, rows, program=PROGRAM)

    def parts(cut: int) -> tuple[Tensor, Tensor]:
        begin = Rows.packed(torch.tensor([0, cut]))
        rest = Rows.packed(torch.tensor([0, 200 - cut]))
        first, state = gated_delta_states(*(args[n][:cut] for n in OPERANDS), None, begin, program=PROGRAM)
        second, last = gated_delta_states(*(args[n][cut:] for n in OPERANDS), state, rest, program=PROGRAM)
        history = PackedDelta(state)
        assert_same_bytes(gated_delta(*(args[n][cut:] for n in OPERANDS), history, rest, program=PROGRAM), second)
        return torch.cat([first, second]), last

    assert_same_bytes(parts(cut), (whole, final))
    with pytest.raises(LawBroken):
        assert_same_bytes(parts(100)[0], whole)  # control: off the 64-grid


@pytest.mark.parametrize("length", [64, 70, 128])
def test_gradients_through_states(length: int) -> None:
    args = made([length, 64], dtype=torch.float64)
    args["initial"] = torch.randn(2, 2, 16, 16, dtype=torch.float64)
    rows = packed_rows(args)
    whole = CHUNK * (length // CHUNK)

    def call(a: Args) -> Any:
        return gated_delta_states(*(a[n] for n in OPERANDS), a["initial"], rows, program=FLOAT64)

    def by_token(a: Args) -> Any:
        # the final state, read by unit queries that add nothing: one token with beta 0 for each key column
        finals = []
        for n, (begin, end) in enumerate(((0, whole), (length, length + 64))):
            cut = {name: a[name][begin:end] for name in OPERANDS}
            probes = {
                "q_RHK": torch.eye(16, dtype=torch.float64)[:, None] * 4.0,
                "k_RHK": torch.zeros(16, 1, 16, dtype=torch.float64),
                "v_RVE": torch.zeros(16, 2, 16, dtype=torch.float64),
                "log_decay_RV": torch.zeros(16, 2, dtype=torch.float64),
                "beta_RV": torch.zeros(16, 2, dtype=torch.float64),
            }
            longer = {name: torch.cat([cut[name], probes[name]]) for name in OPERANDS}
            out = recurrence({**longer, "lengths": [end - begin + 16]}, a["initial"][n : n + 1])
            finals.append(out[end - begin :].transpose(0, 1))
        return recurrence(a, a["initial"]), torch.stack(finals)

    names = (*OPERANDS, "initial")
    (found, found_grads), (wanted, wanted_grads) = (gradients(f, args, names) for f in (call, by_token))
    assert far(found[1], wanted[1]) < 1e-11
    for name in names:
        assert far(found_grads[name], wanted_grads[name]) < 1e-9, name


def pushed(memory: DeltaSlots, slot: int, args: Args, begin: int, end: int) -> Tensor:
    rows = Rows.pushed([end - begin], [begin], "cpu")
    return gated_delta(*(args[n][begin:end] for n in OPERANDS), memory.layer(0, torch.tensor([slot])), rows, program=PROGRAM)


def test_slots_move_and_snapshots_restore() -> None:
    args = made([150])

    def memory() -> DeltaSlots:
        return DeltaSlots(1, 4, 1, 2, 16, 16, torch.bfloat16, "cpu")

    straight = memory()
    whole = pushed(straight, 1, args, 0, 150)
    wanted = straight.written(1, 150)
    moved = memory()
    pushed(moved, 2, args, 0, 100)
    moved.copy(2, 3)
    moved.clear([2])
    assert_same_bytes(pushed(moved, 3, args, 100, 150), whole[100:])
    assert_same_bytes(moved.written(3, 150), wanted)
    restored = memory()
    pushed(restored, 1, args, 0, 128)
    snapshot = restored.snapshot(1, 128)
    pushed(restored, 1, args, 0, 64)  # the slot goes on to other uses
    for pool in restored.pools.values():
        pool[:, 2] = torch.nan
    restored.restore(2, snapshot)
    assert_same_bytes(pushed(restored, 2, args, 128, 150), whole[128:])
    assert_same_bytes(restored.written(2, 150), wanted)
    restored.clear([2])
    assert not torch.equal(pushed(restored, 2, args, 128, 150), whole[128:])  # control: without the snapshot
    with pytest.raises(ValueError, match="64 tokens, not at 100"):
        moved.snapshot(3, 100)


@pytest.mark.parametrize(("width", "channels"), [(16, 8), (3, 5)])
def test_clear_touches_what_length_0_has(width: int, channels: int) -> None:
    """Slots of whole 8-byte words, and others; by a list and by a tensor."""
    for slots in ([3, 1], torch.tensor([3, 1])):
        for part in (DeltaSlots(2, 5, 1, 1, width, width, torch.bfloat16, "cpu"), CarrySlots(2, 5, channels, torch.bfloat16, "cpu")):
            for pool in part.pools.values():
                pool.fill_(torch.nan)
            part.clear(slots)
            for name, pool in part.pools.items():
                assert pool[:, [0, 2, 4]].isnan().all(), name
                mine = pool[:, [1, 3]]
                assert (mine.isnan() if "J" in name else mine == 0).all(), name


def test_carried_rows_move_with_their_sequence() -> None:
    part = CarrySlots(2, 4, 8, torch.bfloat16, "cpu")
    part.pools["carry_SWC"].normal_()
    held = part.written(1, 70)["delta_carry"]
    part.restore(2, part.snapshot(1, 70))
    part.copy(1, 3)
    assert all(torch.equal(part.written(slot, 70)["delta_carry"], held) for slot in (2, 3)) and not part.clear([1])
    assert not part.written(1, 70)["delta_carry"].any() and torch.equal(part.layer(1, torch.tensor([2])).rows_SWC[2], held[1])


def test_written_holds_live_rows_only() -> None:
    memory = DeltaSlots(1, 2, 1, 2, 16, 16, torch.bfloat16, "cpu")
    args = made([130])
    pushed(memory, 1, args, 0, 130)
    assert {name: tuple(t.shape) for name, t in memory.written(1, 130).items()} == {
        "delta_start": (1, 2, 16, 16),
        "delta_rounded": (1, 2, 16, 16),
        "delta_k": (1, 1, 2, 16),
        "delta_v": (1, 2, 2, 16),
        "delta_u": (1, 2, 2, 16),
        "delta_beta": (1, 2, 2),
        "delta_decay": (1, 2, 2),
        "delta_inverse": (1, 2, 2, 64),
    }
    assert not memory.written(1, 130)["delta_inverse"][..., 2:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"k_RHK": a["k_RHK"][:, :, :8]}, r"q \(4, 1, 16\) and k \(4, 1, 8\)"),
        (lambda a: {n: a[n].repeat(1, 3, 1) for n in ("q_RHK", "k_RHK")}, "2 value heads are not a multiple of 3"),
        (lambda a: {"beta_RV": a["beta_RV"][:, :1]}, r"beta \(4, 1\)"),
        (lambda a: {"log_decay_RV": a["log_decay_RV"].bfloat16()}, "log_decay_RV is torch.bfloat16, program 'aligned' reads torch.float32"),
        (lambda a: {n: a[n][:3] for n in ("v_RVE", "log_decay_RV", "beta_RV")}, "q has 4 rows, v 3, there are 4"),
        (lambda a: {n: a[n][:3] for n in OPERANDS}, "q has 3 rows, v 3, there are 4"),
        (lambda a: {"v_RVE": a["v_RVE"].float()}, "v_RVE is torch.float32, program 'aligned' reads torch.bfloat16"),
        (lambda a: {"k_RHK": a["k_RHK"].float()}, "k_RHK is torch.float32, program 'aligned' reads torch.bfloat16"),
    ],
)
def test_bad_input(change: Callable[[Args], Args], message: str) -> None:
    args = made([4])
    rows = packed_rows(args)
    args |= change(args)
    slots = DeltaSlots(1, 2, 1, 2, 16, 16, torch.bfloat16, "cpu").layer(0, torch.tensor([1]))
    for history in (None, slots):
        with pytest.raises(ValueError, match=message):
            gated_delta(*(args[n] for n in OPERANDS), history, rows, program=PROGRAM)


def test_bad_states_and_pools() -> None:
    args = made([4])
    shape = "initial states (2, 2, 16, 16), the rows need (1, 2, 16, 16)"
    dtype = "initial_NVKE is {}, program 'aligned' reads torch.float32"
    for states, message in (
        (torch.zeros(2, 2, 16, 16), shape),
        (torch.zeros(1, 2, 16, 16).bfloat16(), dtype.format(torch.bfloat16)),
        (torch.zeros(1, 2, 16, 16).double(), dtype.format(torch.float64)),
    ):
        with pytest.raises(ValueError, match=re.escape(f"gated_delta: {message}")):
            gated_delta(*(args[n] for n in OPERANDS), PackedDelta(states), packed_rows(args), program=PROGRAM)
    with pytest.raises(ValueError, match="at least 2 slots"):
        DeltaSlots(1, 1, 1, 1, 16, 16, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="3 value heads are not a multiple of 2"):
        DeltaSlots(1, 2, 2, 3, 16, 16, torch.bfloat16, "cpu")


def test_unequal_widths_are_refused_on_a_gpu() -> None:
    """They poisoned the device once: no provider of the aligned class may take them."""
    program = resolve("aligned", "cuda", torch.bfloat16)
    assert all(CONTRACTS["gated_delta"].provider(program, (1, 2, width, width)).name == "triton" for width in (16, 32, 64, 128))
    for widths in ((32, 16), (16, 32), (48, 48)):
        with pytest.raises(ValueError, match="no provider of byte class 'chunk_replay' on cuda can run it"):
            CONTRACTS["gated_delta"].provider(program, (1, 2, *widths))


@pytest.mark.parametrize("of_states", [False, True])
def test_the_rival_trains_by_its_own_backward(monkeypatch: pytest.MonkeyPatch, of_states: bool) -> None:
    """Through a stand-in for flash-linear-attention, whose gradients are autograd's and no chunk's."""
    calls = 0

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, initial_state: Any, **_: Any) -> Any:
        nonlocal calls
        calls += 1
        args = dict(zip(OPERANDS, (q[0], k[0], v[0], g[0], beta[0])), lengths=lengths)
        out = recurrence(args, initial_state).to(v.dtype)
        return out[None], (out.float().sum() * torch.ones(len(lengths), *v.shape[2:3], q.shape[3], v.shape[3]))

    fake = types.ModuleType("fla.ops.gated_delta_rule")
    monkeypatch.setattr(fake, "chunk_gated_delta_rule", chunk_gated_delta_rule, raising=False)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", fake)
    lengths = [70, 5]
    args = made(lengths, dtype=torch.float32)
    rows = packed_rows(args)
    operands = [args[name] for name in OPERANDS]
    initial = 0.1 * torch.randn(2, 2, 16, 16) if of_states else None
    grad = torch.randn(operands[2].shape)
    found = rival_fla.gated_delta_backward(grad, None, *operands, initial, rows)
    wanted = backward.gated_delta_backward(grad, None, *operands, initial, rows)
    assert calls == 1 and CONTRACTS["gated_delta"].providers[2].functions.backward is rival_fla.gated_delta_backward
    assert (found[5] is None) == (initial is None)
    for a, b in zip(found, wanted):
        assert a is None or far(a, b) < 1e-4
    assert far(found[0], wanted[1]) > 0.1, "and a wrong gradient is far"
