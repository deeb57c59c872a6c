"""GLM-5 under random lengths, schedules and pages: hypothesis looks for one that moves a byte, with a selector of many equal scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_harness import Family, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_harness import pushed, scores

from zoo.common.ops import select
from zoo.glm5 import SIZES, GLMForRL, GLMForServing
from zoo.glm5 import model as glm
from zoo.testing import LawBroken, Plan, assert_same_bytes

TOP_K = 12
CONFIG = replace(
    SIZES["tiny"],
    layers=2,
    full=(True, False),
    sparse=(False, True),
    hidden=64,
    heads=3,
    query_rank=48,
    kv_rank=32,
    nope_dim=16,
    rope_dim=8,
    value_dim=24,
    index_dim=16,
    index_heads=4,
    index_top_k=TOP_K,
    intermediate=64,
    expert_intermediate=16,
    shared_intermediate=16,
)
FAMILY = Family({"two layers": CONFIG}, GLMForRL, GLMForServing, [])
QUICK = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = st.sampled_from([1, TOP_K - 1, TOP_K, TOP_K + 1, 2 * TOP_K, 2 * TOP_K + 3])


def twins(heads_left: int) -> tuple[Any, Any]:
    """A trainer and a server whose selectors have weights for so many heads only: none makes all scores equal, one about half of them."""
    pair = FAMILY.twins("two layers")
    for model in pair:
        for module in model.modules():
            if isinstance(module, glm.Indexer):
                with torch.no_grad():
                    module.key_weights.weight[module.width + heads_left :] = 0
    return pair


PAIRS = {heads: twins(heads) for heads in (0, 1, 4)}


def check(heads_left: int, lengths: list[int], plan: Plan, page_size: int) -> None:
    trainer, server = PAIRS[heads_left]
    documents = [torch.tensor(tokens(length, length + n)) for n, length in enumerate(lengths)]
    assert_same_bytes(pushed(server, documents, plan, page_size)[0], scores(trainer, documents), f"{lengths} by {plan}")


@st.composite
def schedules(draw: st.DrawFn, lengths: list[int]) -> Plan:
    """Each step pushes some rows of some sequences, until all are in."""
    left = list(lengths)
    steps = []
    while any(left):
        whole = len(steps) == 5
        step = tuple(n if whole or n <= 2 else draw(st.integers(0, n)) for n in left)
        if any(step):
            steps.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
    return tuple(steps)


@QUICK
@given(
    data=st.data(), heads=st.sampled_from([0, 1, 4]), lengths=st.lists(LENGTHS, min_size=1, max_size=3), page=st.sampled_from([1, 5, 16])
)
@torch.no_grad()
def test_any_schedule_around_the_length_of_a_list(data: Any, heads: int, lengths: list[int], page: int) -> None:
    check(heads, lengths, data.draw(schedules(lengths)), page)


@torch.no_grad()
def test_a_choice_that_follows_the_push_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: among equal scores the higher position first, in rows that are pushed alone."""
    lengths = [2 * TOP_K + 3]
    plan = tuple((1,) for _ in range(lengths[0]))
    check(0, lengths, plan, 5)

    def late(q: Any, weights: Any, keys: Any, rows: Any, top_k: int, *, program: Any) -> Any:
        chosen = select(q, weights, keys, rows, top_k, program=program)
        more = int(rows.positions_R[0]) + 1 - top_k
        return chosen + more if rows.count == 1 and more > 0 else chosen

    monkeypatch.setattr(glm.ops, "select", late)
    with pytest.raises(LawBroken):
        check(0, lengths, plan, 5)
