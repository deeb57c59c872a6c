"""Whole Qwen3.5 models: every way to push the same tokens gives the same bytes and leaves the same state. Faults are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import model_harness
import pytest
import torch
from model_harness import (
    Models,
    Session,
    assert_alone_is_packed,
    assert_modes_agree,
    assert_rows_and_splits,
    assert_same_states,
    counted,
    other_in_recomputation,
    other_under_grad,
    packed,
    pushed,
    rows_in_training,
)
from torch import Tensor

from weights_tools.make_tiny import make_tiny
from zoo.common import ops
from zoo.common.ops.causal_conv import CARRY
from zoo.common.ops.contract import Contract
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.rows import Rows
from zoo.qwen3_5 import MOE_SIZES, SIZES, Qwen35Config, Qwen35ForRL, Qwen35ForServing
from zoo.testing import LawBroken, assert_same_bytes, split_plans
from zoo.verify.ladder import Ladder
from zoo.verify.map import operation_map
from zoo.verify.shrink import reproduction
from zoo.verify.subject import Settings, build, config_of

SMALL = replace(
    SIZES["tiny"],
    layers=2,
    full=(False, True),
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=16,
    rope_dim=8,
    key_heads=1,
    value_heads=2,
    key_dim=16,
    value_dim=16,
    intermediate=64,
    vocabulary=300,
)
CONFIGS: dict[str, Qwen35Config] = {
    "dense": SIZES["tiny"],
    "moe": MOE_SIZES["tiny"],
    "small": SMALL,
    "tied": replace(SMALL, tied=True),
    # sums over 1024 and more, whose order BF16 rounding does not hide
    "wide": replace(SMALL, hidden=1024, intermediate=1056),
    "full layer first, three values a key": replace(SMALL, layers=3, full=(True, False, False), key_heads=2, value_heads=6, value_dim=32),
    "five experts": replace(
        MOE_SIZES["tiny"],
        layers=2,
        full=(False, True),
        hidden=64,
        experts=5,
        experts_per_token=3,
        expert_intermediate=24,
        shared_intermediate=40,
    ),
}
LENGTHS = (70, 1, 65)
EDGES = (1, 3, 4, 63, 64, 65, 127, 128, 129)
SEED = {"seed": 1, "device": "cpu"}
MODELS = Models(CONFIGS, Qwen35ForRL, Qwen35ForServing)
fresh = MODELS.fresh
trainer = MODELS.trainer
server = MODELS.server
scores = torch.no_grad()(model_harness.scores)


def documents_of(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return MODELS.documents(name, lengths)


def trained_states(model: Qwen35ForRL, document: Tensor, lengths: list[int]) -> dict[int, dict[str, Tensor]]:
    """What a server would hold after so many tokens, from what training's ops were given."""
    seen: dict[str, list[Any]] = {"gated_delta": [], "causal_conv": [], "attention": []}

    def keep(contract: Contract, call: dict[str, Any], result: Any) -> None:
        if contract.name in seen:
            seen[contract.name].append(call["args"])

    with torch.no_grad(), ops.watch(keep):
        model.score(*packed([document]))

    @cache
    def states(first: int) -> list[Tensor]:
        """Of every recurrent layer after whole chunks, each chunk by the op's own seam."""
        if not first:
            return [torch.zeros(model.config.value_heads, model.config.key_dim, model.config.value_dim) for _ in seen["gated_delta"]]
        chunk = slice(first - CHUNK, first)
        rows = Rows.packed(torch.tensor([0, CHUNK]))
        return [
            ops.gated_delta_states(*(t[chunk] for t in operands[:5]), before[None], rows, program=model.program)[1][0]
            for operands, before in zip(seen["gated_delta"], states(first - CHUNK))
        ]

    out = {}
    for length in lengths:
        first = length // CHUNK * CHUNK
        start = states(first)
        rows = {  # of the live chunk, heads first
            f"delta_{name}": torch.stack([operands[i][first:length].transpose(0, 1) for operands in seen["gated_delta"]])
            for i, name in ((1, "k"), (2, "v"), (4, "beta"))
        }
        before = [torch.cat([torch.zeros_like(x[:CARRY]), x[:length]])[-CARRY:] for x, *_ in seen["causal_conv"]]
        out[length] = {
            **rows,
            "delta_start": torch.stack(start),
            "delta_rounded": torch.stack(start).to(model.program.torch_dtype),
            "delta_carry": torch.stack(before),
            "k": torch.stack([history.k[:length] for _, history, *_ in seen["attention"]]),
            "v": torch.stack([history.v[:length] for _, history, *_ in seen["attention"]]),
        }
    return out


class TestWaysToPush:
    """Alone, packed, whole, in chunks, a row at a time, in training."""

    @pytest.mark.parametrize("name", CONFIGS)
    def test_decode_is_prefill_is_training(self, name: str) -> None:
        documents = documents_of(name)
        model = server(name)
        plans = split_plans(LENGTHS, edges=(16, CHUNK))
        trained = scores(trainer(name), documents)
        found, stepped = pushed(model, documents, plans["a row at a time"])
        assert_same_bytes(found, trained, "a row at a time")
        chosen = ("whole", "in pieces of 7", "cut at 64", "cut at 63", "cut at 65", "one sequence after another", "at random")
        for plan in chosen if name == "small" else chosen[:3]:
            found, seen = pushed(model, documents, plans[plan])
            assert_same_bytes(found, trained, plan)
            assert_same_states(seen, stepped, plan)

    def test_at_every_edge_of_a_chunk(self) -> None:
        documents = documents_of("small", EDGES)
        plans = split_plans(EDGES, edges=(CHUNK,))
        trained = scores(trainer("small"), documents)
        found, stepped = pushed(server("small"), documents, plans["a row at a time"])
        assert_same_bytes(found, trained)
        for plan in ("whole", "in pieces of 63", "in pieces of 64", "in pieces of 65", "at random"):
            found, seen = pushed(server("small"), documents, plans[plan])
            assert_same_bytes(found, trained, plan)
            assert_same_states(seen, stepped, plan)

    @pytest.mark.parametrize("name", ["dense", "moe"])
    def test_long_documents_and_what_training_would_cache(self, name: str) -> None:
        """593 and 1000 tokens: prefilled with cuts anywhere, decoded across a chunk's end; segments of keys end at 256."""
        documents = documents_of(name, (593, 1000))
        steps = ((17, 300), (400, 340), (156, 315), *[(1, 1)] * 10, (10, 35))
        found, seen = pushed(server(name), documents, steps, 32)
        assert_same_bytes(found, scores(trainer(name), documents))
        for n, document in enumerate(documents):
            states = trained_states(trainer(name), document, [length for m, length in seen if m == n])
            for length, state in states.items():
                held = seen[n, length]
                assert set(held) - set(state) == {"delta_u", "delta_decay", "delta_inverse"}
                assert_same_bytes({key: held[key] for key in state}, state, f"{length} tokens")
                assert length < CHUNK or state["delta_start"].abs().max() > 1e-3
            with pytest.raises(LawBroken):  # the control: a state of one token less
                assert_same_bytes(
                    {key: seen[n, length][key] for key in state},
                    trained_states(trainer(name), document, [length - 1])[length - 1],
                )

    @pytest.mark.parametrize("name", CONFIGS)
    @torch.no_grad()
    def test_alone_is_packed(self, name: str) -> None:
        documents = documents_of(name)
        together = assert_alone_is_packed(trainer(name), documents)
        merged = scores(trainer(name), [torch.cat(documents)])[0].split(LENGTHS)
        assert_same_bytes(merged[0][:-1], together[0][:-1])
        with pytest.raises(LawBroken):  # the control: documents that read each other
            assert_same_bytes(merged[2][:-1], together[2][:-1])

    @pytest.mark.parametrize("config", [SMALL, CONFIGS["five experts"]], ids=["dense", "moe"])
    @torch.no_grad()
    def test_the_transformers_program_keeps_rows_and_splits(self, config: Qwen35Config) -> None:
        names = {**SEED, "program": "transformers"}
        model = Qwen35ForRL.from_config(config, **names)
        serving = Qwen35ForServing.from_config(config, **names)
        documents = documents_of("small")
        plans = split_plans(LENGTHS, edges=(16,))
        together = assert_rows_and_splits(model, serving, documents, {n: plans[n] for n in ("whole", "a row at a time")})
        with pytest.raises(LawBroken):  # the control: another program is another arithmetic
            assert_same_bytes(scores(trainer("small"), documents), together)

    @pytest.mark.parametrize("name", ["small", "five experts"])
    def test_a_prompt_token_matters_to_what_follows_and_to_nothing_before(self, name: str) -> None:
        document = documents_of(name)[0]
        changed = document.clone()
        changed[11] = (changed[11] + 1) % CONFIGS[name].vocabulary
        before = scores(trainer(name), [document])[0]
        after = scores(trainer(name), [changed])[0]
        assert_same_bytes(after[:10], before[:10])
        assert (after[11:-1] != before[11:-1]).float().mean() > 0.95


# faults, each in the server alone


class ForgetsItsCarry(Qwen35ForServing):
    """The convolution begins anew with every push."""

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: Any, page_table_NB: Tensor) -> Tensor:
        memory.tensors()["carry_SWC"].zero_()
        return super().hidden_rows(ids_R, rows, memory, page_table_NB)


class TwoSlotsSwapped(Qwen35ForServing):
    """Every push but the first finds its state in the neighbour's slot."""

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: Any, page_table_NB: Tensor) -> Tensor:
        if rows.max_length > rows.max_rows:
            page_table_NB = torch.cat([page_table_NB[:, :1].flip(0), page_table_NB[:, 1:]], 1)
        return super().hidden_rows(ids_R, rows, memory, page_table_NB)


class GridFromThePush(Qwen35ForServing):
    """Chunks lie on the grid of what is pushed: the recurrent layers are told that a prompt's second part is a new document."""

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: Any, page_table_NB: Tensor) -> Tensor:
        layers = memory.view(page_table_NB)
        counts = (rows.starts_N1[1:] - rows.starts_N1[:-1]).tolist()
        anew = Rows.pushed(counts, None, "cpu")
        carry = self.model.enter(ids_R)
        for layer, held, full in zip(self.model.layers, layers, self.config.full, strict=True):
            carry = layer(carry, rows if full else anew, held, self.model.rotary)
        return self.model.leave(carry)


def rounded_decay(model: Qwen35ForServing) -> None:
    """A_log as a BF16 load in transformers has it."""
    with torch.no_grad():
        a_log = model.model.layers[0].mixer.gate.a_log
        a_log.copy_(a_log.bfloat16())


@pytest.mark.parametrize("fault", [ForgetsItsCarry, TwoSlotsSwapped, GridFromThePush])
def test_a_planted_fault_is_caught(fault: type[Qwen35ForServing]) -> None:
    documents = documents_of("small", (70, 70))
    plan = ((33, 33), (37, 37))
    model = server("small")
    assert_same_bytes(pushed(model, documents, plan)[0], scores(trainer("small"), documents))
    model.__class__ = fault
    with pytest.raises(LawBroken):
        assert_same_bytes(pushed(model, documents, plan)[0], scores(trainer("small"), documents))


def test_a_rounded_decay_is_caught() -> None:
    documents = documents_of("small")
    model = server("small")
    assert model.model.layers[0].mixer.gate.a_log.dtype == torch.float32
    rounded_decay(model)
    with pytest.raises(LawBroken):
        assert_same_bytes(pushed(model, documents, (LENGTHS,))[0], scores(trainer("small"), documents))


class TestSlots:
    @pytest.mark.parametrize("at", [30, 63, 64, 90])
    def test_a_sequence_may_move_and_fork(self, at: int) -> None:
        """To another slot, inside and at the end of a chunk; the copy has tokens of its own, the old slot becomes NaN."""
        documents = documents_of("small", (131, 131))
        documents[1][:at] = documents[0][:at]
        session = Session(server("small"), documents)
        session.push((at, 0))
        for part in session.memory.slot_parts:
            part.copy(session.slots[0], session.slots[1])
        for name in ("k", "v"):
            pool = session.memory.tensors()[name]
            pool[:, session.pages[1]] = pool[:, session.pages[0]]
        session.done[1] = at
        session.found[1] = [session.found[0][0].clone()]
        free = next(s for s in range(1, session.memory.slots + 1) if s not in session.slots)
        for part in session.memory.slot_parts:
            part.copy(session.slots[0], free)
            for pool in part.pools.values():
                pool[:, session.slots[0]] = torch.nan
        session.slots[0] = free
        while min(session.done) < 131:
            session.push((1, 1))
        trained = scores(trainer("small"), documents)
        assert_same_bytes(session.scores()[0], trained[0])
        assert_same_bytes(session.scores()[1][at:], trained[1][at:])
        with pytest.raises(LawBroken):
            assert_same_bytes(session.scores()[1][at:], trained[0][at:])

    def test_a_snapshot_is_the_state(self) -> None:
        documents = documents_of("small", (200, 200))
        documents[1][:128] = documents[0][:128]
        session = Session(server("small"), documents)
        session.push((100, 0))
        with pytest.raises(ValueError, match="multiple of 64 tokens, not at 100"):
            session.memory.snapshot(session.slots[0], 100, session.pages[0])
        session.push((28, 0))
        snapshot = session.memory.snapshot(session.slots[0], 128, session.pages[0])
        assert snapshot.length == 128
        session.push((72, 0))
        for part in session.memory.slot_parts:
            for pool in part.pools.values():
                pool[:, session.slots[1]] = torch.nan
        session.memory.restore(session.slots[1], session.pages[1], snapshot)
        session.pages[1][:8] = session.pages[0][:8]  # 128 tokens of 16 a page
        session.done[1] = 128
        session.push((0, 3))
        while session.done[1] < 200:
            session.push((0, 1))
        trained = scores(trainer("small"), documents)
        assert_same_bytes(session.scores()[1], trained[1][128:])
        again = Session(server("small"), documents)
        again.push((200, 200))
        assert_same_bytes(again.written(1), session.written(1))
        with pytest.raises(LawBroken):  # the control: the other document's end
            assert_same_bytes(again.written(0), session.written(1))

    @pytest.mark.parametrize("page", [16, 64, 80, 128])
    def test_a_snapshot_takes_the_open_page_along(self, page: int) -> None:
        """At 192 tokens: a sequence with other pages that shares the full ones only goes on as the first one does."""
        documents = documents_of("small", (200, 200))
        documents[1][:192] = documents[0][:192]
        session = Session(server("small"), documents, page)
        full = 192 // page
        session.push((192, 0))
        snapshot = session.memory.snapshot(session.slots[0], 192, session.pages[0])
        assert {rows.shape[1] for rows in snapshot.rows.values()} == {192 % page} and set(snapshot.rows) == {"k", "v"}
        session.push((8, 0))
        session.pages[1][:full] = session.pages[0][:full]
        session.memory.restore(session.slots[1], session.pages[1], snapshot)
        session.done[1] = 192
        session.push((0, 8))
        again = Session(server("small"), documents)
        again.push((200, 200))
        assert_same_bytes(again.written(0), session.written(0))
        assert_same_bytes(again.written(1), session.written(1))
        if full < 192 / page:  # the control: the open page's rows are another's
            session.memory.tensors()["k"][:, session.pages[1][full], 0] += 1
            with pytest.raises(LawBroken):
                assert_same_bytes(again.written(1), session.written(1))

    def test_slots_and_snapshots_are_counted(self) -> None:
        for page, rows in ((16, 0), (64, 0), (80, 64), (128, 64)):
            memory = server("small").make_memory(8, page, slots=2)
            assert (memory.slots, memory.snapshots, memory.grain) == (2, 2, 64)
            taken = [memory.snapshot(1, 64 * n, range(1, 8)) for n in range(1, 12) if 64 * n < 7 * page]
            sizes = [sum(t.nbytes for t in (*s.rows.values(), *s.slot.values())) for s in taken]
            every = memory.tensors()
            one = (every["k"].nbytes + every["v"].nbytes) // (8 * page)
            slot = (every["start_SVKE"].nbytes + every["carry_SWC"].nbytes) // 3
            assert max(sizes) <= memory.snapshot_nbytes == slot + one * rows
            assert memory.nbytes == sum(t.nbytes for t in every.values()) + 2 * memory.snapshot_nbytes

    def test_page_size_follows_the_head(self) -> None:
        assert server("small").make_memory(2, slots=1).page_size == 128
        wide = replace(SMALL, head_dim=256, hidden=32)
        assert Qwen35ForServing.from_config(wide, **SEED).make_memory(2, slots=1).page_size == 80


EXTREMES: dict[str, tuple[list[float], list[float], float]] = {  # A_log and dt_bias by head, scale of b's rows
    "decay near 1": ([-20.0, -12.0], [0.0, -3.0], 1.0),
    "decay near 0": ([5.0, 3.0], [20.0, 8.0], 1.0),
    "one head of each": ([-20.0, 5.0], [0.0, 20.0], 1.0),
    "beta near 0 and 1": ([0.0, -1.0], [-3.0, -4.0], 60.0),
    "keeps everything, beta near 0 and 1": ([-30.0, -30.0], [0.0, 0.0], 60.0),
}


def extreme(model: Any, kind: str) -> Any:
    a_log, dt_bias, scale = EXTREMES[kind]
    with torch.no_grad():
        mixer = model.model.layers[0].mixer
        mixer.gate.a_log.copy_(torch.tensor(a_log))
        mixer.gate.dt_bias.copy_(torch.tensor(dt_bias))
        heads = model.config.value_heads
        mixer.qkvzba.weight[-2 * heads : -heads] *= scale
    return model


@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_gates(kind: str) -> None:
    model = extreme(fresh("small"), kind)
    serving = extreme(server("small"), kind)
    documents = documents_of("small", (131, 66))
    reach = {}

    def observe(contract: Contract, call: dict[str, Any], result: Any) -> None:
        if contract.name == "delta_gate":
            reach["decay"] = result[0].exp()
            reach["beta"] = result[1]

    with ops.watch(observe):
        trained = scores(model, documents)
    if "decay near 1" in kind or "everything" in kind:
        assert reach["decay"].min() > 0.9999
    if "near 0" in kind and "decay" in kind:
        assert reach["decay"].max() < 1e-4
    if "beta" in kind:
        assert reach["beta"].min() < 1e-6 and reach["beta"].max() == 1
    assert torch.cat(trained).isfinite().all()
    plans = split_plans((131, 66), edges=(CHUNK,))
    found, stepped = pushed(serving, documents, plans["a row at a time"])
    assert_same_bytes(found, trained)
    found, seen = pushed(serving, documents, plans["in pieces of 7"])
    assert_same_bytes(found, trained)
    assert_same_states(seen, stepped, "in pieces of 7")
    ids, starts = packed(documents)
    (-model.score(ids, starts).mean()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises(LawBroken):  # the control: the usual gates
        assert_same_bytes(trained, scores(trainer("small"), documents))


@pytest.mark.parametrize("name", ["dense", "moe", "tied"])
def test_no_mode_matters(name: str) -> None:
    assert_modes_agree(fresh(name), documents_of("small"))


@pytest.mark.parametrize("fault", [other_under_grad, other_in_recomputation])
def test_a_mode_that_matters_is_caught(fault: Callable[..., Any]) -> None:
    model = fresh("small")
    model.model.layers[1].input_norm.register_forward_hook(fault)
    with pytest.raises(LawBroken):
        assert_modes_agree(model, documents_of("small"))


class TestGradients:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_every_parameter_gets_one(self, name: str) -> None:
        model = fresh(name)
        ids, starts = packed(documents_of(name, (200, 70)))
        (-model.score(ids, starts).mean()).backward()
        for parameter, p in model.named_parameters():
            assert p.requires_grad and p.grad is not None and p.grad.dtype == p.dtype, parameter
            assert p.grad.isfinite().all() and p.grad.any(), parameter
            if p.dim() == 1:
                assert (p.grad != 0).all(), parameter

    def test_documents_do_not_mix(self) -> None:
        """A document's tokens get no gradient from the other's scores, through neither kind of layer."""
        model = fresh("small")
        half = CONFIGS["small"].vocabulary // 2
        first, second = (d % half for d in documents_of("small", (70, 66)))
        ids, starts = packed([first, second + half])
        for begin, end, own in ((0, 70, slice(0, half)), (70, 136, slice(half, None))):
            model.zero_grad()
            model.score(ids, starts)[begin:end].sum().backward()
            grad = model.model.embed.weight.grad.clone()
            assert grad[own].any()
            grad[own] = 0
            assert not grad.any()
        model.zero_grad()  # the control: one document of both
        model.score(ids, torch.tensor([0, 136]))[70:].sum().backward()
        assert model.model.embed.weight.grad[:half].any()


class TestRowsThatEnterEachOp:
    RECURRENT: ClassVar[dict[str, int]] = dict.fromkeys(("causal_conv", "l2_norm", "delta_gate", "gated_delta", "gated_rms_norm"), 3)
    CALLS: ClassVar[dict[str, dict[str, int]]] = {  # calls of each op while a row passes through three recurrent layers and one other
        "dense": {
            **RECURRENT,
            "embed": 1,
            "rms_norm": 9,
            "linear": 16,
            "norm_rope": 1,
            "attention": 1,
            "output_gate": 1,
            "swiglu": 4,
        },
        "moe": {
            **RECURRENT,
            "embed": 1,
            "rms_norm": 9,
            "linear": 24,
            "norm_rope": 1,
            "attention": 1,
            "output_gate": 5,
            "swiglu": 4,
            "route": 4,
            "experts": 4,
            "combine": 4,
        },
    }

    @pytest.mark.parametrize("name", CALLS)
    def test_decoding_pushes_one_row_per_token(self, name: str) -> None:
        """Also on the row that closes a chunk."""
        document = documents_of(name)[0]
        prompt = 60
        drawn = 9
        session = Session(server(name), [document])
        with counted() as seen:
            session.push((prompt,))
        del seen["log_prob"]
        assert seen == {op: calls * prompt for op, calls in self.CALLS[name].items()}
        for _ in range(drawn):
            with counted() as seen:
                session.push((1,))
            del seen["log_prob"]
            assert seen == self.CALLS[name]

    @pytest.mark.parametrize("name", CALLS)
    def test_training_pushes_every_token_once(self, name: str) -> None:
        assert rows_in_training(trainer(name), documents_of(name)) == {op: n * sum(LENGTHS) for op, n in self.CALLS[name].items()}

    def test_a_hidden_rerun_is_seen(self) -> None:
        document = documents_of("dense")[0]
        with counted() as seen:
            for length in (60, 61):  # the chunk again for every token
                Session(server("dense"), [document[:length]]).push((length,))
        assert seen["gated_delta"] > self.CALLS["dense"]["gated_delta"] * 61


def test_padded_is_packed() -> None:
    documents = documents_of("small", (66, 3))
    ids = torch.stack([documents[0], torch.cat([torch.full((63,), 5), documents[1]])])
    mask = torch.ones_like(ids)
    mask[1, :63] = 0
    flat, starts = packed(documents)
    out = trainer("small")(ids, attention_mask=mask)
    expected = trainer("small")(flat, cu_seqlens=starts)
    assert_same_bytes(out.logits[mask.bool()], expected.logits)
    with pytest.raises(LawBroken):  # the control: pads that are read
        assert_same_bytes(trainer("small")(ids).logits[mask.bool()], expected.logits)


def test_lengths_of_a_session_are_told_apart() -> None:
    """The harness itself: a state of another token boundary is another state."""
    documents = documents_of("small", (70,))
    seen = pushed(server("small"), documents, ((63,), (1,), (6,)))[1]
    for a, b in pairwise(seen.values()):
        with pytest.raises(LawBroken):
            assert_same_bytes(a, b)


def climbed(arch: str, rungs: tuple[int, ...], fault: type[Qwen35ForServing] | None = None) -> Any:
    subject = build(arch, checkpoint=None, device="cpu")
    if fault is not None:
        subject.server.__class__ = fault
    return Ladder(subject, Settings((1, 65, 130), tail=8, page_sizes=(16,), steps=1, drawn=4)).climb(rungs)


class WrongOnClosing(Qwen35ForServing):
    """The state of a closed chunk loses its lowest bits on the way into its slot; what rows read, rounded, does not."""

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: Any, page_table_NB: Tensor) -> Tensor:
        out = super().hidden_rows(ids_R, rows, memory, page_table_NB)
        start = memory.tensors()["start_SVKE"]
        start.copy_((start.view(torch.int32) & ~3).view(torch.float32))
        return out


class TestLadder:
    @pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
    def test_all_five_rungs(self, arch: str) -> None:
        result = climbed(arch, (1, 2, 3, 4, 5))
        assert result.ok and {row.rung for row in result.rows} == {1, 2, 3, 4, 5}
        assert all(row.compared > 0 and row.differing == 0 and row.k3 in (None, 0.0) for row in result.rows)

    def test_a_lost_carry_is_named(self, tmp_path: Path) -> None:
        result = climbed("qwen3_5", (3,), ForgetsItsCarry)
        first = result.first_divergence
        assert not result.ok and first["op"] == "causal_conv" and first["layer"] == "model.layers.0.mixer" and first["position"] > 0
        script = reproduction(result.divergence, tmp_path / "again", result.names)
        assert "DeltaState(" not in script.read_text() and "ConvCarry(" in script.read_text()

    def test_the_map_tells_pages_from_slots(self) -> None:
        places = {place.op: place for place in operation_map(build("qwen3_5", checkpoint=None, device="cpu"))}
        launched = [places["gated_delta"].launched[phase] for phase in ("training", "decode")]
        assert "whole documents" in launched[0] and "a slot a sequence" in launched[1]
        assert "pages of" in places["attention"].launched["decode"]

    def test_a_wrong_state_is_seen_in_its_slot(self) -> None:
        result = climbed("qwen3_5", (3,), WrongOnClosing)
        assert not result.rows[0].ok and any(layer.isdecimal() for layer, _ in result.heat)

    def test_fewer_layers_keep_both_kinds(self) -> None:
        assert build("qwen3_5_moe", checkpoint=None, device="cpu", layers=4).trainer.config.full == (False, False, False, True)
        assert config_of("qwen3_5_moe", "35b-a3b", 8).full == (False, False, False, True) * 2
        with pytest.raises(ValueError, match="the first 2 layers have none of full attention"):
            build("qwen3_5", checkpoint=None, device="cpu", layers=2)

    def test_checkpoints_of_both_shapes(self, tmp_path: Path) -> None:
        for vision in (False, True):
            path = make_tiny("qwen3_5", tmp_path / str(vision), vision=vision)
            assert build("qwen3_5", checkpoint=str(path), device="cpu").server.config.wrapped == vision
            with pytest.raises(ValueError, match="checkpoint, not 'qwen3_5_moe'"):
                build("qwen3_5_moe", checkpoint=str(path), device="cpu")
