"""Attention under random splits, packings and page tables: hypothesis looks for a schedule that moves a byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zoo.common.ops.attention import cases as attention
from zoo.common.ops.cases import Case, Trial, cases_of
from zoo.common.program import Program, resolve
from zoo.testing import Plan, assert_same_bytes

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[int], Case]:
    lengths = draw(st.lists(st.one_of(st.integers(1, 20), st.integers(60, 70), st.integers(126, 131)), min_size=1, max_size=4))
    groups = draw(st.sampled_from([1, 2]))
    heads = groups * draw(st.integers(1, 8 // groups))
    kind = draw(st.sampled_from(["normal", "wide", "cancel"]))
    return lengths, attention.case("drawn", lengths, heads, groups, draw(st.sampled_from([4, 7, 16])), kind)


@st.composite
def schedules(draw: st.DrawFn, lengths: list[int]) -> Plan:
    """Each step pushes some rows of some sequences, until all are in."""
    left = list(lengths)
    steps = []
    while any(left):
        step = tuple(draw(st.integers(0, n)) if n > 3 else n for n in left)
        if any(step):
            steps.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
        if len(steps) == 8:
            steps.append(tuple(left))
            break
    return tuple(step for step in steps if any(step))


PLACES = st.builds(
    attention.PagePlace,
    page_size=st.sampled_from([1, 16, 64, 80, 128]),
    order=st.one_of(st.none(), st.integers(0, 99)),
    spare=st.integers(1, 9),
    fill=st.sampled_from([torch.nan, torch.inf, -3e38, 0.0]),
    columns=st.integers(0, 5),
)
SEGMENTS = st.sampled_from([None, 64, 128])


def _program(segment: int | None) -> Program:
    return replace(ALIGNED, key_segments=() if segment is None else ((256, segment),))


@QUICK
@given(data=st.data(), drawn=documents(), place=PLACES, segment=SEGMENTS, seed=st.integers(0, 9))
def test_any_schedule_in_any_pages(data: Any, drawn: tuple[list[int], Case], place: Any, segment: int | None, seed: int) -> None:
    lengths, case = drawn
    program = _program(segment)
    t = Trial(case, program, case.make(seed, "cpu", torch.bfloat16))
    pushed = attention.push(t, t.args, data.draw(schedules(lengths)), place)
    assert_same_bytes(pushed["out"], t.call(), "a schedule in pages against packed rows")
    for name, documents_cached in zip(("k_RGE", "v_RGE"), zip(*pushed["cached"], strict=True), strict=True):
        assert_same_bytes(torch.cat(documents_cached), t.args[name], f"cached {name}")


@QUICK
@given(data=st.data(), drawn=documents(), segment=SEGMENTS, seed=st.integers(0, 9))
def test_any_packing(data: Any, drawn: tuple[list[int], Case], segment: int | None, seed: int) -> None:
    """Any choice of documents, in any order and repeated, gives each document the rows that it has alone."""
    lengths, case = drawn
    t = Trial(case, _program(segment), case.make(seed, "cpu", torch.bfloat16))
    units = attention.Sequences()
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5)))
    packed = t.call(units.take(t.args, chosen))
    alone = [t.call(units.take(t.args, torch.tensor([n]))) for n in chosen.tolist()]
    assert_same_bytes(packed, torch.cat(alone), "packed against alone")


def test_a_chunk_relative_tile_is_found() -> None:
    """The control: the same property fails at once for key tiles that begin at the chunk."""
    case = next(c for c in cases_of("attention", ALIGNED) if c.name == "ratio 3")
    args = case.make(0, "cpu", torch.float32)

    def relative(q: Any, history: Any, rows: Any, scale: float, *, program: Program) -> Any:
        shift = int(rows.positions_R[0]) % 64
        scaled = program if not shift else replace(program, key_segments=((256, 64),))
        return Trial(case, program, args).op("attention")(q, history, rows, scale, program=scaled)

    t = Trial(case, replace(ALIGNED, dtype="float32"), args, {"attention": relative})
    pushed = attention.push(t, args, ((7, 100), (0, 30)), attention.PagePlace(64))
    with pytest.raises(AssertionError, match="a schedule"):
        assert_same_bytes(pushed["out"], t.call(), "a schedule")
