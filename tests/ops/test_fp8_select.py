"""fp8_select against another transcription of its contract, on ties, at every length around top_k, and however rows are pushed."""

from __future__ import annotations

import math
from typing import Any

import plain_selector
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.common import ops
from zoo.common.history import CodedRows
from zoo.common.ops.cases import Trial
from zoo.common.ops.fp8_quantise.reference import fp8_quantise
from zoo.common.ops.fp8_select import cases, reference
from zoo.common.program import Program, resolve
from zoo.common.rows import Rows
from zoo.testing import assert_same_bytes

CPU = resolve("aligned", "cpu", torch.bfloat16)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_codes_are_the_transcriptions() -> None:
    for seed in range(3):
        q = floats(seed, 4, 5, 16) * 2.0 ** (3 * seed - 4)
        codes, folded = reference.queries(q, floats(9, 4, 5))
        for r in range(4):
            for h in range(5):
                wanted, power = plain_selector.query_codes(q[r, h].double().tolist())
                assert codes[r, h].double().tolist() == wanted and math.frexp(power)[0] == 0.5
        key, scales = fp8_quantise(q[:, 0], 1e-10, False)
        for r in range(4):
            wanted, scale = plain_selector.key_codes(q[r, 0].double().tolist())
            assert key[r].double().tolist() == wanted and float(scales[r]) == scale
    assert float(folded[0, 0]) != float(reference.queries(-q, -floats(9, 4, 5))[1][0, 0])


@pytest.mark.parametrize("heads", [1, 5, 8, 32])
def test_scores_are_the_transcriptions(heads: int) -> None:
    """To the byte, where a head's product is exact in any order: codes of few bits. Head 8 g + j joins partial j."""
    codes = floats(1, 3, heads, 16).round().to(torch.float8_e4m3fn)
    key = floats(2, 6, 16).round().to(torch.float8_e4m3fn)
    weights = floats(3, 3, heads).float() * math.pi
    scales = floats(4, 6).float().abs() * math.e
    found = reference.index_scores(codes, weights, key, scales)
    wanted = [
        [
            plain_selector.score(codes[r].double().tolist(), weights[r].tolist(), key[t].double().tolist(), float(scales[t]))
            for t in range(6)
        ]
        for r in range(3)
    ]
    assert found.tolist() == wanted
    if heads > 8:  # the order of heads is part of it
        turned = reference.index_scores(codes.view(torch.uint8).flip(1).view(codes.dtype), weights.flip(1), key, scales)
        assert turned.tolist() != wanted


KINDS = st.sampled_from(["normal", "ties", "one sign"])


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[int], Any]:
    """Documents that see fewer tokens than are taken, as many, one more, and many more."""
    top_k = draw(st.sampled_from([1, 2, 7, 16]))
    around = st.sampled_from([max(top_k - 1, 1), top_k, top_k + 1, 2 * top_k + 3, 33])
    lengths = draw(st.lists(around, min_size=1, max_size=3))
    heads, width = draw(st.sampled_from([(1, 4), (3, 8), (9, 8), (32, 16)]))
    kind = draw(KINDS)
    return lengths, cases.case("drawn", lengths, heads, width, top_k, "ties" if kind == "ties" else "normal")


@QUICK
@given(drawn=drawn(), seed=st.integers(0, 999))
def test_choices_are_the_transcriptions(drawn: tuple[list[int], Any], seed: int) -> None:
    """Every row of every document: ascending, within the row's own past, all of it where there is no more, ties by the lower place."""
    lengths, case = drawn
    args = case.make(seed, "cpu", torch.bfloat16)
    found = Trial(case, CPU, args).call().tolist()
    start = 0
    for length in lengths:
        keys = args["key_RE"][start : start + length]
        for position in range(length):
            row = start + position
            own = [place for place in found[row] if place >= 0]
            count = min(position + 1, args["top_k"])
            assert found[row] == own + [-1] * (args["top_k"] - count) and own == sorted(set(own))
            if position + 1 <= args["top_k"]:
                assert own == list(range(position + 1))
                continue
            wanted = plain_selector.selected(args["q_RHE"], args["weights_RH"], keys, position, row, args["top_k"], args["least"])
            assert own == wanted or _equal_but_for_products(args, keys, position, row, own, wanted)
        start += length


def _equal_but_for_products(args: Any, keys: Tensor, position: int, row: int, own: list[int], wanted: list[int]) -> bool:
    """Whether members that differ have scores as near as FP32 sums of a head's width in two orders may be."""
    codes, folded = reference.queries(args["q_RHE"][row : row + 1], args["weights_RH"][row : row + 1])
    coded, scales = fp8_quantise(keys[: position + 1], args["least"], False)
    scores = reference.index_scores(codes, folded, coded, scales[:, 0])[0].double()
    spread = float((codes.float().abs().sum(2) * folded.abs()).sum() * coded.float().abs().amax() * scales.amax())
    other = sorted(set(own) ^ set(wanted))
    return len(other) > 0 and float(scores[other].amax() - scores[other].amin()) <= 2.0**-20 * spread


@QUICK
@given(drawn=drawn(), seed=st.integers(0, 999), data=st.data())
def test_no_push_and_no_place_moves_a_choice(drawn: tuple[list[int], Any], seed: int, data: st.DataObject) -> None:
    lengths, case = drawn
    trial = Trial(case, CPU, case.make(seed, "cpu", torch.bfloat16))
    plan = []
    left = list(lengths)
    while any(left):
        step = tuple(data.draw(st.integers(0, n)) if len(plan) < 6 else n for n in left)
        if any(step):
            plan.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
        elif len(plan) < 6:
            plan.append(tuple(min(n, 1) for n in left))
            left = [n - min(n, 1) for n in left]
    place = cases.PagePlace(data.draw(st.sampled_from([1, 5, 16, 64])), order=data.draw(st.one_of(st.none(), st.integers(0, 99))), spare=3)
    assert_same_bytes(cases._push(trial, tuple(plan), place)["out"], trial.call())


@pytest.mark.parametrize("last", [2046, 2047, 2048, 2060])
def test_around_2048(last: int) -> None:
    """GLM-5.2's count: the last rows of a document, pushed behind the others, against a stable sort of scores in float64."""
    rows = 3
    q = floats(1, rows, 4, 32)
    gates = floats(2, rows, 4)
    key = floats(3, last, 32)
    key[5:900:7] = key[4:899:7]  # equal scores
    codes, scales = fp8_quantise(key, 1e-10, False)
    pages = CodedRows(codes[None], scales[None], torch.zeros(1, 1, dtype=torch.int32))
    found = ops.fp8_select(q, gates, pages, Rows.pushed([rows], [last - rows], "cpu"), 2048, program=CPU)
    coded, folded = reference.queries(q, gates)
    dots = torch.einsum("rhe,te->rht", coded.double(), codes.double()).clamp(min=0.0)
    exact = (dots * folded[:, :, None].double()).sum(1) * scales[:, 0].double()
    for r in range(rows):
        count = last - rows + r + 1
        own = found[r][found[r] >= 0].long()
        assert len(own) == min(count, 2048) and bool((own.diff() > 0).all())
        if count > 2048:
            left = sorted(set(range(count)) - set(own.tolist()))
            near = 1e-5 * float(exact[r].abs().amax())
            assert float(exact[r, left].amax() - exact[r, own].amin()) <= near
            assert float(exact[r, own].amax() - exact[r, left].amin()) > near  # the control: it is a choice
        else:
            assert own.tolist() == list(range(count))


def test_equal_scores_take_the_lower_place() -> None:
    q = torch.ones(1, 2, 8).bfloat16()
    gates = torch.ones(1, 2).bfloat16()
    key = torch.ones(20, 8).bfloat16()
    key[3] = -1  # below zero, so 0
    key[11] = 2
    codes, scales = fp8_quantise(key, 448.0, False)
    pages = CodedRows(codes[None], scales[None], torch.zeros(1, 1, dtype=torch.int32))
    rows = Rows.pushed([1], [19], "cpu")
    assert ops.fp8_select(q, gates, pages, rows, 5, program=CPU).tolist() == [[0, 1, 2, 4, 11]]
    zero = ops.fp8_select(q, -gates * 0, pages, rows, 5, program=CPU)
    assert zero.tolist() == [[0, 1, 2, 3, 4]]  # -0 is 0


def test_a_code_of_nan_counts_nothing_and_a_scale_of_nan_is_flagged() -> None:
    """As the GPU's maximum has it; a NaN that is computed comes with a NaN scale."""
    q = floats(1, 1, 8, 8)
    gates = floats(2, 1, 8).abs()
    key = floats(3, 20, 8)
    codes, scales = fp8_quantise(key, 1e-10, False)
    rows = Rows.pushed([1], [19], "cpu")
    table = torch.zeros(1, 1, dtype=torch.int32)
    spoilt = codes.clone()
    spoilt.view(torch.uint8)[7] = 0x7F
    found = ops.fp8_select(q, gates, CodedRows(spoilt[None], scales[None], table), rows, 19, program=CPU)
    assert 7 not in found.tolist()[0]
    rows.check_flags()
    scales = scales.clone()
    scales[7] = torch.nan
    found = ops.fp8_select(q, gates, CodedRows(codes[None], scales[None], table), rows, 19, program=CPU)
    assert 7 not in found.tolist()[0]
    with pytest.raises(ValueError, match="fp8_select: an earlier token's score is NaN"):
        rows.check_flags()
    [flag] = [value for value in rows.launch.values() if isinstance(value, torch.Tensor)]
    rows.launch["derived"] = 1
    rows.renew()
    assert rows.launch == {next(iter(rows.launch)): flag} and flag.item() == 0  # in its place: a graph that was captured writes there
    rows.check_flags()
    quiet = Rows.pushed([1], [19], "cpu")
    ops.fp8_select(q, gates, CodedRows(codes[None], scales[None], table), quiet, 20, program=CPU)  # all are taken, unscored
    quiet.check_flags()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gates": floats(2, 4, 3)}, r"queries have \(4, 2\) rows and heads, weights \(4, 3\)"),
        ({"q": floats(1, 4, 2, 9)}, "queries of 9 columns, keys of 8"),
        (
            {"q": floats(1, 4, 2, 200), "codes": torch.zeros(4, 200).to(torch.float8_e4m3fn)},
            "heads of 200 columns, one scale serves at most 128",
        ),
        ({"scales": torch.ones(4, 2)}, r"keys \(4, 8\) have scales \(4, 2\), not one each"),
        ({"scales": torch.ones(3, 1)}, r"have scales \(3, 1\)"),
        ({"scales": torch.ones(4, 1).bfloat16()}, "float32"),
        ({"codes": torch.zeros(4, 8).bfloat16()}, "float8_e4m3fn"),
        ({"top_k": 0}, "top 0 of a row's tokens, it takes at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given = {
        "q": floats(1, 4, 2, 8),
        "gates": floats(2, 4, 2),
        "codes": torch.zeros(4, 8).to(torch.float8_e4m3fn),
        "scales": torch.ones(4, 1),
    }
    given |= {"top_k": 2} | change
    rows = Rows.packed(torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=message):
        ops.fp8_select(given["q"], given["gates"], CodedRows(given["codes"], given["scales"]), rows, given["top_k"], program=CPU)


def test_a_gpu_s_geometry_names_the_class() -> None:
    """By heads and width alone, and each class has one provider, which serves what is named so."""
    cuda = Program("aligned", "cuda", "bfloat16")
    providers = {p.byte_class: p for p in ops.CONTRACTS["fp8_select"].providers if p.device == "cuda"}
    assert len(providers) == 2
    for heads, width in ((32, 128), (64, 128), (32, 32), (16, 128), (32, 40), (4, 16)):
        chosen = providers[cuda.byte_class("fp8_select", (heads, width))]
        assert chosen.name == ("deepgemm" if heads in (32, 64) and width == 128 else "triton") and chosen.serves(heads, width)
    assert cuda.byte_classes("fp8_select") == {"lane_sums": "", "deepgemm_scores": "32x128 and 64x128"}
