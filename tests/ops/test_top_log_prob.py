"""top_log_prob: its list is that of a full sort, its bytes are log_prob's, and it never holds [R, V]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_controls import batch_scaled, from_storage_start, jittered
from op_sizes import Largest
from torch import Tensor

from zoo.common import ops
from zoo.common.ops.cases import Case, Draw, Trial, check, row_laws
from zoo.common.ops.log_prob import VOCABULARY_CHUNK
from zoo.common.program import Program, resolve
from zoo.testing import Args, LawBroken, assert_fusion_law, assert_same_bytes

PROGRAM = resolve("aligned", "cpu", torch.bfloat16)


def operands(rows: int, vocabulary: int, width: int = 16, ties: bool = False) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(rows, width)
    weight = torch.randn(vocabulary, width)
    return (hidden.round().bfloat16(), weight.round().bfloat16()) if ties else (hidden.bfloat16(), weight.bfloat16())


def top(hidden: Tensor, weight: Tensor, top_k: int, inverse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(hidden.shape[0], dtype=torch.int64)
    scores = ops.log_prob(hidden, weight, zeros, program=PROGRAM, inverse_temperature_R=inverse)
    return ops.top_log_prob(hidden, weight, scores.lse_R, top_k, program=PROGRAM, inverse_temperature_R=inverse)


def by_hand(logits_V: list[float], top_k: int) -> list[int]:
    return sorted(range(len(logits_V)), key=lambda i: (-logits_V[i], i))[:top_k]


@pytest.mark.parametrize(("vocabulary", "top_k"), [(1, 1), (40, 40), (300, 7), (VOCABULARY_CHUNK + 3, 5)])
def test_list_is_that_of_a_full_sort_among_ties(vocabulary: int, top_k: int) -> None:
    hidden, weight = operands(5, vocabulary, 4, ties=True)
    ids, log_prob = top(hidden, weight, top_k)
    logits = ops.logits(hidden, weight, program=PROGRAM)
    assert ids.dtype == torch.int64 and log_prob.dtype == torch.float32 and ids.shape == log_prob.shape == (5, top_k)
    for row in range(5):
        assert ids[row].tolist() == by_hand(logits[row].tolist(), top_k)
    if vocabulary > top_k:  # the boundary of some row's list lies inside a tie, so the rule was needed
        kept = logits.gather(1, ids[:, -1:])
        assert ((logits == kept).sum(1) > (logits.gather(1, ids) == kept).sum(1)).any()


@pytest.mark.parametrize("scaled", [False, True])
def test_bytes_are_those_of_log_prob(scaled: bool) -> None:
    hidden, weight = operands(6, 700)
    inverse = torch.rand(6) + 0.5 if scaled else None
    ids, log_prob = top(hidden, weight, 9, inverse)
    for k in range(9):
        alone = ops.log_prob(hidden, weight, ids[:, k].contiguous(), program=PROGRAM, inverse_temperature_R=inverse).log_prob_R
        assert_same_bytes(log_prob[:, k].contiguous(), alone)
    other = torch.full((6,), 1.25)
    with pytest.raises(LawBroken):  # the control: another temperature is seen
        assert_same_bytes(log_prob, top(hidden, weight, 9, other)[1])
    assert not log_prob.requires_grad and (log_prob <= 0).all() and (log_prob.diff(dim=1) <= 0).all()


def test_both_zeros_are_one_logit() -> None:
    hidden = torch.tensor([[1.0, 0.0]]).bfloat16()
    weight = torch.tensor([[-0.0, 0.0], [0.0, 0.0], [-1.0, 0.0]]).bfloat16()
    assert top(hidden, weight, 3)[0].tolist() == [[0, 1, 2]]


def test_a_row_of_nan_shows_and_spares_its_neighbours() -> None:
    hidden, weight = operands(3, 50)
    clean = top(hidden, weight, 4)
    hidden[1] = torch.nan
    ids, log_prob = top(hidden, weight, 4)
    assert log_prob[1].isnan().all()
    assert_same_bytes((ids[::2].contiguous(), log_prob[::2].contiguous()), [t[::2].contiguous() for t in clean])


def test_all_logits_are_never_held() -> None:
    hidden, weight = operands(64, 3 * VOCABULARY_CHUNK, 2)
    lse = torch.full((64,), 12.0)
    with Largest() as seen:
        ops.top_log_prob(hidden, weight, lse, 8, program=PROGRAM)
    assert seen.numel < 64 * (VOCABULARY_CHUNK + 64)
    with Largest() as control:
        ops.logits(hidden, weight, program=PROGRAM)
    assert control.numel >= 64 * 3 * VOCABULARY_CHUNK


@pytest.mark.parametrize("top_k", [0, -1, 51])
def test_an_impossible_count_is_refused(top_k: int) -> None:
    hidden, weight = operands(2, 50)
    with pytest.raises(ValueError, match=rf"top_k must be between 1 and the vocabulary of 50, not {top_k}"):
        ops.top_log_prob(hidden, weight, torch.zeros(2), top_k, program=PROGRAM)


def _case(name: str, rows: int, vocabulary: int, width: int, top_k: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {
            "hidden_RD": draw.floats(rows, width, kind=kind),
            "weight_VD": draw.floats(vocabulary, width, kind=kind, scale=1.0 if kind == "ties" else 3.0 * width**-0.5),
            "lse_R": draw.floats(rows, dtype=torch.float32).abs() + 40.0,
            "inverse_temperature_R": draw.floats(rows, dtype=torch.float32).abs() + 0.5,
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("top_log_prob")(**args, top_k=top_k, program=t.program)

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            scale = t.args["inverse_temperature_R"]
            logits = ops.logits(t.args["hidden_RD"], t.args["weight_VD"], program=t.program, inverse_temperature_R=scale)
            ids = (logits + 0.0).sort(dim=1, descending=True, stable=True)[1][:, :top_k].contiguous()
            return ids, torch.clamp(logits.gather(1, ids) - t.args["lse_R"][:, None], max=0.0)

        assert_fusion_law(t.call, composed)

    laws = {**row_laws("hidden_RD", "lse_R", "inverse_temperature_R"), "fusion": fusion}
    return Case(name, "log_prob", make, call, laws, (), device_sized, kind=kind)


CASES = [
    _case("top 1", 5, 300, 64, 1),
    _case("ties", 9, 773, 16, 37, "ties"),
    _case("two chunks of the vocabulary", 2, VOCABULARY_CHUNK + 257, 16, 6, "ties"),
    _case("qwen3-8b", 65, 151936, 4096, 20, device_sized=True),
]


def _everywhere() -> list[Any]:
    small = [(PROGRAM, case, ()) for case in CASES if not case.device_sized]
    large = [(Program("aligned", "cuda", "bfloat16"), case, (pytest.mark.gpu,)) for case in CASES]
    return [
        pytest.param(program, case, law, marks=marks, id=f"{program.device}-{case.name.replace(' ', '_')}-{law}")
        for program, case, marks in small + large
        for law in case.laws
    ]


@pytest.mark.parametrize(("program", "case", "law"), _everywhere())
def test_law(program: Program, case: Case, law: str) -> None:
    check(case, law, program)


def higher_id_first(hidden_RD: Tensor, weight_VD: Tensor, lse_R: Tensor, top_k: int, **names: Any) -> tuple[Tensor, Tensor]:
    """Another order among ties, as torch.topk may have: nobody promises it."""
    logits = ops.logits(hidden_RD, weight_VD, program=names["program"], inverse_temperature_R=names["inverse_temperature_R"])
    values, ids = logits.flip(1).sort(dim=1, descending=True, stable=True)
    return (logits.shape[1] - 1 - ids)[:, :top_k].contiguous(), torch.clamp(values[:, :top_k] - lse_R[:, None], max=0.0)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("fusion", higher_id_first),
        ("row", batch_scaled(ops.top_log_prob)),
        ("place", from_storage_start(ops.top_log_prob)),
        ("repeat", jittered(ops.top_log_prob)),
    ],
)
def test_laws_catch_a_fault(law: str, fault: Callable[..., Any]) -> None:
    def by_position(**names: Any) -> Any:
        return fault(names.pop("hidden_RD"), names.pop("weight_VD"), names.pop("lse_R"), names.pop("top_k"), **names)

    with pytest.raises(LawBroken, match=f"{law} law"):
        check(CASES[1], law, PROGRAM, replace={"top_log_prob": by_position})
