"""gated_delta on a GPU: the laws in bytes, steps and CUDA graphs against chunks, launch shapes, accuracy and gradients."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zoo.common.memory import DeltaSlots
from zoo.common.ops import gated_delta, gated_delta_states
from zoo.common.ops.gated_delta import backward, cases, kernels, kernels_backward, rival_tokens
from zoo.common.ops.gated_delta.cases import EDGES, OPERANDS, packed_rows
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import Args, LawBroken, assert_same_bytes, gradients

pytestmark = pytest.mark.gpu

HEADS = (16, 32)


def program() -> Any:
    return resolve("aligned", "cuda", torch.bfloat16)


def made(lengths: list[int], *, decay: float = 0.05, heads: tuple[int, int] = HEADS, width: int = 128, seed: int = 0) -> Args:
    return cases._case("made", lengths, *heads, width, width, decay).make(seed, "cuda", torch.bfloat16)


def memory_for(args: Args, slots: int) -> DeltaSlots:
    k = args["k_RHK"]
    v = args["v_RVE"]
    memory = DeltaSlots(1, slots, k.shape[1], v.shape[1], k.shape[2], v.shape[2], v.dtype, "cuda")
    for name, pool in memory.pools.items():
        if "J" in name:
            pool.fill_(torch.nan)
    return memory


def rows_at(args: Args, index: Tensor) -> list[Tensor]:
    return [args[name][index] for name in OPERANDS]


def recurrence(args: Args) -> Tensor:
    q, k, v, g, beta = (args[name].double() for name in OPERANDS)
    repeat = v.shape[1] // q.shape[1]
    q, k = (t.repeat_interleave(repeat, 1) for t in (q, k))
    out = []
    for begin, end in pairwise(cases.starts_of(args["lengths"])):
        state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2])
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


@pytest.mark.parametrize("decay", [0.05, 0])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_every_step_equals_the_chunks(width: int, decay: float) -> None:
    """Every row of a chunk as a step, at three batch sizes (three launch shapes), caches after each of them."""
    args = made([130], decay=decay, width=width)
    whole = gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args), program=program())
    for batch in (1, 6, 24):
        memory = memory_for(args, batch + 1)
        slots = torch.arange(1, batch + 1, device="cuda")
        state = memory.layer(0, slots)
        for r in range(130):
            index = torch.full((batch,), r, device="cuda")
            out = gated_delta(*rows_at(args, index), state, Rows.pushed([1] * batch, [r] * batch, "cuda"), program=program())
            assert_same_bytes(out, whole[r].expand_as(out), f"row {r} of {batch}")
            if r in (0, 1, 31, 62, 63, 64, 65, 127, 128, 129):
                other = memory_for(args, 2)
                alone = other.layer(0, torch.tensor([1], device="cuda"))
                begin = torch.arange(r + 1, device="cuda")
                gated_delta(*rows_at(args, begin), alone, Rows.pushed([r + 1], [0], "cuda"), program=program())
                assert_same_bytes(memory.written(batch, r + 1), other.written(1, r + 1), f"caches after row {r} of {batch}")


def test_wrong_chunk_grid_is_caught() -> None:
    args = made([130])
    whole = gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args), program=program())
    parts = {**args, "lengths": [50, 80]}
    apart = gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(parts), program=program())
    assert_same_bytes(apart[:50], whole[:50])
    with pytest.raises(LawBroken):
        assert_same_bytes(apart, whole)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_graph_replay_equals_eager(batch: int) -> None:
    """Sequences at different places of their chunks, some closing; eager and graph steps alternate on one memory."""
    contexts = [(61 + 7 * n) % 130 for n in range(batch)]
    args = made([150])
    eager = memory_for(args, batch + 2)
    graphed = memory_for(args, batch + 2)
    slots = torch.arange(1, batch + 1, device="cuda")
    for n, context in enumerate(contexts):
        if context:
            index = torch.arange(context, device="cuda")
            rows = Rows.pushed([context], [0], "cuda")
            for memory in (eager, graphed):
                gated_delta(*rows_at(args, index), memory.layer(0, slots[n : n + 1]), rows, program=program())
    # the graph has one padding row more, in slot 0
    padded = torch.cat([slots, slots.new_zeros(1)])
    buffers = [t.clone() for t in rows_at(args, torch.zeros(batch + 1, dtype=torch.int64, device="cuda"))]
    rows = Rows.pushed([1] * (batch + 1), [0] * (batch + 1), "cuda")
    scratch = memory_for(args, batch + 2)
    gated_delta(*buffers, scratch.layer(0, padded), rows, program=program())  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    state = graphed.layer(0, padded)
    with torch.cuda.graph(graph):
        out = gated_delta(*buffers, state, rows, program=program())
    for step in range(8):
        at = [context + step for context in contexts]
        index = torch.tensor([*at, 0], device="cuda")
        now = Rows.pushed([1] * batch, at, "cuda")
        wanted = gated_delta(*rows_at(args, index[:-1]), eager.layer(0, slots), now, program=program())
        if step % 3 == 2:
            found = gated_delta(*rows_at(args, index[:-1]), graphed.layer(0, slots), now, program=program())
        else:
            for buffer, t in zip(buffers, rows_at(args, index), strict=True):
                buffer.copy_(t)
            rows.positions_R.copy_(index)
            graph.replay()
            found = out[:-1]
        assert_same_bytes(found, wanted, f"step {step}")
        for n, slot in enumerate(slots.tolist()):
            assert_same_bytes(graphed.written(slot, at[n] + 1), eager.written(slot, at[n] + 1), f"caches, step {step}")


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("scan", [shape for _, *shape in kernels.SCAN_SHAPES])
def test_launch_shapes_move_no_byte(monkeypatch: pytest.MonkeyPatch, scan: list[int], columns: int) -> None:
    """Packed, and pushed in two pieces that a chunk goes over."""
    args = made([200])

    def run() -> Any:
        memory = memory_for(args, 2)
        slots = torch.tensor([1], device="cuda")
        out = [gated_delta_states(*(args[n] for n in OPERANDS), None, packed_rows(args), program=program())]
        for begin, end in ((0, 70), (70, 200)):
            index = torch.arange(begin, end, device="cuda")
            rows = Rows.pushed([end - begin], [begin], "cuda")
            out.append((gated_delta(*rows_at(args, index), memory.layer(0, slots), rows, program=program()),))
        return [*(t for found in out for t in found), memory.written(1, 200)]

    before = run()
    monkeypatch.setattr(kernels, "SUM_HEADS", 4)
    monkeypatch.setattr(kernels, "OUTPUT_COLUMNS", columns)
    monkeypatch.setattr(kernels, "SCAN_SHAPES", ((1 << 62, *scan),))
    for after, wanted in zip(run(), before, strict=True):
        assert_same_bytes(after, wanted)


@pytest.mark.parametrize(("shape", "rows"), [((32, 4, 1, None), 2), ((64, 4, 2, None), 2), ((128, 8, 1, 128), 2), ((32, 4, 2, None), 16)])
def test_step_shapes_move_no_byte(monkeypatch: pytest.MonkeyPatch, shape: tuple[int | None, ...], rows: int) -> None:
    """Steps around the places where their tiles grow and a chunk closes, extreme gates, every launch shape against chunks."""
    monkeypatch.setattr(kernels, "STEP_SHAPES", ((1 << 62, *shape),))
    monkeypatch.setattr(kernels, "STEP_ROWS", rows)
    args = made([66], decay=0)
    whole = gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args), program=program())
    for begin in (0, 14, 30, 47, 62):
        memory = memory_for(args, 2)
        slots = torch.tensor([1], device="cuda")
        state = memory.layer(0, slots)
        if begin:
            gated_delta(*rows_at(args, torch.arange(begin, device="cuda")), state, Rows.pushed([begin], [0], "cuda"), program=program())
        for r in range(begin, begin + 4):
            now = Rows.pushed([1], [r], "cuda")
            out = gated_delta(*rows_at(args, torch.tensor([r], device="cuda")), state, now, program=program())
            assert_same_bytes(out[0], whole[r], f"row {r}")
        begun = torch.arange(begin + 4, device="cuda")
        other = memory_for(args, 2)
        gated_delta(*rows_at(args, begun), other.layer(0, slots), Rows.pushed([begin + 4], [0], "cuda"), program=program())
        assert_same_bytes(memory.written(1, begin + 4), other.written(1, begin + 4), f"caches after row {begin + 3}")


@pytest.mark.parametrize("length", [*EDGES, 593, 1000, 4096])
def test_accuracy(length: int) -> None:
    """See the CPU test of the same name."""
    args = made([length], heads=(1, 2))
    wanted = recurrence(args)
    found = gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args), program=program())
    assert far(found, wanted) < 2**-6
    assert length == 1 or far(found, recurrence({**args, "log_decay_RV": args["log_decay_RV"] * 0.5})) > 2**-6


@pytest.mark.parametrize("decay", [0.05, 0])
@pytest.mark.parametrize("lengths", [[1], [65, 63, 1], [300, 2, 128]])
def test_gradients_against_float64(lengths: list[int], decay: float) -> None:
    args = made(lengths, heads=(2, 4), decay=decay)

    def call(a: Args) -> Tensor:
        return gated_delta(*(a[n] for n in OPERANDS), None, packed_rows(a), program=program())

    def by_token(a: Args) -> Tensor:
        return recurrence(a).to(torch.bfloat16)

    found, again, wanted = (gradients(f, args, OPERANDS)[1] for f in (call, call, by_token))
    assert_same_bytes(found, again)
    terms = (args["q_RHK"].double() * wanted["q_RHK"].double()).abs().sum(2)  # of the decays' gradients
    for name in OPERANDS:
        if not wanted[name].any():  # the decay of a document's only token reaches nothing: FP32's noise, as the contract says
            assert name == "log_decay_RV" and lengths == [1] and found[name].abs().max() < 2**-20 * terms.abs().max()
            continue
        # one BF16 rounding of q, k, v's gradients; FP32 sums of gates
        assert far(found[name], wanted[name]) < 2**-7, name
    other = gradients(call, args, OPERANDS, seed=1)[1]
    assert far(other["v_RVE"], wanted["v_RVE"]) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "heads"), [(16, (3, 3)), (32, (1, 4)), (64, (2, 6)), (128, (2, 4))])
def test_gradients_of_states(width: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Also of the initial states and through the final ones, by the kernels against the backward by chunk in float64."""
    lengths = [1, 63, 64, 65, 130]
    args = cases._case("made", lengths, *heads, width, width, 0.05).make(0, "cuda", dtype)
    random = torch.Generator("cuda").manual_seed(2)
    grad = torch.randn(args["v_RVE"].shape, generator=random, device="cuda").to(dtype)
    final, initial = (torch.randn(len(lengths), heads[1], width, width, generator=random, device="cuda") for _ in range(2))
    operands = [args[name] for name in OPERANDS]
    rows = packed_rows(args)
    # BF16: 0.0043 in the interpreter; 0.015, of the first state, where beta 1 and no decay let nothing fade
    most = 1e-5 if dtype == torch.float32 else 2**-6
    for states in ((final, 0.3 * initial), (None, None)):
        found, again = (kernels_backward.gated_delta_backward(grad, states[0], *operands, states[1], rows) for _ in range(2))
        assert_same_bytes(found, again)
        wide = [None if t is None else t.double() for t in (grad, states[0], *operands, states[1])]
        wanted = backward.gated_delta_backward(*wide, rows)
        wide[5] *= 0.5  # control: half the decay
        other = backward.gated_delta_backward(*wide, rows)
        for name, *each in zip((*OPERANDS, "initial"), found, wanted, other, strict=True):
            assert far(each[0], each[1]) < most < far(each[0], each[2]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_of_decays_that_forget_at_once(dtype: torch.dtype) -> None:
    """Sums that cancel but for FP32's roundings: each head by the size of its own terms, not by that of all heads."""
    args = cases._case("made", [65, 130, 2], 2, 2, 128, 128, 0.05).make(0, "cuda", dtype)
    args["log_decay_RV"][:, 0] = -80
    grad = torch.randn(args["v_RVE"].shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").to(dtype)
    operands = [args[name] for name in OPERANDS]
    rows = packed_rows(args)
    found = kernels_backward.gated_delta_backward(grad, None, *operands, None, rows)[3]

    def in_float64() -> tuple[Tensor, ...]:
        return backward.gated_delta_backward(grad.double(), None, *(t.double() for t in operands), None, rows)

    wanted = in_float64()
    terms = (operands[0].double() * wanted[0]).abs().sum((0, 2))  # of a head: the sums are of at most so much
    assert wanted[3][:, 0].abs().max() < 1e-30
    # a rounding of FP32; the interpreter, which doesn't add as tensor cores do, comes to 2**-29
    assert (found - wanted[3]).abs().amax(0)[0] < 2**-24 * terms[0]
    assert far(found[:, 1], wanted[3][:, 1]) < (1e-5 if dtype == torch.float32 else 2**-6)
    args["log_decay_RV"][:, 0] = -6  # control: a head that keeps exp(-6) of a row
    assert (found - in_float64()[3]).abs().amax(0)[0] > 2**-20 * terms[0]


def test_gradients_with_checkpointing() -> None:
    args = made([130, 70])

    def call(a: Args) -> Tensor:
        return gated_delta(*(a[n] for n in OPERANDS), None, packed_rows(a), program=program())

    def again(a: Args) -> Tensor:
        return checkpoint(lambda *operands: call({**a, **dict(zip(OPERANDS, operands))}), *(a[n] for n in OPERANDS), use_reentrant=False)

    found = gradients(call, args, OPERANDS)
    assert_same_bytes(gradients(again, args, OPERANDS), found)
    with pytest.raises(LawBroken):
        assert_same_bytes(gradients(again, args, OPERANDS, seed=1)[1], found[1])


def test_memory_of_the_backward() -> None:
    """In the size of one [rows, value heads, width] tensor in BF16: 13.4 by the shapes, so 20 leaves no room for three more in FP32."""
    args = made([1024] * 4)
    operands = [args[name] for name in OPERANDS]
    rows = packed_rows(args)
    grad = torch.ones_like(args["v_RVE"])
    kernels_backward.gated_delta_backward(grad, None, *operands, None, rows)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels_backward.gated_delta_backward(grad, None, *operands, None, rows)
    assert (torch.cuda.max_memory_allocated() - before) < 20 * grad.numel() * 2


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("lengths", [[1000], [65, 129, 3]])
def test_flash_linear_attention_agrees(lengths: list[int]) -> None:
    args = made(lengths)
    rival = resolve("unaligned", "cuda", torch.bfloat16)
    found, other = (gated_delta(*(args[n] for n in OPERANDS), None, packed_rows(args), program=p) for p in (program(), rival))
    assert far(found, other) < 2**-6


def test_rival_by_tokens_agrees() -> None:
    args = made([200, 3])
    rows = packed_rows(args)
    found = gated_delta(*(args[n] for n in OPERANDS), None, rows, program=program())
    other = rival_tokens.gated_delta(*(args[n] for n in OPERANDS), None, rows)[0]
    assert far(found, other) < 2**-6
