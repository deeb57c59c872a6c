"""Every law that a contract claims, on every case of every op; and for each a broken op that must be caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from op_controls import FAULTS

from zoo.common import ops
from zoo.common.ops import CONTRACTS
from zoo.common.ops.cases import Case, Trial, cases_of, check
from zoo.common.program import Program, resolve
from zoo.testing import (
    LawBroken,
    Place,
    as_integers,
    assert_fusion_law,
    assert_place_law,
    assert_repeat_law,
    assert_same_bytes,
    assert_shard_law,
    assert_split_law,
    rows_at,
    split_plans,
    tensors,
    ulp_distance,
)

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
FLOAT32 = resolve("transformers", "cpu", torch.float32)
CLAIMS = [(name, law) for name, contract in sorted(CONTRACTS.items()) for law in contract.laws]


def _everywhere() -> list[Any]:
    """(program, case, law) as parameters; published sizes and other kernels on CUDA only, transformers' program in FP32."""
    cuda = Program("aligned", "cuda", "bfloat16") if not torch.cuda.is_available() else resolve("aligned", "cuda", torch.bfloat16)
    out = []
    for program, laws, marks in (
        (ALIGNED, None, ()),
        (FLOAT32, ("row", "split", "repeat"), ()),
        (cuda, None, (pytest.mark.gpu,)),
    ):
        for name, law in CLAIMS:
            for case in cases_of(name, program) if laws is None or law in laws else ():
                if law in case.laws:
                    label = f"{program.device}-{program.dtype}-{name}-{law}-{case.name}".replace(" ", "_")
                    out.append(pytest.param(program, case, law, id=label, marks=marks))
    return out


@pytest.mark.parametrize(("program", "case", "law"), _everywhere())
def test_law(program: Program, case: Case, law: str) -> None:
    check(case, law, program)


@pytest.mark.parametrize(("name", "law"), CLAIMS)
def test_every_claim_is_tested_and_has_a_fault(name: str, law: str) -> None:
    assert any(law in case.laws for case in cases_of(name, ALIGNED)), f"{name} claims the {law} law, no case of it tests that"
    assert FAULTS.get((name, law)), f"{name} claims the {law} law, no broken op shows that the test would see a fault"


@pytest.mark.parametrize(("name", "law"), [pytest.param(*claim, id="-".join(claim)) for claim in CLAIMS])
def test_fault_is_caught(name: str, law: str) -> None:
    """Each fault is seen by at least one case, in BF16 or, where rounding to BF16 hides an ulp of FP32, in FP32."""
    for fault in FAULTS[name, law]:
        assert _caught(name, law, fault), f"{fault} breaks the {law} law of {name}, and nothing saw it"


@pytest.mark.parametrize("law", ["row", "split", "place", "shard"])
def test_a_fault_at_heads_of_256_is_caught(law: str) -> None:
    """In pages of 80, as they are served. A fault that tells page sizes apart has nothing to show there, so place has another."""
    assert _caught("attention", law, FAULTS["attention", law][-1], "heads of 256")


def _caught(name: str, law: str, fault: Any, part: str = "") -> bool:
    """`part`: of the names of the cases that are tried."""
    for program in (ALIGNED, FLOAT32):
        for case in cases_of(name, program):
            if law in case.laws and part in case.name:
                try:
                    check(case, law, program, replace=fault)
                except LawBroken as error:
                    assert f"{law} law" in str(error)
                    return True
    return False


@pytest.mark.parametrize("segment", [64, 128])  # one key tile, and two
@pytest.mark.parametrize("law", CONTRACTS["attention"].laws)
def test_attention_in_short_segments(segment: int, law: str) -> None:
    program = replace(ALIGNED, key_segments=((256, segment),))
    for case in cases_of("attention", program):
        if law in case.laws and max(case.make(0, "cpu", torch.bfloat16)["lengths"]) > segment:
            check(case, law, program, seed=segment)


def test_segments_are_another_arithmetic() -> None:
    """The control of the test above: segments move bytes, so they did run."""
    one_pass = replace(ALIGNED, key_segments=())
    case = next(c for c in cases_of("attention", ALIGNED) if c.name == "edges")
    args = case.make(0, "cpu", torch.bfloat16)
    with pytest.raises(LawBroken):
        assert_same_bytes(Trial(case, ALIGNED, args).call(), Trial(case, one_pass, args).call())


@pytest.mark.parametrize("law", CONTRACTS["combine"].laws)
def test_combine_by_16_contributors(law: str) -> None:
    """GLM's number of them."""
    program = replace(ALIGNED, contributors=16)
    cases = [case for case in cases_of("combine", program) if law in case.laws]
    for case in cases:
        check(case, law, program, seed=16)
    if law == "shard":  # the control: 8 contributors, which 16 ranks would split
        with pytest.raises(LawBroken, match="shard law"):
            check(next(case for case in cases if case.name == "128 experts"), law, program, replace={"combine": contributors_of_8})


def contributors_of_8(*args: Any, program: Program, **named: Any) -> Any:
    return ops.combine(*args, program=replace(program, contributors=8), **named)


def test_an_op_without_cases_is_named() -> None:
    with pytest.raises(ValueError, match=r"op 'unheard_of' has no cases: write .*unheard_of/cases\.py"):
        cases_of("unheard_of", ALIGNED)
    case = cases_of("embed", ALIGNED)[0]
    with pytest.raises(ValueError, match="knows the laws row, place, repeat, not 'column'"):
        check(case, "column", ALIGNED)


def _bf16(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_same_bytes_sees_every_bit() -> None:
    nan = _bf16(0x7FC0)
    other_nan = _bf16(0x7FC1)
    assert_same_bytes(nan, nan.clone())
    with pytest.raises(LawBroken, match="0x7fc0.*0x7fc1.*not finite"):
        assert_same_bytes(nan, other_nan)
    with pytest.raises(LawBroken, match=r"1 of 3 elements differ; first at \(1,\): 0.0 \(0x0000\) against -0.0 \(0x8000\), 0 ulp"):
        assert_same_bytes(_bf16(1, 0, 5), _bf16(1, 0x8000, 5))
    with pytest.raises(LawBroken, match=r"2 of 4 elements differ; first at \(0, 1\).* 1 ulp; largest finite distance 3 ulp"):
        assert_same_bytes(_bf16(7, 9, 8, 0x8001).view(2, 2), _bf16(7, 10, 8, 2).view(2, 2))
    with pytest.raises(LawBroken, match="float32"):
        assert_same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(LawBroken, match=r"\(2,\).*\(3,\)"):
        assert_same_bytes(torch.zeros(2), torch.zeros(3))
    with pytest.raises(LawBroken, match="row, out.b"):
        assert_same_bytes({"a": nan, "b": torch.tensor([1])}, {"a": nan, "b": torch.tensor([2])}, "row")
    with pytest.raises(LawBroken, match="outputs"):
        assert_same_bytes((nan, nan), (nan, None))
    assert_same_bytes(torch.zeros(0), torch.zeros(0))


def test_ulp_distance_crosses_zero() -> None:
    a = torch.tensor([1.0, -1e-45, torch.inf])
    b = torch.tensor([1.0 + 2**-23, 1e-45, 1.0])
    assert ulp_distance(a, b).tolist() == [1, 2, -1]
    assert as_integers(torch.tensor([True])).tolist() == [1]


def test_split_plans_push_every_row_once() -> None:
    lengths = [130, 1, 64]
    plans = split_plans(lengths)
    assert {"whole", "a row at a time", "cut at 64", "cut at 129", "in pieces of 65", "at random"} <= set(plans)
    for name, plan in plans.items():
        assert [sum(step[n] for step in plan) for n in range(3)] == lengths, name
    assert len(plans["a row at a time"]) == 130


def test_helpers_catch_bare_faults() -> None:
    """The helpers without any op: each passes an honest function and catches a dishonest one."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert_fusion_law(lambda: x + 1, lambda: 1 + x)
    with pytest.raises(LawBroken, match="fusion law"):
        assert_fusion_law(lambda: x + 1, lambda: x + 1.0001)
    assert_shard_law(lambda degree: torch.cat([part * 2 for part in x.tensor_split(degree)]), (1, 2, 4))
    with pytest.raises(LawBroken, match="shard law: degree 2 against degree 1"):
        assert_shard_law(lambda degree: x / degree, (1, 2))
    with pytest.raises(ValueError, match=r"shard law: 1 of its variants differ \(degree 1\), it takes 2"):
        assert_shard_law(lambda degree: x, (1,))
    with pytest.raises(ValueError, match="split law: 1 of its variants differ"):
        assert_split_law(lambda plan: x, split_plans([1]))
    with pytest.raises(ValueError, match="place law: 1 of its variants differ"):
        assert_place_law(lambda place: x, {"alone": Place()})
    assert_split_law(lambda plan: x, split_plans([3]))
    with pytest.raises(LawBroken, match="split law: a row at a time against whole"):
        assert_split_law(lambda plan: x * len(plan), split_plans([3]))
    at = rows_at(lambda args: args["x"] * 2, {"x": x}, ["x"])
    assert_place_law(at, {"alone": Place(), "padded": Place(2, 3, live=True), "inside": Place(2, 3)})
    summed = rows_at(lambda args: args["x"] + args["x"].sum(0), {"x": x}, ["x"])
    with pytest.raises(LawBroken, match="place law: padded against alone"):
        assert_place_law(summed, {"alone": Place(), "padded": Place(2, 3, 1.0, live=True)})
    for nothing, why in ((x[:0], "no element"), (x * torch.nan, "NaN alone")):
        with pytest.raises(LawBroken, match=why):
            assert_split_law(lambda plan, nothing=nothing: nothing, split_plans([3]))
    assert [t.shape for _, t in tensors([x, {"k": (x, None)}])] == [x.shape] * 2


class _RandomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.rand(())


def test_repeat_law_sees_the_backward() -> None:
    args = {"x": torch.ones(3, 2)}
    assert_repeat_law(lambda a: _RandomBackward.apply(a["x"]), args)
    with pytest.raises(LawBroken, match="repeat law: call 2 against the first"):
        assert_repeat_law(lambda a: _RandomBackward.apply(a["x"]), args, ("x",))
