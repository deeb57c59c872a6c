"""No gradient obeys the process's TF32 setting: products of FP32 operands keep all their bits while an op's backward runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.common.ops import CONTRACTS
from zoo.common.ops.cases import Trial, cases_of
from zoo.common.ops.contract import whole_products
from zoo.common.program import resolve
from zoo.testing import tensors

FP32 = resolve("transformers", "cpu", torch.float32)
ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linalg_solve_triangular"}
MULTIPLY = (
    "attention",
    "compressed_attention",
    "experts",
    "fp8_experts",
    "fp8_linear",
    "gated_delta",
    "head_linear",
    "hyper_head",
    "hyper_post",
    "hyper_pre",
    "linear",
    "log_prob",
    "packed_experts",
    "sparse_attention",
)


@pytest.fixture(params=["tf32", "none", "ieee"])
def asked(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the user asked PyTorch for."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = request.param
    yield request.param
    products.fp32_precision = before


class Seen(TorchDispatchMode):
    """The setting at every product."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            self.settings.add(torch.backends.cuda.matmul.fp32_precision)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", MULTIPLY)
def test_a_backward_keeps_all_bits(op: str, asked: str) -> None:
    case = next(c for c in cases_of(op, FP32) if c.gradients and c.kind == "normal")
    args = case.make(0, "cpu", torch.float32)
    leaves = {name: args[name].clone().requires_grad_() for name in case.gradients if args[name] is not None}
    with Seen() as forward:
        out = Trial(case, FP32, args).call({**args, **leaves})
    total = sum(t.sum() for _, t in tensors(out) if t.requires_grad)
    with Seen() as backward:
        torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    assert backward.settings == {"ieee"}
    assert torch.backends.cuda.matmul.fp32_precision == asked
    assert forward.settings <= {asked}  # the control: it is seen as it is outside


def test_every_op_that_multiplies_backwards_is_listed() -> None:
    found = set()
    for op in CONTRACTS:
        for case in [c for c in cases_of(op, FP32) if c.gradients and c.kind == "normal"][:1]:
            args = case.make(0, "cpu", torch.float32)
            leaves = {name: args[name].clone().requires_grad_() for name in case.gradients if args[name] is not None}
            total = sum(t.sum() for _, t in tensors(Trial(case, FP32, args).call({**args, **leaves})) if t.requires_grad)
            with Seen() as backward:
                torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            found |= {op} if backward.settings else set()
    assert found == set(MULTIPLY)


def test_threads_leave_the_setting_as_the_first_found_it(asked: str) -> None:
    """Gradients of two GPUs run in two threads: neither may end the other's, nor take the other's setting for the user's."""
    inside = threading.Event()
    leave = threading.Event()

    def other() -> None:
        with whole_products:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with whole_products:
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    leave.set()
    thread.join()
    assert torch.backends.cuda.matmul.fp32_precision == asked


def test_a_backward_that_fails_restores_the_setting(asked: str) -> None:
    with pytest.raises(KeyError), whole_products:
        raise KeyError
    assert torch.backends.cuda.matmul.fp32_precision == asked
