"""DeepSeek-V4: every way to push the same tokens gives the same log-probabilities and cached bytes; the engine draws what the trainer
scores, whatever is cached, preempted or begun at a snapshot; the index against a plain transcription."""

from __future__ import annotations

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
    Session,
    assert_alone_is_packed,
    assert_modes_agree,
    assert_same_states,
    counted,
    other_in_recomputation,
    other_in_training,
    packed,
    pushed,
    rows_in_training,
    scores,
)
from prefill_harness import Sequences, rerun, same
from torch import Tensor
from torch.nn import functional

from tests.models import planted_compressed
from tests.ops import plain_rows
from zoo.common import serving
from zoo.common.engine import Engine
from zoo.common.history import OpenWindows, WindowedRows
from zoo.common.memory import PagedCompressed
from zoo.common.ops.contract import Contract
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.rows import Rows
from zoo.deepseek_v4 import SIZES, DeepseekV4ForRL, DeepseekV4ForServing
from zoo.deepseek_v4.config import HEAVY, SPARSE, WINDOW, Rates
from zoo.testing import LawBroken, assert_same_bytes, split_plans
from zoo.verify import ways
from zoo.verify.shrink import reproduction
from zoo.verify.subject import Subject
from zoo.verify.trace import first_divergence

SHAPE: dict[str, Any] = {"heads": 3, "groups": 3, "head_dim": 24, "query_rank": 32, "group_rank": 16, "index_heads": 4, "index_top_k": 3}
CONFIGS = {
    # few index heads: many scores are equal
    "all kinds": replace(
        SIZES["tiny"], **SHAPE, layers=4, kinds_of_layers=(WINDOW, SPARSE, HEAVY, SPARSE), hashed=(True, False, False, True)
    ),
    "all hashed, long rows": replace(
        SIZES["tiny"], **SHAPE, layers=2, kinds_of_layers=(HEAVY, SPARSE), hashed=(True, True), rates=Rates(4, 128), window=5
    ),
    "all learned, published windows": replace(
        SIZES["tiny"], **SHAPE, layers=2, kinds_of_layers=(SPARSE, HEAVY), hashed=(False, False), rates=Rates(4, 128), window=128
    ),
    "windows alone, learned": replace(SIZES["tiny"], **SHAPE, layers=2, kinds_of_layers=(WINDOW, WINDOW), hashed=(False, False), streams=2),
}
STEM = tokens(48, 99)
REQUESTS = [
    ([7], SamplingParams(seed=1, max_new_tokens=6)),
    (STEM[:16], SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_new_tokens=5)),
    (STEM + tokens(22, 3), SamplingParams(temperature=0.0, max_new_tokens=4)),
    (STEM + [4], SamplingParams(temperature=0.6, top_p=0.8, top_k=20, seed=3, max_new_tokens=5)),
]
FAMILY = Family(CONFIGS, DeepseekV4ForRL, DeepseekV4ForServing, REQUESTS)
LENGTHS = (21, 1, 53)
LONG_ROWS = ("all hashed, long rows", "all learned, published windows")
KINDS = tuple(kind for kind in CONFIGS if kind != LONG_ROWS[1])


def page_of(kind: str) -> int:
    return 128 if kind in LONG_ROWS else 16


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_way_to_push_is_training(kind: str) -> None:
    trainer, server = FAMILY.twins(kind)
    lengths = (133, 1, 9) if page_of(kind) == 128 else LENGTHS
    documents = FAMILY.documents(kind, lengths)
    together = assert_alone_is_packed(trainer, documents)
    whole_states = None
    plans = split_plans(lengths, (4, 16))
    for name in ("whole", "a row at a time", "in pieces of 7", "cut at 4", "cut at 17", "one sequence after another", "at random"):
        for page_size in (page_of(kind),) if name != "at random" else (page_of(kind), 5 * page_of(kind)):
            found, states = pushed(server, documents, plans[name], page_size)
            assert_same_bytes(found, together, name)
            whole_states = states if whole_states is None else whole_states
            assert_same_states(states, whole_states, name)


@pytest.mark.parametrize("kind", LONG_ROWS)
@pytest.mark.parametrize("lengths", [tuple(range(1, 10)), tuple(range(127, 134)), (255, 256, 257), (511, 512, 513)])
@torch.no_grad()
def test_lengths_at_the_edges_of_windows(lengths: tuple[int, ...], kind: str) -> None:
    """Packed, and each prefilled in two launches around its last token's window."""
    trainer, server = FAMILY.twins(kind)
    documents = FAMILY.documents(kind, lengths)
    cut = tuple(max(n - 3, n // 2) for n in lengths)
    found, _ = pushed(server, documents, (cut, tuple(n - c for n, c in zip(lengths, cut, strict=True))) if min(cut) else (lengths,), 128)
    assert_same_bytes(found, scores(trainer, documents))


@pytest.mark.parametrize("window", [1, 2, 3, 15, 17, 64])
@torch.no_grad()
def test_windows_of_any_width(window: int) -> None:
    """Shorter than a compressed row, as long as a page but one, longer than most documents."""
    config = replace(CONFIGS["all kinds"], layers=3, kinds_of_layers=(WINDOW, SPARSE, HEAVY), hashed=(True, False, False), window=window)
    trainer, server = (kind.from_config(config, seed=1, device="cpu") for kind in (DeepseekV4ForRL, DeepseekV4ForServing))
    documents = FAMILY.documents("all kinds", LENGTHS)
    together = scores(trainer, documents)
    plan = split_plans(LENGTHS, (16,))["in pieces of 7"]
    assert_same_bytes(pushed(server, documents, plan)[0], together)
    wider = DeepseekV4ForRL.from_config(replace(config, window=window + 1), seed=1, device="cpu")
    # the control: one more token is read by all rows that have it
    assert_same_bytes([d[:window] for d in scores(wider, documents)], [d[:window] for d in together])
    assert window > 52 or (scores(wider, documents)[2][window:] != together[2][window:]).float().mean() > 0.9


@torch.no_grad()
def extreme(model: Any) -> Any:
    """Mixing logits of hundreds to thousands, of both signs: softmaxes are 0 and 1, sigmoids too."""
    for name, parameter in model.named_parameters():
        if name.endswith("_streams.fn"):
            parameter.mul_(300.0)
        elif name.endswith("_streams.base"):
            parameter.copy_(torch.linspace(-1000.0, 1000.0, len(parameter)).roll(7))
    return model


def test_streams_of_extreme_logits() -> None:
    """Serving is training, nothing is infinite, and the gradient is that of the usual model's parameters: all finite."""
    trainer, server = extreme(FAMILY.fresh("all kinds")), extreme(FAMILY.server("all kinds"))
    documents = FAMILY.documents("all kinds", LENGTHS)
    with torch.no_grad():
        together = assert_alone_is_packed(trainer, documents)
        assert_same_bytes(pushed(server, documents, split_plans(LENGTHS, (16,))["in pieces of 7"])[0], together)
        assert not torch.equal(together[2], scores(FAMILY.trainer("all kinds"), documents)[2])
    assert all(bool(found.isfinite().all()) for found in together)
    ids, starts = packed(documents)
    (-trainer.score(ids, starts).mean()).backward()
    for name, parameter in trainer.named_parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), name


class Stale(PagedCompressed):
    """A fault: a compressed row is seen one launch late."""

    def append(self, window_RE: Tensor, compressed_RE: Tensor | None, rows: Rows) -> WindowedRows:
        before = {name: pages.clone() for name, pages in self.compressed.items()}
        found = super().append(window_RE, compressed_RE, rows)
        return found if found.compressed is None else replace(found, compressed=before[self.name])


class Forgetful(PagedCompressed):
    """A fault: what a launch writes into its open windows is lost."""

    def open(self, name: str) -> OpenWindows:
        found = super().open(name)
        return replace(found, rows_SWC=found.rows_SWC.clone())


@pytest.mark.parametrize("fault", [Stale, Forgetful])
@torch.no_grad()
def test_a_late_row_or_a_lost_window_is_caught(fault: type[PagedCompressed], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server = FAMILY.twins("all kinds")
    documents = FAMILY.documents("all kinds", LENGTHS)
    plan = split_plans(LENGTHS, (16,))["in pieces of 7"]
    assert_same_bytes(pushed(server, documents, plan)[0], scores(trainer, documents))
    monkeypatch.setattr("zoo.common.memory.compressed.PagedCompressed", fault)
    with pytest.raises(LawBroken):
        assert_same_bytes(pushed(server, documents, plan)[0], scores(trainer, documents))


@torch.no_grad()
def test_the_choice_matters() -> None:
    """The control of every comparison above: rows beyond top_k compressed ones read others than all of them, earlier rows the same."""
    trainer = FAMILY.trainer("all kinds")
    documents = FAMILY.documents("all kinds", LENGTHS)
    every = DeepseekV4ForRL.from_config(replace(trainer.config, index_top_k=80), seed=1, device="cpu")
    few = scores(trainer, documents)
    all_ = scores(every, documents)
    assert_same_bytes([d[:15] for d in few], [d[:15] for d in all_])  # three rows of four tokens, and what comes before a fourth
    assert (few[2][15:] != all_[2][15:]).float().mean() > 0.9


@pytest.mark.parametrize("kind", KINDS[:2])
def test_modes(kind: str) -> None:
    assert_modes_agree(FAMILY.fresh(kind), FAMILY.documents(kind, (20, 3)))


@pytest.mark.parametrize("fault", [other_in_training, other_in_recomputation])
def test_a_mode_that_matters_is_caught(fault: Callable[..., Any]) -> None:
    model = FAMILY.fresh("all kinds")
    model.model.layers[1].post_norm.register_forward_hook(fault)
    with pytest.raises(LawBroken):
        assert_modes_agree(model, FAMILY.documents("all kinds", (20, 3)))


def test_every_parameter_has_a_gradient_or_is_frozen() -> None:
    """Those of the streams' mixers, the pools and the sinks among them."""
    model = FAMILY.fresh("all kinds")
    documents = FAMILY.documents("all kinds", LENGTHS)
    ids, starts = packed(documents)
    (-model.score(ids, starts).mean()).backward()
    for name, parameter in model.named_parameters():
        frozen = ".indexer." in name or name.endswith(("route.bias", "route.table"))
        assert (parameter.grad is None) == (not parameter.requires_grad) == frozen, name
        assert parameter.grad is None or (bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any())), name


def test_each_row_enters_each_op_once() -> None:
    model = FAMILY.fresh("all kinds")
    documents = FAMILY.documents("all kinds", LENGTHS)
    seen = rows_in_training(model, documents)
    rows = sum(LENGTHS)
    assert seen["compressed_attention"] == 4 * rows and seen["compressed_select"] == 2 * rows and seen["compress"] == 5 * rows
    assert seen["hyper_pre"] == seen["hyper_post"] == 8 * rows and seen["hyper_head"] == rows
    assert seen["hash_route"] == seen["softplus_route"] == 2 * rows and seen["head_linear"] == 4 * rows


@pytest.mark.parametrize("op", ["compress", "compressed_select", "compressed_attention"])
def test_planted_fault_is_named_and_reproduced(op: str, tmp_path: Path) -> None:
    """Cut to one row with the history that it reads, and shown again by a script of its own."""
    subject = Subject("deepseek_v4", *FAMILY.twins("all kinds"), {})
    subject.draw((60, 3))
    documents = [0, 1]

    def found() -> Any:
        return first_divergence(
            (subject.trainer, lambda tap: ways.exhaust(ways.train(subject, tap, documents))),
            (subject.server, lambda tap: ways.exhaust(ways.decode(subject, tap, documents, tail=44))),
        )

    assert found() is None
    with planted_compressed.planted(subject.server, op):
        divergence = found()
        assert divergence is not None and divergence.key.op == op and divergence.elements >= 1
        script = reproduction(divergence, tmp_path / "found", ("training", "decode"))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, str(script)], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert f"{divergence.elements} of " in done.stdout  # training's inputs are the whole document up to the row


@torch.no_grad()
def test_a_captured_decode_step_is_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its static rows, run again in place of a replay: padding sequences, and slots beside them."""
    monkeypatch.setattr(serving, "captured", rerun)
    server = FAMILY.twins("all kinds")[1]
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


# the index, written down once more, from its description alone


def plain_index(query: Tensor, weights: Tensor, values: Tensor, gates: Tensor, ape: Tensor, norm: Tensor, turns: Tensor, top_k: int) -> Any:
    """Chosen rows of each token of one document: token by token, row by row, in float64. turns [T, C] are complex."""
    tokens = ape.shape[0]
    width = norm.shape[0]
    turned = 2 * turns.shape[1]

    def rotate(x: Tensor, position: int) -> Tensor:
        pairs = torch.view_as_complex(x[..., width - turned :].reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.cat([x[..., : width - turned], torch.view_as_real(pairs * turns[position]).flatten(-2)], -1)

    keys: list[Tensor] = []
    chosen = []
    for t in range(len(query)):
        if (t + 1) % tokens == 0:
            first = t + 1 - tokens
            value = [values[first + i, width:] for i in range(tokens)]
            gate = [gates[first + i, width:] + ape[i, width:] for i in range(tokens)]
            if first:
                value += [values[first - tokens + i, :width] for i in range(tokens)]
                gate += [gates[first - tokens + i, :width] + ape[i, :width] for i in range(tokens)]
            share = torch.softmax(torch.stack(gate), 0)
            pooled = (share * torch.stack(value)).sum(0)
            keys.append(rotate(pooled / torch.sqrt((pooled**2).mean() + 1e-6) * norm, first))
        if not keys:
            chosen.append([])
            continue
        score = (functional.relu(rotate(query[t], t) @ torch.stack(keys).T) * weights[t][:, None]).sum(0)
        order = sorted(range(len(keys)), key=lambda row: (-float(score[row]), row))
        chosen.append(sorted(order[:top_k]))
    return chosen


@torch.no_grad()
def test_the_index_against_a_plain_transcription() -> None:
    """In FP32 and with many heads, so that no two scores lie within a rounding of each other."""
    from zoo.common import ops

    config = replace(CONFIGS["all kinds"], index_heads=32)
    model = DeepseekV4ForRL.from_config(config, seed=5, device="cpu", program="transformers")
    inside: list[Tensor] = []
    outside: list[Tensor] = []
    attention = model.model.layers[1].attention
    attention.indexer.register_forward_pre_hook(lambda module, args: inside.extend(args[:2]))
    seen: list[Tensor] = []

    def observe(contract: Contract, arguments: Any, result: Any) -> None:
        if contract.name == "compressed_select":
            seen.append(result)

    document = FAMILY.documents("all kinds", (61,))
    with ops.watch(observe):
        scores(model, document)
    outside.append(seen[0])
    x, query = (t.double() for t in inside[:2])
    indexer = attention.indexer
    weight = {name: parameter.double() for name, parameter in indexer.named_parameters()}
    values, gates = (x @ weight["compressor.rows.weight"].T).chunk(2, 1)
    turns = torch.view_as_complex(model.model.rotary.compressed.on(torch.device("cpu")).double())
    heads = (query @ weight["query.weight"].T).unflatten(1, (32, -1))
    plain = plain_index(
        heads, x @ weight["weights.weight"].T, values, gates, weight["compressor.pool.ape"], weight["compressor.norm.weight"], turns, 3
    )
    found = [[row for row in rows if row >= 0] for rows in outside[0].tolist()]
    assert found == plain
    assert any(rows != list(range(len(rows))) for rows in found)  # something was discarded


@torch.no_grad()
def test_cached_rows_and_the_index_of_the_released_model() -> None:
    """`aligned` reads what a plain transcription makes of rotated rows: FP8 rows, Hadamard's turn and FP4 in the index, FP32 scores."""
    from zoo.common import ops

    config = replace(CONFIGS["all kinds"], index_heads=32)
    model = DeepseekV4ForRL.from_config(config, seed=5, device="cpu")
    calls: list[tuple[str, Any, Tensor]] = []
    watched = ("tail_rope", "compressed_select", "compressed_attention")

    def observe(contract: Contract, arguments: Any, result: Any) -> None:
        if contract.name in watched:
            calls.append((contract.name, arguments["args"], result))

    with ops.watch(observe):
        scores(model, FAMILY.documents("all kinds", (61,)))
    names = [name for name, _, _ in calls]
    assert names[:4] == ["tail_rope", "tail_rope", "compressed_attention", "tail_rope"]  # a window alone
    assert names[4:11] == ["tail_rope"] * 5 + ["compressed_select", "compressed_attention"]
    still = config.head_dim - config.rotation.width
    rotated = [result for _, _, result in calls[4:9]]  # queries, a row a token, compressed rows, the index's queries and keys
    _, (queries, weights, cached, *_), found = calls[9]
    assert_same_bytes(queries, plain_rows.index_vector(rotated[3]))
    keys = plain_rows.index_vector(rotated[4][:, 0])
    assert_same_bytes(cached.rows, keys)
    read = calls[10][1][1]
    assert_same_bytes(read.window, plain_rows.cached_row(rotated[1][:, 0], still))
    assert_same_bytes(read.compressed, plain_rows.cached_row(rotated[2][:, 0], still))
    assert_same_bytes(calls[2][1][1].window, plain_rows.cached_row(calls[1][2][:, 0], still))
    dots = torch.einsum("rhe,te->rht", queries.double(), keys[3::4].double())
    score = (functional.relu(dots) * weights.double()[..., None]).sum(1)
    for t, rows in enumerate(found.tolist()):
        order = sorted(range((t + 1) // 4), key=lambda row: (-float(score[t, row]), row))
        assert [row for row in rows if row >= 0] == sorted(order[:3])
    unturned = (functional.relu(torch.einsum("rhe,te->rht", rotated[3].double(), rotated[4][3::4, 0].double()))).sum(1)
    assert not torch.equal(unturned.argmax(1), score.argmax(1))  # the control: without codes others are the best


# the engine

VARIANTS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "two at a time, 7 rows": {"max_batch": 2, "chunk_rows": 7},
    "nothing cached": {"chunk_rows": 33, "prefix_cache": False},
    "few pages": {"pages": 9, "chunk_rows": 20},
    "snapshots at every window": {"snapshot_stride": 16, "chunk_rows": 21},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_schedule_moves_a_byte(options: dict[str, Any]) -> None:
    engine = Engine(FAMILY.twins("all kinds")[1], **{"pages": 40, "page_size": 16, **options})
    assert FAMILY.generate(engine) == FAMILY.baseline("all kinds")


def test_the_trainer_draws_and_scores_the_same_bytes() -> None:
    trainer = FAMILY.trainer("all kinds")
    for values in FAMILY.baseline("all kinds"):
        record = Completion.from_dict({**values, "request_id": "0"})
        again = trained(trainer, record)
        assert again == {name: getattr(record, name) for name in again}
        assert record.filtered_log_probs == scored(trainer, record, record.sampling)
    with torch.no_grad():
        assert trained(FAMILY.fresh("all kinds", seed=2), record) != again


def test_a_prefix_is_reused_from_the_nearest_snapshot() -> None:
    engine = Engine(FAMILY.twins("all kinds")[1], pages=40, page_size=16)
    prompt, params = REQUESTS[2]
    for cached in (0, 64):  # 70 tokens: the last whole window of 16
        engine.add(prompt, params)
        with counted() as seen:
            [done] = drive(engine)
        assert seen["embed"] == len(prompt) - cached + params.max_new_tokens - 1
        assert numbers(done) == FAMILY.baseline("all kinds")[2]


@pytest.mark.parametrize(
    ("kind", "cached", "extra"),
    [
        *(("all kinds", 64, extra) for extra in (1, 2, 3, 4, 5, 15, 16, 17, 33)),
        *((LONG_ROWS[1], 128, extra) for extra in (1, 127, 128, 130)),
    ],
)
@torch.no_grad()
def test_an_extended_chat_is_a_cold_prefill(kind: str, cached: int, extra: int) -> None:
    server = FAMILY.twins(kind)[1]
    [document] = FAMILY.documents(kind, (cached + extra,))
    cold = Session(server, [document], page_of(kind))
    cold.push((cached + extra,))
    warm = Session(server, [document], page_of(kind))
    warm.push((cached,))
    snapshot = warm.memory.snapshot(warm.slots[0], cached, warm.pages[0])
    for pool in warm.memory.slot_parts:  # nothing of the slot is left but what the snapshot has
        for tensor in pool.pools.values():
            tensor.fill_(torch.nan)
    warm.memory.restore(warm.slots[0], warm.pages[0], snapshot)
    warm.push((extra,))
    assert_same_bytes(warm.scores()[0], cold.scores()[0])
    assert_same_bytes(warm.written(0), cold.written(0))


def test_pages_of_no_whole_rows_are_refused() -> None:
    server = FAMILY.twins("all kinds")[1]
    with pytest.raises(ValueError, match="a page of 8 tokens does not hold whole rows of 16"):
        server.make_memory(4, 8)
    with pytest.raises(ValueError, match="snapshot_stride must be a multiple of 16, not 8"):
        Engine(server, pages=40, page_size=16, snapshot_stride=8)
