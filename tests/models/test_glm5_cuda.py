"""GLM-5 on a GPU: graph steps, eager steps and any mixture of them give the trainer's bytes, with NaN in free pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_harness import numbers, page_pools, tokens

from zoo.common.engine import Engine
from zoo.common.ops.biased_route import Choice
from zoo.common.program import CODED_INDEX, PROGRAMS
from zoo.common.rollouts import Completion, SamplingParams
from zoo.glm5 import SIZES, GLMForRL, GLMForServing
from zoo.testing import assert_same_bytes

pytestmark = pytest.mark.gpu

CODED = "aligned, coded index"

CONFIGS = {
    "tiny": SIZES["tiny"],
    "groups, tied": replace(SIZES["tiny"], layers=2, full=(True, True), sparse=(True, False), choice=Choice(2, 4, 2, scale=1.5), tied=True),
    # published heads and widths, few experts
    "published layers": replace(
        SIZES["5.2"].first_layers(2),
        vocabulary=512,
        hidden=256,
        query_rank=256,
        sparse=(False, True),
        intermediate=256,
        experts=8,
        expert_intermediate=128,
        shared_intermediate=128,
        choice=Choice(2, scale=2.5),
        index_top_k=64,
        positions=4096,
        eos=(2,),
    ),
}
STEM = tokens(48, 99)
REQUESTS = [
    ([7], SamplingParams(seed=1, max_new_tokens=6)),
    (STEM[:16], SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_new_tokens=5)),
    (STEM + tokens(22, 3), SamplingParams(temperature=0.0, max_new_tokens=4)),
    (STEM + tokens(150, 5), SamplingParams(temperature=0.6, top_p=0.8, top_k=20, seed=3, max_new_tokens=9)),
]


def mixed(engine: Engine, graph_steps: list[bool]) -> list[Completion]:
    """All requests at once; step i runs by graph where `graph_steps` says so, repeated. Free pages are poisoned before it."""
    ids = [engine.add(*request) for request in REQUESTS]
    done: dict[str, Completion] = {}
    step = 0
    while engine.busy:
        engine.graphs = engine.runner.graphs = graph_steps[step % len(graph_steps)]
        free = torch.tensor(list(engine.scheduler.pool.free), device="cuda")
        for pages in page_pools(engine.scheduler.memory):
            if pages.element_size() == 1:  # codes: torch fills none by index
                pages.view(torch.uint8).index_fill_(1, free, 255)
            else:
                pages.index_fill_(1, free, torch.nan)
        done |= {record.request_id: record for record in engine.step()}
        step += 1
    return [done[request_id] for request_id in ids]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The selector of `fp8` over BF16 weights beside the others."""
    monkeypatch.setitem(PROGRAMS, CODED, PROGRAMS["aligned"].derived(instead=CODED_INDEX))  # type: ignore[arg-type]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("kind", "program"), [*((kind, "aligned") for kind in CONFIGS), ("tiny", CODED), ("published layers", CODED)])
def test_graphs_eager_and_their_mixtures_are_the_trainers_bytes(kind: str, program: str) -> None:
    """In codes too: by our scorer at the tiny width, by DeepGEMM's two at the published one."""
    if program == CODED and kind == "published layers":
        pytest.importorskip("deep_gemm")
    model = GLMForServing.from_config(CONFIGS[kind], seed=1, device="cuda", program=program)
    trainer = GLMForRL.from_config(CONFIGS[kind], seed=1, device="cuda", program=program)
    eager = mixed(Engine(model, pages=24, graphs=True), [False])
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
        ([True], {"page_size": 16, "pages": 60}),
    ):
        engine = Engine(model, **{"pages": 24, "graphs": True, **options})
        assert [numbers(record) for record in mixed(engine, pattern)] == expected, pattern
        assert engine.stats.graph_steps > 0
    other = GLMForServing.from_config(CONFIGS[kind], seed=2, device="cuda", program=program)
    assert [numbers(record) for record in mixed(Engine(other, pages=24, graphs=True), [True])] != expected


@pytest.mark.parametrize("kind", tuple(CONFIGS))
def test_gradients_twice_and_with_checkpointing(kind: str) -> None:
    trainer = GLMForRL.from_config(CONFIGS[kind], seed=1, device="cuda")
    ids = torch.tensor(tokens(230, 1), device="cuda")
    starts = torch.tensor([0, 150, 151, 230], device="cuda")

    def run(checkpointed: bool, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
        trainer.zero_grad()
        trainer.train()
        trainer.gradient_checkpointing = checkpointed
        (-trainer.score(ids, starts).mean()).backward()
        return {name: p.grad.clone() for name, p in trainer.named_parameters() if p.grad is not None}

    first = run(False)
    assert all(bool(g.isfinite().all()) for g in first.values()) and len(first) > 20
    assert_same_bytes(run(False), first)
    assert_same_bytes(run(True), first)
    assert not torch.equal(run(False, ids.roll(1))["model.norm.weight"], first["model.norm.weight"])
