"""GLM-5: every way to push the same tokens gives the same log-probabilities and cached bytes; the engine draws what the trainer scores."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Family, drive, numbers, scored, tokens, trained
from model_harness import (
    assert_alone_is_packed,
    assert_modes_agree,
    assert_same_states,
    counted,
    other_in_recomputation,
    other_in_training,
    other_under_grad,
    packed,
    pushed,
    rows_in_training,
    scores,
)
from prefill_harness import Sequences, rerun, same
from torch import Tensor

from tests.memories import keys_memory
from tests.models import planted_latent
from zoo.common import serving
from zoo.common.engine import Engine
from zoo.common.history import TokenRows
from zoo.common.memory import Memory, PagedLatents
from zoo.common.ops.biased_route import Choice
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.rows import Rows
from zoo.glm5 import SIZES, GLMForRL, GLMForServing
from zoo.glm5.model import LatentAttention
from zoo.testing import LawBroken, assert_same_bytes, split_plans
from zoo.verify import ways
from zoo.verify.shrink import reproduction
from zoo.verify.subject import Subject
from zoo.verify.trace import first_divergence

SHAPE: dict[str, Any] = {
    "hidden": 64,
    "heads": 3,
    "query_rank": 48,
    "kv_rank": 32,
    "nope_dim": 16,
    "rope_dim": 8,
    "value_dim": 24,
    "index_dim": 16,
    "index_heads": 4,
    "index_top_k": 12,
    "intermediate": 64,
    "expert_intermediate": 16,
    "shared_intermediate": 16,
}
CONFIGS = {
    # few index heads: many scores are equal
    "three choose": replace(SIZES["tiny"], **SHAPE),
    "all choose": replace(
        SIZES["tiny"], **SHAPE, layers=2, full=(True, True), sparse=(True, False), choice=Choice(2, 4, 2, scale=1.5), tied=True
    ),
}
STEM = tokens(48, 99)
REQUESTS = [
    ([7], SamplingParams(seed=1, max_new_tokens=6)),
    (STEM[:16], SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_new_tokens=5)),
    (STEM + tokens(22, 3), SamplingParams(temperature=0.0, max_new_tokens=4)),
    (STEM + [4], SamplingParams(temperature=0.6, top_p=0.8, top_k=20, seed=3, max_new_tokens=5)),
]
FAMILY = Family(CONFIGS, GLMForRL, GLMForServing, REQUESTS)
LENGTHS = (33, 1, 70)
KINDS = tuple(CONFIGS)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_way_to_push_is_training(kind: str) -> None:
    trainer, server = FAMILY.twins(kind)
    documents = FAMILY.documents(kind, LENGTHS)
    together = assert_alone_is_packed(trainer, documents)
    whole_states = None
    plans = split_plans(LENGTHS, (12, 16))
    for name in ("whole", "a row at a time", "in pieces of 7", "in pieces of 13", "cut at 12", "one sequence after another", "at random"):
        for page_size in (16,) if name != "at random" else (16, 5, 64):
            found, states = pushed(server, documents, plans[name], page_size)
            assert_same_bytes(found, together, name)
            whole_states = states if whole_states is None else whole_states
            assert_same_states(states, whole_states, name)


def test_lists_are_kept_once_for_a_chain_of_layers() -> None:
    """Under checkpointing: of each choice one list lives until the backward, however many layers read it."""
    config = CONFIGS["three choose"]
    assert 0 < sum(config.full) < config.layers
    trainer = GLMForRL.from_config(config, seed=1, device="cpu").train()
    ids = torch.tensor(tokens(40, 3))

    def lists(model: GLMForRL) -> int:
        """Storages of lists that are alive behind a forward."""
        scored = model.score(ids, torch.tensor([0, 40]))
        gc.collect()
        shape = (40, config.index_top_k)
        alive = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype == torch.int32 and t.shape == shape]
        assert scored.requires_grad
        return len({t.data_ptr() for t in alive})

    trainer.gradient_checkpointing_enable()
    assert lists(trainer) == sum(config.full)
    # the control: a layer that copies what it is handed
    with pytest.MonkeyPatch.context() as patch:
        forward = LatentAttention.forward

        def copying(self: Any, x: Tensor, selected: Tensor | None, *rest: Any) -> Any:
            branch, chosen = forward(self, x, selected, *rest)
            return branch, chosen.clone()

        patch.setattr(LatentAttention, "forward", copying)
        assert lists(trainer) > sum(config.full)


class Stale(PagedLatents):
    """A fault: a row's index key is written one launch late."""

    def append_index(self, key_RE: Tensor, rows: Rows) -> TokenRows:
        assert self.index_PSE is not None
        before = TokenRows(self.index_PSE.clone(), self.pager.page_table_NB)
        super().append_index(key_RE, rows)
        return before


def stale(model: Any, view: Callable[[Tensor], list[PagedLatents]]) -> Callable[[Tensor], list[PagedLatents]]:
    return lambda table: [Stale(layer.latent_PSC, layer.index_PSE, layer.pager) for layer in view(table)]


@torch.no_grad()
def test_a_late_index_key_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server = FAMILY.twins("three choose")
    documents = FAMILY.documents("three choose", LENGTHS)
    plan = split_plans(LENGTHS, (16,))["in pieces of 7"]
    assert_same_bytes(pushed(server, documents, plan)[0], scores(trainer, documents))
    view = Memory.view
    monkeypatch.setattr(Memory, "view", lambda self, table: stale(self, lambda t: view(self, t))(table))
    with pytest.raises(LawBroken):
        assert_same_bytes(pushed(server, documents, plan)[0], scores(trainer, documents))


@torch.no_grad()
def test_a_nan_score_is_an_error_and_no_choice() -> None:
    """An index key of infinity makes inf - inf of its scores: nothing that is cached or returned is NaN, only the choice is void."""
    trainer, server = FAMILY.twins("three choose")
    documents = FAMILY.documents("three choose", LENGTHS)
    short = [documents[0][:12]]
    scores(trainer, documents)  # the control
    biases = [model.model.layers[0].attention.indexer.norm.bias for model in (trainer, server)]
    kept = [bias.clone() for bias in biases]
    for bias in biases:
        bias[:2] = torch.inf
        bias[2:4] = -torch.inf
    message = "^select: an earlier token's score is NaN"
    try:
        with pytest.raises(ValueError, match=message):
            scores(trainer, documents)
        ids, starts = packed(documents)
        with pytest.raises(ValueError, match=message):
            trainer(ids, cu_seqlens=starts)
        assert all(bool(found.isfinite().all()) for found in scores(trainer, short))  # at most top_k tokens: nothing is scored
        engine = Engine(server, pages=32, max_batch=2)
        with pytest.raises(ValueError, match=message):
            engine.generate([documents[0][:30].tolist()], SamplingParams(max_new_tokens=2))
        assert engine.generate([documents[0][:8].tolist()], SamplingParams(max_new_tokens=2))[0].exact
    finally:  # other tests have the same models
        for bias, value in zip(biases, kept, strict=True):
            bias.copy_(value)


@torch.no_grad()
def test_the_choice_matters() -> None:
    """The control of every comparison above: rows beyond top_k read other tokens than all of them, earlier rows the same."""
    trainer = FAMILY.trainer("three choose")
    documents = FAMILY.documents("three choose", LENGTHS)
    every = GLMForRL.from_config(replace(trainer.config, index_top_k=80), seed=1, device="cpu")
    few = scores(trainer, documents)
    all_ = scores(every, documents)
    assert_same_bytes([d[:12] for d in few], [d[:12] for d in all_])
    assert (few[2][12:] != all_[2][12:]).float().mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_modes(kind: str) -> None:
    assert_modes_agree(FAMILY.fresh(kind), FAMILY.documents(kind, (20, 3)))


@pytest.mark.parametrize("fault", [other_under_grad, other_in_training, other_in_recomputation])
def test_a_mode_that_matters_is_caught(fault: Callable[..., Any]) -> None:
    model = FAMILY.fresh("all choose")
    model.model.layers[1].post_norm.register_forward_hook(fault)
    with pytest.raises(LawBroken):
        assert_modes_agree(model, FAMILY.documents("all choose", (20, 3)))


def test_every_parameter_has_a_gradient_or_is_frozen_or_an_unused_expert() -> None:
    model = FAMILY.fresh("three choose")
    documents = FAMILY.documents("three choose", LENGTHS)
    ids, starts = packed(documents)
    (-model.score(ids, starts).mean()).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad) == (".indexer." in name or name.endswith("route.bias")), name
        assert parameter.grad is None or (bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any())), name


def test_each_row_enters_each_op_once() -> None:
    model = FAMILY.fresh("three choose")
    documents = FAMILY.documents("three choose", LENGTHS)
    seen = rows_in_training(model, documents)
    rows = sum(LENGTHS)
    c = model.config
    assert seen["sparse_attention"] == rows * c.layers and seen["select"] == seen["layer_norm"] == rows * sum(c.full)
    assert seen["head_linear"] == 2 * rows * c.layers and seen["biased_route"] == rows * sum(c.sparse)


@pytest.mark.parametrize("op", ["select", "sparse_attention"])
def test_planted_fault_is_named_and_reproduced(op: str, tmp_path: Path) -> None:
    """Cut to one row with the history that it reads, and shown again by a script of its own."""
    subject = Subject("glm5", *FAMILY.twins("three choose"), {})
    subject.draw((40, 3))
    documents = [0, 1]

    def found() -> Any:
        return first_divergence(
            (subject.trainer, lambda tap: ways.exhaust(ways.train(subject, tap, documents))),
            (subject.server, lambda tap: ways.exhaust(ways.decode(subject, tap, documents, tail=20))),
        )

    assert found() is None
    with planted_latent.planted(subject.server, op):
        divergence = found()
        assert divergence is not None and divergence.key.op == op and divergence.elements >= 1
        script = reproduction(divergence, tmp_path / "found", ("training", "decode"))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, str(script)], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert f"{divergence.elements} of " in done.stdout  # training's inputs are the whole document up to the row


@torch.no_grad()
def test_a_captured_decode_step_is_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its static rows, run again in place of a replay: padding sequences, and scores as wide as its pages."""
    monkeypatch.setattr(serving, "captured", rerun)
    server = FAMILY.twins("three choose")[1]
    plain = Sequences(server, [30, 5, 44], 16)
    padded = Sequences(server, [30, 5, 44], 16)
    for sequences in (plain, padded):
        ids, rows, table = sequences.batch({0: 20, 1: 1, 2: 36})
        server.prefill(ids, rows, sequences.memory, table)
    graph = serving.DecodeGraph(server, padded.memory, 4, 4)
    for step, live in enumerate(([0, 1, 2], [2, 0], [1, 2, 0], [2], [0, 1])):
        ids, rows, table = plain.batch(dict.fromkeys(live, 1))
        wanted = server.decode(ids, rows, plain.memory, table)
        ids, rows, table = padded.batch(dict.fromkeys(live, 1))
        assert same(graph.replay(ids, rows.positions_R, table), wanted), f"step {step}"
        assert all(same(a, b) for a, b in zip(plain.alive(), padded.alive(), strict=True)), f"step {step}"
    assert not same(graph.replay(ids, rows.positions_R - 1, table), wanted)


VARIANTS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "two at a time, 7 rows": {"max_batch": 2, "chunk_rows": 7},
    "nothing cached": {"chunk_rows": 33, "prefix_cache": False},
    "pages of 64": {"page_size": 64, "pages": 12},
    "few pages": {"pages": 9, "chunk_rows": 20},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_schedule_moves_a_byte(kind: str, options: dict[str, Any]) -> None:
    engine = Engine(FAMILY.twins(kind)[1], **{"pages": 40, "page_size": 16, **options})
    assert FAMILY.generate(engine) == FAMILY.baseline(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_draws_and_scores_the_same_bytes(kind: str) -> None:
    trainer = FAMILY.trainer(kind)
    for values in FAMILY.baseline(kind):
        record = Completion.from_dict({**values, "request_id": "0"})
        again = trained(trainer, record)
        assert again == {name: getattr(record, name) for name in again}
        assert record.filtered_log_probs == scored(trainer, record, record.sampling)
    with torch.no_grad():
        assert trained(FAMILY.fresh(kind, seed=2), record) != again


def test_a_cached_prefix_is_reused() -> None:
    """Pages are all that a sequence holds, so a second request starts behind the first one's full pages."""
    engine = Engine(FAMILY.twins("three choose")[1], pages=40, page_size=16)
    prompt, params = REQUESTS[2]
    for cached in (0, 64):
        engine.add(prompt, params)
        with counted() as seen:
            [done] = drive(engine)
        assert seen["embed"] == len(prompt) - cached + params.max_new_tokens - 1
        assert numbers(done) == FAMILY.baseline("three choose")[2]


def test_memory_of_another_class_is_refused() -> None:
    server = FAMILY.twins("all choose")[1]
    memory = keys_memory(2, 4, 16, 1, 8, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="GLMForServing takes a memory of latents, index, not of keys"):
        server.prefill(torch.tensor([1]), Rows.pushed([1], [0], "cpu"), memory, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="at least 2 pages"):
        server.make_memory(1)
    with pytest.raises(ValueError, match="at least 1 token"):
        server.make_memory(2, 0)
