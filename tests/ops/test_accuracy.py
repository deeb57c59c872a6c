"""`zoo qualify --kernel` looks at the forward's numbers: which ones pass, and which don't, for every op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from op_formulas import TEXTBOOK
from torch import Tensor

from zoo.common import ops
from zoo.common.history import KeyValues, TokenRows
from zoo.common.ops.cases import Case, cases_of, trial
from zoo.common.program import resolve
from zoo.testing import tensors
from zoo.verify.accuracy import misses, reaches, reference, relative_error

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)


def reached(op: str) -> list[Case]:
    return [case for case in cases_of(op, ALIGNED) if reaches(case, ALIGNED, op)]


CASES = [pytest.param(c, id=f"{c.op}-{c.name}".replace(" ", "_")) for name in sorted(ops.CONTRACTS) for c in reached(name)]


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A result with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: changed(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, tuple):
        items = [changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def off(op: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Our op with a fault of its numbers."""
    public = getattr(ops, op)
    return lambda *args, **names: changed(public(*args, **names), change)


def honest(case: Case) -> Callable[..., Any]:
    """The textbook in FP32, rounded at the end: another order of additions, and other bytes."""
    dtypes = iter([t.dtype for _, t in tensors(trial(case, ALIGNED).call())])

    def wide(value: Any) -> Any:
        if isinstance(value, KeyValues):
            return replace(value, k=value.k.float(), v=value.v.float())
        if isinstance(value, TokenRows):
            return replace(value, rows=value.rows.float())
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    def call(*args: Any, **names: Any) -> Any:
        result = TEXTBOOK[case.op](*map(wide, args), **{name: wide(value) for name, value in names.items()})
        return changed(result, lambda t: t.to(next(dtypes)))

    return call


def turned(t: Tensor) -> Tensor:
    """Other numbers of the same kind; torch multiplies no FP8."""
    return (3 * t.float() + 1).to(t.dtype) if t.is_floating_point() and t.element_size() == 1 else 3 * t + 1


@pytest.mark.parametrize("case", CASES)
def test_ours_are_within_and_wrong_ones_are_not(case: Case) -> None:
    assert not misses(case, ALIGNED, case.op, getattr(ops, case.op))
    outputs = len(tensors(trial(case, ALIGNED).call()))
    for change in (turned, lambda t: torch.full_like(t, torch.nan if t.is_floating_point() else -1)):
        found = misses(case, ALIGNED, case.op, off(case.op, change))
        assert len(found) == outputs and all(line.startswith(case.name) and ", at most " in line for line in found)
    assert misses(case, ALIGNED, case.op, off(case.op, lambda t: t.double()))  # another dtype
    assert misses(case, ALIGNED, case.op, off(case.op, lambda t: t[:0]))  # and shape


@pytest.mark.parametrize("case", [p for p in CASES if p.values[0].op in TEXTBOOK])
def test_an_honest_kernel_of_other_bytes_is_within(case: Case) -> None:
    assert not misses(case, ALIGNED, case.op, honest(case))


@pytest.mark.parametrize("op", sorted(set(ops.CONTRACTS) - {"select", "compressed_select", "fp8_select"}))
def test_two_percent_are_seen(op: str) -> None:
    """The bound is no wider than that in any op; of a selector's integers every one must be right.

    But for experts in FP8: a rounding of the inner rows to BF16 moves some of their codes, of three bits each, by a step.
    """
    seen = 0
    factor = 1.1 if op == "fp8_experts" else 1.02
    for case in reached(op):
        if case.kind == "normal" and any(t.is_floating_point() and t.any() for _, t in tensors(trial(case, ALIGNED).call())):
            assert misses(case, ALIGNED, op, off(op, lambda t: t * factor if t.is_floating_point() else t)), case.name
            seen += 1
    assert seen


def test_a_case_of_another_function_does_not_count() -> None:
    cases = cases_of("rms_norm", ALIGNED)
    assert {case.name for case in cases} - {case.name for case in reached("rms_norm")} == {
        "tiny",
        "odd, added",
        "cancelling sum",
        "1024 wide",
    }
    assert all(len(reached(op)) == len(cases_of(op, ALIGNED)) for op in ops.CONTRACTS if op != "rms_norm")


def test_a_published_shape_is_measured_from_our_kernel() -> None:
    for op in ("linear", "route", "log_prob"):
        for case in cases_of(op, ALIGNED):
            sized = replace(case, device_sized=True)
            assert not misses(sized, ALIGNED, op, getattr(ops, op))
            found = misses(sized, ALIGNED, op, off(op, lambda t: 3 * t + 1))
            assert found and all("distance from ours" in line for line in found)


@pytest.mark.parametrize("op", sorted(ops.CONTRACTS))
def test_a_gpu_s_cases_have_a_reference_here(op: str) -> None:
    """Its segments of keys are no whole tiles of the reference's, its numbers are drawn the same."""
    cuda = resolve("aligned", "cuda", torch.bfloat16)
    here = {case.name: case for case in cases_of(op, ALIGNED)}
    for case in cases_of(op, cuda):
        if case.device_sized or case.name.endswith("edges"):  # many documents: slow
            continue
        found = reference(case, cuda)
        wide = all(t.dtype == torch.float64 for _, t in found if t.is_floating_point())
        assert found and (wide or op == "fp8_quantise")  # whose scales are FP32 in every program
        if case.name in here and op != "attention":  # whose lengths follow the device's segments
            assert all(relative_error(a, b) < 1e-12 for (_, a), (_, b) in zip(found, reference(here[case.name], ALIGNED), strict=True))


def test_relative_error() -> None:
    exact = torch.tensor([3.0, 4.0, torch.inf, 0.0], dtype=torch.float64)
    assert relative_error(exact.float(), exact) == 0
    assert relative_error(torch.tensor([3.0, 4.5, torch.inf, 1e-40]), exact) == 0.1
    for wrong in ([3.0, 4.0, -torch.inf, 0.0], [3.0, 4.0, 9.0, 0.0], [3.0, torch.nan, torch.inf, 0.0], [torch.inf, 4.0, torch.inf, 0.0]):
        assert not relative_error(torch.tensor(wrong), exact) <= 1e9
    assert relative_error(torch.tensor([0.5]), torch.zeros(1, dtype=torch.float64)) == 0.5
    assert relative_error(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
