"""Draws inside decode graphs, without a GPU: a replay is the captured draw run again into the same memory.

SGLang's objects are stand-ins, as in `test_sglang_plugin`.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from typing import Any

import pytest
import torch
from plugin_harness import SAMPLING, Output, over_stand_ins
from torch import Tensor

from zoo.common import ops
from zoo.common.ops.sample import Drawn
from zoo.common.program import Program
from zoo.common.rollouts import SamplingParams
from zoo.common.row_sampling import RowSampling
from zoo.qwen3 import SIZES, Qwen3ForServing
from zoo.sglang_plugin.columns import WeightsState, joined
from zoo.sglang_plugin.draws import CapturedDraw, GraphDraws, taken
from zoo.sglang_plugin.names import DRAWN, FILTERED, STATE, WEIGHTS

CAPTURED = 8
WIDTH = 300


@pytest.fixture(scope="module")
def program() -> Program:
    return Qwen3ForServing.from_config(SIZES["tiny"], device="cpu").program


def rows_of(*params: SamplingParams) -> RowSampling:
    """As the plugin keeps a batch's: positions are filled in at each step."""
    return RowSampling.of(params, [0] * len(params), "cpu")


def seeded(count: int, first: int, **params: Any) -> RowSampling:
    return rows_of(*(SamplingParams(seed=first + n, **params) for n in range(count)))


MIXED = rows_of(SamplingParams(seed=4), SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, seed=(1 << 63) + 5))


class Graph:
    """A captured draw of 8 rows over static logits and positions; rows of padding keep what earlier steps left there."""

    def __init__(self, draws: GraphDraws) -> None:
        self.draws = draws
        self.logits_CV = torch.zeros(CAPTURED, WIDTH)
        self.positions_C = torch.zeros(CAPTURED, dtype=torch.int64)
        self.found = draws.draw(self.logits_CV, self.positions_C)
        self.info = {DRAWN: self.found}

    def replay(self, logits_RV: Tensor, positions_R: Tensor) -> CapturedDraw:
        self.logits_CV[: len(logits_RV)] = logits_RV
        self.positions_C[: len(logits_RV)] = positions_R
        self.found.packed.copy_(self.draws.draw(self.logits_CV, self.positions_C).packed)
        return self.found


def step_of(count: int, step: int) -> tuple[Tensor, Tensor]:
    """Logits and positions of a decode step."""
    logits_RV = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(100 * count + step)) * 3
    return logits_RV, torch.arange(count) * 7 + step


def eager(logits_RV: Tensor, positions_R: Tensor, rows: RowSampling, program: Program) -> Drawn:
    return ops.sample(logits_RV, dataclasses.replace(rows, position_R=positions_R + 1), program)


def same(left: Drawn, right: Drawn) -> bool:
    return torch.equal(left.token_R, right.token_R) and torch.equal(
        left.log_prob_R.contiguous().view(torch.int32), right.log_prob_R.contiguous().view(torch.int32)
    )


def test_graphs_draw_the_samplers_bytes(program: Program) -> None:
    """Batches of 8, 3, 1 and others again, greedy, T = 1, others and mixed, over what larger batches left in the columns."""
    graph = Graph(GraphDraws(CAPTURED, program, "cpu"))
    batches = [
        seeded(8, 20, temperature=0.7),
        seeded(3, 40),
        MIXED,
        seeded(1, 60, temperature=0.0),
        seeded(3, 80),
        seeded(3, 90, temperature=0.7),
        seeded(8, 3),
    ]
    for rows in batches:
        for step in range(3):
            logits_RV, positions_R = step_of(rows.count, step)
            graph.draws.bind(rows)
            drawn = taken(graph.replay(logits_RV, positions_R), rows, rows.count)
            assert drawn is not None and drawn.filtered_log_prob_R is drawn.log_prob_R
            assert same(drawn, eager(logits_RV, positions_R, rows, program))
    assert graph.draws.drawn == 3 * sum(rows.count for rows in batches)


def test_control_columns_of_another_batch_draw_other_tokens(program: Program) -> None:
    graph = Graph(GraphDraws(CAPTURED, program, "cpu"))
    rows = seeded(3, 80)
    graph.draws.bind(seeded(3, 40))
    graph.draws.bound = rows
    logits_RV, positions_R = step_of(3, 0)
    drawn = taken(graph.replay(logits_RV, positions_R), rows, 3)
    assert drawn is not None and not same(drawn, eager(logits_RV, positions_R, rows, program))
    # and a position that stays where it was
    graph.draws.bound = None
    graph.draws.bind(rows)
    drawn = taken(graph.replay(logits_RV, positions_R), rows, 3)
    assert drawn is not None and not same(drawn, eager(logits_RV, positions_R + 1, rows, program))


def test_only_the_bound_rows_take_what_a_graph_drew(program: Program) -> None:
    graph = Graph(GraphDraws(CAPTURED, program, "cpu"))
    rows = seeded(3, 40)
    assert taken(None, rows, 3) is None and taken(graph.found, rows, 3) is None  # no graph; nothing loaded
    for other in (None, seeded(3, 40, top_k=4), dataclasses.replace(rows, filters=True)):
        graph.draws.bind(other)
        assert graph.draws.bound is None and (other is None or taken(graph.found, other, 3) is None)
    graph.draws.bind(rows)
    assert taken(graph.found, dataclasses.replace(rows), 3) is None  # equal, but who says that they are
    assert graph.draws.drawn == 0
    # a batch with filters in between leaves the columns as they are
    graph.draws.bind(seeded(3, 70, top_p=0.5))
    assert taken(graph.found, rows, 3) is not None and graph.draws.drawn == 3
    with pytest.raises(ValueError, match="9 rows do not fit into a buffer of 8"):
        graph.draws.bind(seeded(9, 0))
    assert graph.draws.bound is rows


def test_rows_are_copied_once(program: Program) -> None:
    draws = GraphDraws(CAPTURED, program, "cpu")
    copied = []
    draws.columns = types.SimpleNamespace(copy_=copied.append)  # type: ignore[assignment]
    first = seeded(2, 1)
    second = seeded(2, 1)
    for rows in (first, first, second, second, first):
        draws.bind(rows)
    assert [id(rows) for rows in copied] == [id(first), id(second), id(first)]


def test_the_next_replay_leaves_what_was_taken(program: Program) -> None:
    graph = Graph(GraphDraws(CAPTURED, program, "cpu"))
    rows = seeded(5, 40)
    graph.draws.bind(rows)
    logits_RV, positions_R = step_of(5, 0)
    found = graph.replay(logits_RV, positions_R)
    drawn = taken(found, rows, 5)
    # control: the same views of the graph's own memory
    views = Drawn(found.packed[:10].view(torch.int64), *[found.packed[16:21].view(torch.float32)] * 2)
    wanted = eager(logits_RV, positions_R, rows, program)
    assert drawn is not None and same(drawn, wanted) and same(views, wanted)
    graph.replay(*step_of(5, 1))
    assert same(drawn, wanted) and not same(views, wanted)


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
def test_stand_in_memory_that_comes_back_is_written_again(tags: list[str] | None, program: Program) -> None:
    """A batch that was paused goes on with the same rows; the columns hold anybody's bytes."""
    page = importlib.import_module("zoo.sglang_plugin.register")
    graph = Graph(GraphDraws(CAPTURED, program, "cpu"))
    rows = seeded(3, 40)
    runner = types.SimpleNamespace(
        server_args=types.SimpleNamespace(attention_backend="zoo"),
        attn_backend=types.SimpleNamespace(clear_padding=lambda: None, draws=graph.draws),
    )
    updater = types.SimpleNamespace(tp_worker=types.SimpleNamespace(model_runner=runner))
    logits_RV, positions_R = step_of(3, 0)
    wanted = eager(logits_RV, positions_R, rows, program)
    for resumed in (False, True):
        graph.draws.bind(rows)
        for column in graph.draws.columns.tensors():
            column.zero_()
        if resumed:
            page.after_resume(None, updater, types.SimpleNamespace(tags=tags))
        graph.draws.bind(rows)
        drawn = taken(graph.replay(logits_RV, positions_R), rows, 3)
        # control: without the hook
        assert drawn is not None and same(drawn, wanted) == resumed
        graph.draws.bound = None


def test_stand_in_the_sampler_takes_or_draws(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps by a graph, and others that must not take its draw: the same bytes, and the graph's own output stays as it was."""
    page = over_stand_ins(monkeypatch, "sampler", SAMPLING)
    sampler = page.RowSampler()
    sampler.program = program
    sampler.weights = WeightsState(str)
    graph = Graph(GraphDraws(CAPTURED, program, "cpu"))
    rows = seeded(3, 40, temperature=0.7)

    def sampled(asked: RowSampling, step: int, returned: bool, info: dict[str, Any] | None) -> None:
        logits_RV, positions_R = step_of(3, step)
        graph.replay(logits_RV, positions_R)
        output = Output(logits_RV)
        output.customized_info = info
        token_R = sampler.forward(output, page.RowsBatchInfo(rows=asked), returned, [0] * 3, [None] * 3, positions_R)
        wanted = eager(logits_RV, positions_R, asked, program)
        assert torch.equal(token_R, wanted.token_R)
        if returned:
            assert output.next_token_logprobs is not None and same(Drawn(token_R, *[output.next_token_logprobs] * 2), wanted)
        made = output.customized_info
        assert made is not None and set(made) == {FILTERED, WEIGHTS} and made is not info
        if output.next_token_logprobs is not None:
            output.next_token_logprobs = output.next_token_logprobs.tolist()
        assert [made[FILTERED][i] for i in range(3)] == wanted.filtered_log_prob_R.tolist()

    for step in range(10):
        graph.draws.bind(rows)
        sampled(rows, step, step % 2 == 0, graph.info)
    assert graph.draws.drawn == 30 and list(graph.info) == [DRAWN] and graph.info[DRAWN] is graph.found
    for other, info in ((seeded(3, 40, temperature=0.7), graph.info), (seeded(3, 40, top_k=4), graph.info), (rows, None)):
        graph.draws.bind(rows)
        sampled(other, 11, True, info)
    assert graph.draws.drawn == 30


def test_stand_in_a_batch_that_lost_its_last_filter_has_none(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    page = over_stand_ins(monkeypatch, "sampler", SAMPLING)

    def batch(*params: dict[str, Any]) -> Any:
        requests = [types.SimpleNamespace(sampling_params={"sampling_seed": 7} | p, rid=str(n)) for n, p in enumerate(params)]
        return page.with_rows(SAMPLING["sampling.sampling_batch_info"]["SamplingBatchInfo"](), requests, "cpu")

    info = batch({}, {"top_k": 4, "temperature": 0.7}, {"sampling_seed": 9})
    assert (info.rows.scales, info.rows.filters) == (True, True) and len(info.bounds) == 3
    before = info.rows
    forward = dataclasses.replace(info)
    info.adjusted_merge_batch(batch({"temperature": 0.7}))
    assert (info.rows.scales, info.rows.filters, info.rows.count) == (True, True, 4)
    keep = [0, 2, 3]
    info.adjusted_filter_batch(keep, torch.tensor(keep))
    assert (info.rows.scales, info.rows.filters) == (True, False)
    logits_RV, positions_R = step_of(3, 0)
    # control: what an index alone leaves, which no graph would serve; the bytes are the same
    stays = joined(before, batch({"temperature": 0.7}).rows)[torch.tensor(keep)]
    assert stays.filters and same(eager(logits_RV, positions_R, stays, program), eager(logits_RV, positions_R, info.rows, program))
    info.adjusted_filter_batch([0, 1], torch.tensor([0, 1]))
    assert (info.rows.scales, info.rows.filters) == (False, False)
    info.adjusted_merge_batch(batch({"top_p": 0.5}))
    assert (info.rows.scales, info.rows.filters) == (False, True)
    info.adjusted_filter_batch([2], torch.tensor([2]))
    assert info.rows.filters and info.bounds == [(False, True)]
    # the copy that a forward in flight has is not touched
    assert forward.rows is before and len(forward.bounds) == 3


def test_stand_in_a_server_says_what_graphs_drew(program: Program) -> None:
    page = importlib.import_module("zoo.sglang_plugin.register")
    draws = GraphDraws(CAPTURED, program, "cpu")
    hooked = ("release_memory_occupation", "resume_memory_occupation", "update_weights_from_tensor")
    updater = type("Updater", (), {name: types.SimpleNamespace(__wrapped__=None) for name in hooked})()
    updater.offload_tags = {"weights"}
    backend = types.SimpleNamespace(draws=draws, prefills=None)
    scheduler = types.SimpleNamespace(
        server_args=types.SimpleNamespace(attention_backend="zoo"),
        weight_updater=updater,
        tp_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(attn_backend=backend)),
    )
    draws.drawn = 12
    said = []
    for made in (draws, None):
        backend.draws = made
        said.append(page.after_internal_state(types.SimpleNamespace(internal_state={}), scheduler, None).internal_state[STATE])
    assert [state["drawn_in_graphs"] for state in said] == [12, 0]
