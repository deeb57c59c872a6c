"""The engine on a GPU: graph steps, eager steps and any mixture of them give the trainer's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_harness import CONFIGS, REQUESTS, numbers

from zoo.common.engine import Engine
from zoo.common.rollouts import Completion
from zoo.qwen3 import Qwen3ForRL, Qwen3ForServing

pytestmark = pytest.mark.gpu


def mixed(engine: Engine, graph_steps: list[bool]) -> list[Completion]:
    """All requests at once; step i decodes by graph where `graph_steps` says so, repeated. Free pages are poisoned before it."""
    ids = [engine.add(*request) for request in REQUESTS]
    done: dict[str, Completion] = {}
    step = 0
    while engine.busy:
        engine.graphs = engine.runner.graphs = graph_steps[step % len(graph_steps)]
        free = torch.tensor(list(engine.scheduler.pool.free), device="cuda")
        for pages in engine.scheduler.memory.tensors().values():
            pages.index_fill_(1, free, torch.nan)
        done |= {record.request_id: record for record in engine.step()}
        step += 1
    return [done[request_id] for request_id in ids]


@pytest.mark.parametrize("kind", tuple(CONFIGS))
def test_graphs_eager_and_their_mixtures_are_the_trainers_bytes(kind: str) -> None:
    model = Qwen3ForServing.from_config(CONFIGS[kind], seed=1, device="cuda")
    trainer = Qwen3ForRL.from_config(CONFIGS[kind], seed=1, device="cuda")
    eager = mixed(Engine(model, pages=16, graphs=True), [False])
    for record in eager:
        ids = torch.tensor(record.prompt_ids + record.output_ids, device="cuda")
        with torch.no_grad():
            scores = trainer.score(ids, torch.tensor([0, len(ids)], device="cuda"), sampling=record.sampling)
        assert record.filtered_log_probs == tuple(scores[len(record.prompt_ids) - 1 : -1].tolist())
    expected: list[dict[str, Any]] = [numbers(record) for record in eager]
    for pattern, options in (
        ([True], {}),
        ([False, True], {"max_batch": 3}),
        ([True, True, False], {"chunk_rows": 30, "prefix_cache": False}),
        ([True], {"pages": 3, "chunk_rows": 50}),
    ):
        engine = Engine(model, **{"pages": 16, "graphs": True, **options})
        assert [numbers(record) for record in mixed(engine, pattern)] == expected
        assert engine.stats.graph_steps > 0
        assert pattern != [True] or engine.stats.graph_rows == engine.stats.prefill_rows


def test_graphs_follow_new_weights() -> None:
    model = Qwen3ForServing.from_config(CONFIGS["dense"], seed=1, device="cuda")
    other = Qwen3ForServing.from_config(CONFIGS["dense"], seed=2, device="cuda")
    parameters = dict(other.named_parameters())
    engine = Engine(model, pages=16)
    before = engine.generate(*zip(*REQUESTS, strict=True))
    engine.update_weights([(p.published, p.of(parameters[e.ours]).detach()) for e, p in other.table_of().pieces()])
    after = [numbers(record) for record in engine.generate(*zip(*REQUESTS, strict=True))]
    assert after == [numbers(record) for record in Engine(other, pages=16, graphs=False).generate(*zip(*REQUESTS, strict=True))]
    assert after != [numbers(record) for record in before]
    assert engine.stats.graph_rows == engine.stats.prefill_rows > 0


def test_the_likeliest_tokens_and_a_stream_beside_graphs() -> None:
    """Both read what graphs made; neither moves a byte of it."""
    model = Qwen3ForServing.from_config(CONFIGS["dense"], seed=1, device="cuda")
    trainer = Qwen3ForRL.from_config(CONFIGS["dense"], seed=1, device="cuda")
    prompts = [prompt for prompt, _ in REQUESTS]
    params = [asked for _, asked in REQUESTS]
    plain = Engine(model, pages=24).generate(prompts, params)
    records = Engine(model, pages=24).generate(prompts, params, top_log_probs=3)
    bare = [replace(record, top_ids=None, top_log_probs=None) for record in records]
    assert [numbers(record) for record in bare] == [numbers(record) for record in plain]
    for record in records:
        ids = [*record.prompt_ids, *record.output_ids]
        with torch.no_grad():
            scores = trainer.score(ids, [0, len(ids)], sampling=record.sampling, top_k=3)
        rows = slice(len(record.prompt_ids) - 1, len(ids) - 1)
        assert record.top_ids == tuple(map(tuple, scores.top_ids_RK[rows].tolist()))
        assert record.top_log_probs == tuple(map(tuple, scores.top_log_prob_RK[rows].tolist()))
    ended = {token.prompt: token.completion for token in Engine(model, pages=24).stream(prompts, params) if token.completion is not None}
    assert [numbers(ended[place]) for place in range(len(prompts))] == [numbers(record) for record in plain]
