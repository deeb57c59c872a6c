"""What ops may be given: each contract names the dtype of every tensor argument, and a call with another one is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.ops.cases import Trial, cases_of
from zoo.common.ops.contract import EITHER, EXPONENTS, FLOAT32, FP8, INTEGERS, PACKED, PROGRAM, WIDE, checked, watch
from zoo.common.ops.log_prob.top import named_log_prob
from zoo.common.program import resolve
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
# a dtype that each kind does not take
OTHER = {
    PROGRAM: torch.float32,
    WIDE: torch.bfloat16,
    EITHER: torch.float64,
    FLOAT32: torch.bfloat16,
    INTEGERS: torch.float32,
    FP8: torch.bfloat16,
    PACKED: torch.bfloat16,
    EXPONENTS: torch.float32,
}

Call = tuple[Callable[..., Any], dict[str, Any]]


def calls_of(op: str) -> list[Call]:
    """The calls of an op's own functions that its cases make: (the public function, its arguments by name)."""
    found: list[Call] = []

    def before(contract: ops.Contract, seen: dict[str, Any]) -> None:
        function = seen["function"]
        if contract.name == op:
            named = {name: value for name, value in seen.items() if name not in ("args", "function")}
            found.append((function, {**dict(zip(inspect.signature(function).parameters, seen["args"])), **named}))

    with watch(lambda *_: None, before):
        for case in cases_of(op, ALIGNED)[:8]:
            Trial(case, ALIGNED, case.make(0, "cpu", torch.bfloat16)).call()
    return found


def recast(value: Any, attribute: str, dtype: torch.dtype) -> Any:
    """A tensor in another dtype, or the record that holds it under this name."""
    return replace(value, **{attribute: getattr(value, attribute).to(dtype)}) if attribute else value.to(dtype)


# arguments of functions that no case calls: see the test behind the next
BESIDE = {"gated_delta": {"initial_NVKE"}, "log_prob": {"ids_K", "lse_R", "logits_RV"}, "sample": {"hidden_RD", "weight_VD", "targets_R"}}


@pytest.mark.parametrize("op", sorted(ops.CONTRACTS))
def test_another_dtype_is_refused_by_name(op: str) -> None:
    contract = ops.CONTRACTS[op]
    seen = set()
    for function, arguments in calls_of(op):
        for path, kind in contract.reads.items():
            name, _, attribute = path.partition(".")
            if path in seen or arguments.get(name) is None:
                continue
            function(**arguments)  # the control: as the case has it
            with pytest.raises(ValueError, match=rf"^{op}: {name} is {OTHER[kind]}, program 'aligned' reads "):
                function(**{**arguments, name: recast(arguments[name], attribute, OTHER[kind])})
            seen.add(path)
    assert seen | BESIDE.get(op, set()) == set(contract.reads)


def test_the_others_are_refused_too() -> None:
    hidden = torch.zeros(2, 4).bfloat16()
    weight = torch.zeros(8, 4).bfloat16()
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"log_prob: lse_R is torch.bfloat16, program 'aligned' reads torch.float32"):
        ops.top_log_prob(hidden, weight, torch.zeros(2).bfloat16(), 1, program=ALIGNED)
    with pytest.raises(ValueError, match=r"log_prob: ids_K is torch.float32, program 'aligned' reads torch.int64 or torch.int32"):
        named_log_prob(hidden, weight, torch.zeros(2), ids.float(), program=ALIGNED)
    with pytest.raises(ValueError, match=r"log_prob: logits_RV is torch.bfloat16, program 'aligned' reads torch.float32"):
        ops.log_prob_of_logits(torch.zeros(2, 8).bfloat16(), ids, program=ALIGNED)
    greedy = RowSampling.buffer(2, "cpu")
    for name, given in {"hidden_RD": (hidden.float(), weight, ids), "weight_VD": (hidden, weight.float(), ids)}.items():
        with pytest.raises(ValueError, match=rf"sample: {name} is torch.float32, program 'aligned' reads torch.bfloat16"):
            ops.score_filtered(*given, greedy, ALIGNED)
    with pytest.raises(ValueError, match=r"sample: targets_R is torch.float32, program 'aligned' reads torch.int64 or torch.int32"):
        ops.score_filtered(hidden, weight, ids.float(), greedy, ALIGNED)
    heads = torch.zeros(2, 1, 16).bfloat16()
    gate = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"gated_delta: initial_NVKE is torch.bfloat16, program 'aligned' reads torch.float32"):
        rows = Rows.pushed([2], None, "cpu")
        ops.gated_delta_states(heads, heads, heads, gate, gate, torch.zeros(1, 1, 16, 16).bfloat16(), rows, program=ALIGNED)


def test_an_argument_that_no_contract_names_does_not_import() -> None:
    def op(x_RK: Tensor, other_RK: Tensor, *, program: object) -> Tensor:
        return x_RK

    with pytest.raises(AssertionError, match=r"linear reads \['other_RK'\] of op in no dtype"):
        checked(ops.CONTRACTS["linear"])(op)


def test_a_program_in_float32_reads_float32() -> None:
    program = resolve("transformers", "cpu", torch.float32)
    assert ops.linear(torch.ones(1, 2), torch.ones(3, 2), program=program).tolist() == [[2.0, 2.0, 2.0]]
    with pytest.raises(ValueError, match="weight_NK is torch.bfloat16, program 'transformers' reads torch.float32"):
        ops.linear(torch.ones(1, 2), torch.ones(3, 2).bfloat16(), program=program)
