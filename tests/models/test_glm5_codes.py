"""GLM-5 with a selector of FP8 codes: its program's cached bytes, choices and draws are equal however tokens are pushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_harness import Family, drive, numbers, scored, trained
from model_harness import assert_alone_is_packed, assert_same_states, counted, packed, pushed, rows_in_training, scores
from prefill_harness import Sequences, rerun, same
from test_glm5 import CONFIGS, LENGTHS, REQUESTS
from torch import Tensor

from zoo.common import ops, serving
from zoo.common.engine import Engine
from zoo.common.history import CodedRows
from zoo.common.memory import Memory, PagedLatents
from zoo.common.ops.contract import Contract
from zoo.common.ops.fp8_select.kernels import joined_pages
from zoo.common.program import CODED_INDEX, PROGRAMS
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.rows import Rows
from zoo.glm5 import GLMForRL, GLMForServing
from zoo.testing import LawBroken, assert_same_bytes, split_plans
from zoo.verify import ways
from zoo.verify.subject import Subject
from zoo.verify.trace import first_divergence

PROGRAM = "aligned, coded index"


class Coded(Family):
    def fresh(self, name: str, seed: int = 1) -> Any:
        return self.rl.from_config(self.configs[name], seed=seed, device="cpu", program=PROGRAM)

    def server(self, name: str, seed: int = 1, **changes: Any) -> Any:
        return self.serving.from_config(replace(self.configs[name], **changes), seed=seed, device="cpu", program=PROGRAM)


FAMILY = Coded({"three choose": CONFIGS["three choose"]}, GLMForRL, GLMForServing, REQUESTS)
KIND = "three choose"


@pytest.fixture(autouse=True, scope="module")
def program() -> Iterator[None]:
    """BF16 weights under the selector of `fp8`, which takes a checkpoint of codes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROGRAMS, PROGRAM, PROGRAMS["aligned"].derived(instead=CODED_INDEX))  # type: ignore[arg-type]
        yield


def test_the_program_of_published_codes_has_this_selector() -> None:
    assert PROGRAMS["fp8"].instead == CODED_INDEX and not PROGRAMS["aligned"].instead
    trainer, server = FAMILY.twins(KIND)
    lines = trainer.fingerprint().program
    assert lines["op.fp8_select"].startswith("fp8_select/") and "op.fp8_quantise" in lines and "op.select" not in lines
    assert lines == server.fingerprint().program
    plain = GLMForRL.from_config(CONFIGS[KIND], seed=1, device="cpu").fingerprint().program
    assert "op.select" in plain and "op.fp8_select" not in plain
    run: set[str] = set()
    with ops.watch(lambda contract, arguments, result: run.add(contract.name)):
        trainer(*packed(FAMILY.documents(KIND, LENGTHS)))
    assert {"fp8_select", "fp8_quantise"} <= run and "select" not in run


@torch.no_grad()
def test_every_way_to_push_is_training() -> None:
    trainer, server = FAMILY.twins(KIND)
    documents = FAMILY.documents(KIND, LENGTHS)
    together = assert_alone_is_packed(trainer, documents)
    whole_states = None
    plans = split_plans(LENGTHS, (12, 16))
    for name in ("whole", "a row at a time", "in pieces of 7", "one sequence after another", "at random"):
        for page_size in (16,) if name != "at random" else (16, 5, 64):
            found, states = pushed(server, documents, plans[name], page_size)
            assert_same_bytes(found, together, name)
            whole_states = states if whole_states is None else whole_states
            assert_same_states(states, whole_states, name)
    assert whole_states is not None
    kept = next(iter(whole_states.values()))
    assert kept["index_codes"].dtype == torch.float8_e4m3fn and kept["index_scales"].dtype == torch.float32 and "index" not in kept


class Stale(PagedLatents):
    """A fault: a row's scale is written one launch late."""

    def append_codes(self, codes_RE: Tensor, scales_R1: Tensor, rows: Rows) -> CodedRows:
        assert self.scales_PS1 is not None
        before = self.scales_PS1.clone()
        found = super().append_codes(codes_RE, scales_R1, rows)
        return replace(found, scales=before)


@torch.no_grad()
def test_a_late_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server = FAMILY.twins(KIND)
    documents = FAMILY.documents(KIND, LENGTHS)
    plan = split_plans(LENGTHS, (16,))["in pieces of 7"]
    view = Memory.view

    def stale(self: Memory, table: Tensor) -> list[Any]:
        return [Stale(layer.latent_PSC, layer.index_PSE, layer.pager, layer.scales_PS1) for layer in view(self, table)]

    monkeypatch.setattr(Memory, "view", stale)
    with pytest.raises(LawBroken):
        assert_same_bytes(pushed(server, documents, plan)[0], scores(trainer, documents))


def test_pages_lie_as_deepgemm_reads_them() -> None:
    """At the published widths and the family's page: 64 rows of 128 codes, then their scales, 8448 bytes a page."""
    server = GLMForServing.from_config(replace(CONFIGS[KIND], index_dim=128), seed=1, device="cpu", program=PROGRAM)
    memory = server.make_memory(5)
    layer = memory.view(memory.table([[3]], [], 1))[0]
    whole = joined_pages(CodedRows(layer.index_PSE, layer.scales_PS1, torch.zeros(1, 1, dtype=torch.int32)))
    assert whole is not None and whole.shape == (5, 64, 1, 132) and whole.stride(0) == 8448
    held = sum(tensor.nbytes for name, tensor in memory.tensors().items() if name.startswith("index"))
    assert held == sum(CONFIGS[KIND].full) * 5 * 8448


@torch.no_grad()
def test_a_nan_score_is_an_error_and_no_choice() -> None:
    trainer, server = FAMILY.twins(KIND)
    documents = FAMILY.documents(KIND, LENGTHS)
    scores(trainer, documents)  # the control
    biases = [model.model.layers[0].attention.indexer.norm.bias for model in (trainer, server)]
    kept = [bias.clone() for bias in biases]
    for bias in biases:
        bias[:2] = torch.inf
    try:
        with pytest.raises(ValueError, match="^fp8_select: an earlier token's score is NaN"):
            scores(trainer, documents)
        engine = Engine(server, pages=32, max_batch=2)
        with pytest.raises(ValueError, match="^fp8_select: an earlier token's score is NaN"):
            engine.generate([documents[0][:30].tolist()], SamplingParams(max_new_tokens=2))
        assert engine.generate([documents[0][:8].tolist()], SamplingParams(max_new_tokens=2))[0].exact
    finally:
        for bias, value in zip(biases, kept, strict=True):
            bias.copy_(value)


@torch.no_grad()
def test_most_of_the_choice_is_the_bf16_selectors() -> None:
    """Codes of three bits of mantissa move few members of a choice; keys of other tokens move most."""
    documents = FAMILY.documents(KIND, LENGTHS)

    def chosen(model: Any) -> Tensor:
        found: list[Tensor] = []

        def observe(contract: Contract, arguments: dict[str, Any], result: Any) -> None:
            if contract.name in ("select", "fp8_select"):
                found.append(result)

        with ops.watch(observe):
            model(*packed(documents))
        return found[0]  # of the first layer, whose rows are alike

    coded = chosen(FAMILY.trainer(KIND))
    plain = chosen(GLMForRL.from_config(CONFIGS[KIND], seed=1, device="cpu"))
    other = chosen(GLMForRL.from_config(CONFIGS[KIND], seed=2, device="cpu"))
    rows = torch.arange(sum(LENGTHS))[34 + 12 :]  # of the last document, those that choose

    def share(a: Tensor, b: Tensor) -> float:
        return float((a[rows][:, :, None] == b[rows][:, None]).any(2).float().mean())

    assert share(coded, plain) > 0.9 > share(coded, other)
    assert not torch.equal(coded, plain)


def test_each_row_enters_the_selector_once() -> None:
    model = FAMILY.fresh(KIND)
    documents = FAMILY.documents(KIND, LENGTHS)
    seen = rows_in_training(model, documents)
    rows = sum(LENGTHS)
    assert seen["fp8_select"] == seen["fp8_quantise"] == rows * sum(model.config.full) and not seen["select"]


def test_training_goes_through_it() -> None:
    model = FAMILY.fresh(KIND)
    documents = FAMILY.documents(KIND, LENGTHS)
    ids, starts = packed(documents)
    (-model.score(ids, starts).mean()).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad) == (".indexer." in name or name.endswith("route.bias")), name


@torch.no_grad()
def test_a_captured_decode_step_is_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "captured", rerun)
    server = FAMILY.twins(KIND)[1]
    plain = Sequences(server, [30, 5, 44], 16)
    padded = Sequences(server, [30, 5, 44], 16)
    for sequences in (plain, padded):
        ids, rows, table = sequences.batch({0: 20, 1: 1, 2: 36})
        server.prefill(ids, rows, sequences.memory, table)
    graph = serving.DecodeGraph(server, padded.memory, 4, 4)
    for step, live in enumerate(([0, 1, 2], [2, 0], [2])):
        ids, rows, table = plain.batch(dict.fromkeys(live, 1))
        wanted = server.decode(ids, rows, plain.memory, table)
        ids, rows, table = padded.batch(dict.fromkeys(live, 1))
        assert same(graph.replay(ids, rows.positions_R, table), wanted), f"step {step}"
        assert all(same(a, b) for a, b in zip(plain.alive(), padded.alive(), strict=True)), f"step {step}"


@pytest.mark.parametrize("options", [{}, {"max_batch": 2, "chunk_rows": 7}, {"page_size": 64, "pages": 12}], ids=str)
def test_no_schedule_moves_a_byte(options: dict[str, Any]) -> None:
    engine = Engine(FAMILY.twins(KIND)[1], **{"pages": 40, "page_size": 16, **options})
    assert FAMILY.generate(engine) == FAMILY.baseline(KIND)


def test_the_trainer_draws_and_scores_the_same_bytes() -> None:
    trainer = FAMILY.trainer(KIND)
    for values in FAMILY.baseline(KIND):
        record = Completion.from_dict({**values, "request_id": "0"})
        again = trained(trainer, record)
        assert again == {name: getattr(record, name) for name in again}
        assert record.filtered_log_probs == scored(trainer, record, record.sampling)
    plain = GLMForRL.from_config(CONFIGS[KIND], seed=1, device="cpu")
    with pytest.raises(ValueError, match="program"):
        record.fingerprint.check(plain.fingerprint())


def test_a_cached_prefix_is_reused() -> None:
    engine = Engine(FAMILY.twins(KIND)[1], pages=40, page_size=16)
    prompt, params = REQUESTS[2]
    for cached in (0, 64):
        engine.add(prompt, params)
        with counted() as seen:
            [done] = drive(engine)
        assert seen["embed"] == len(prompt) - cached + params.max_new_tokens - 1
        assert numbers(done) == FAMILY.baseline(KIND)[2]


def test_the_first_divergence_is_named() -> None:
    """The ladder's way of looking sees the coded selector: equal, and where one layer's keys are coded from other numbers, there."""
    trainer = FAMILY.trainer(KIND)
    server = FAMILY.server(KIND)
    subject = Subject("glm5", trainer, server, {})
    subject.draw((40, 3))

    def found() -> Any:
        return first_divergence(
            (trainer, lambda tap: ways.exhaust(ways.train(subject, tap, [0, 1]))),
            (server, lambda tap: ways.exhaust(ways.decode(subject, tap, [0, 1], tail=20))),
        )

    assert found() is None
    indexer = server.model.layers[0].attention.indexer
    choose: Callable[..., Tensor] = indexer.choose

    def planted(q: Tensor, weights: Tensor, key: Tensor, rows: Rows, memory: Any) -> Tensor:
        return choose(q, weights.flip(1) if rows.max_rows == 1 else weights, key, rows, memory)

    indexer.choose = planted
    divergence = found()
    assert divergence is not None and divergence.key.op == "fp8_select"
