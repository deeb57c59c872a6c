"""Cases: named inputs of an op, and how each law is put to them. Tests, `zoo qualify` and benchmarks read the same list.

An op's `cases.py` has one function, `cases(program) -> list[Case]`. `check` puts one law to one case; `replace` lets an outside
function with the public signature of an op stand in for it.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.common.ops.contract import Provider
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import PLACES, Along, Args, Plan, assert_place_law, assert_repeat_law, assert_row_law, rows_at


@dataclass(frozen=True)
class Case:
    """One input of one op.

    make          (seed, device, dtype) -> arguments; float64 is for gradient tests
    call          runs the op on such arguments
    laws          law -> the check that puts it to a trial of this case
    gradients     arguments that get a gradient
    device_sized  a published model's shape: for GPUs and benchmarks only
    devices       where the program's byte class can run it
    kind          of its numbers, see `Draw.floats`
    """

    name: str
    op: str
    make: Callable[[int, torch.device | str, torch.dtype], Args]
    call: Callable[[Trial, Args], Any]
    laws: Mapping[str, Callable[[Trial], None]]
    gradients: tuple[str, ...] = ()
    device_sized: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    kind: str = "normal"

    def runs_on(self, device: str) -> bool:
        return device in self.devices and (device == "cuda" or not self.device_sized)


@dataclass(frozen=True)
class Product:
    """A call of a provider's own functions that reaches one launch of kernels that multiply matrices.

    make  (seed, device, dtype) -> arguments; float64 is for what the results are held against
    run   makes the results by a provider
    """

    name: str
    op: str
    make: Callable[[int, torch.device | str, torch.dtype], Args]
    run: Callable[[Provider, Args], Any]


@dataclass(frozen=True)
class Trial:
    """One case's arguments under one program, with outside functions in place of the named ops."""

    case: Case
    program: Program
    args: Args
    replace: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    seed: int = 0

    def op(self, name: str) -> Callable[..., Any]:
        """The public op (of `zoo.common.ops`) of that name, or what stands in for it."""
        return self.replace.get(name) or getattr(importlib.import_module("zoo.common.ops"), name)

    def call(self, args: Args | None = None) -> Any:
        return self.case.call(self, self.args if args is None else args)


def cases_of(op: str, program: Program) -> list[Case]:
    """The cases of an op that run on the program's device, small ones first. ValueError for an op that has none."""
    name = f"zoo.common.ops.{op}.cases"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise ValueError(f"op {op!r} has no cases: write {name.replace('.', '/')}.py") from None
    found = [case for case in module.cases(program) if case.runs_on(program.device)]
    return sorted(found, key=lambda case: case.device_sized)


def products_of(op: str) -> list[Product]:
    """The products of an op whose kernels multiply matrices, from `products()` of its cases; none for another op."""
    module = importlib.import_module(f"zoo.common.ops.{op}.cases")
    return module.products() if "products" in vars(module) else []


def trial(case: Case, program: Program, *, replace: Mapping[str, Callable[..., Any]] | None = None, seed: int = 0) -> Trial:
    return Trial(case, program, case.make(seed, program.device, program.torch_dtype), replace or {}, seed)


def check(case: Case, law: str, program: Program, *, replace: Mapping[str, Callable[..., Any]] | None = None, seed: int = 0) -> None:
    """Puts one law to one case. LawBroken if it fails, ValueError if the case does not know the law."""
    if law not in case.laws:
        raise ValueError(f"{case.op} case {case.name!r} knows the laws {', '.join(case.laws)}, not {law!r}")
    case.laws[law](trial(case, program, replace=replace, seed=seed))


def row_laws(*names: str) -> dict[str, Callable[[Trial], None]]:
    """The laws row, place and repeat for an op whose named arguments have rows in dim 0."""

    def row(t: Trial) -> None:
        assert_row_law(t.call, t.args, Along(*names), seed=t.seed)

    def place(t: Trial) -> None:
        assert_place_law(rows_at(t.call, t.args, names), PLACES)

    return {"row": row, "place": place, "repeat": repeat}


def repeat(t: Trial) -> None:
    assert_repeat_law(t.call, t.args, t.case.gradients)


def starts_of(lengths: Sequence[int]) -> list[int]:
    """The row offsets of documents packed one after another, as cu_seqlens has them."""
    return [0, *itertools.accumulate(lengths)]


class Documents:
    """Units of whole documents, of `args["lengths"]` rows each in dim 0 of the named tensors.

    A row's own history comes along, its neighbours are other documents.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def count(self, args: Args) -> int:
        return len(args["lengths"])

    def outputs(self, args: Args, index: Tensor) -> Tensor:
        starts = starts_of(args["lengths"])
        return torch.cat([torch.arange(starts[n], starts[n + 1]) for n in index.tolist()])

    def take(self, args: Args, index: Tensor) -> Args:
        rows = self.outputs(args, index).to(args[self.names[0]].device)
        lengths = [args["lengths"][n] for n in index.tolist()]
        return {**args, **{name: args[name].index_select(0, rows) for name in self.names}, "lengths": lengths}

    def spoil(self, args: Args, kept: Tensor, value: float) -> Args:
        rows = self.outputs(args, kept).to(args[self.names[0]].device)
        spoilt = [n for n in self.names if args[n].is_floating_point()]
        filled = {n: torch.full_like(args[n], value).index_copy_(0, rows, args[n].index_select(0, rows)) for n in spoilt}
        return {**args, **filled}


def pushes(plan: Plan, lengths: Sequence[int], device: torch.device) -> Iterator[tuple[list[int], Rows, Tensor]]:
    """The steps of a plan: (documents that push rows, these rows, where they lie among the packed rows)."""
    starts = starts_of(lengths)
    pushed = [0] * len(lengths)
    for step in plan:
        live = [n for n, count in enumerate(step) if count]
        rows = Rows.pushed([step[n] for n in live], [pushed[n] for n in live], device)
        first = {n: starts[n] + pushed[n] for n in live}
        yield live, rows, torch.cat([torch.arange(first[n], first[n] + step[n]) for n in live]).to(device)
        for n in live:
            pushed[n] += step[n]
    assert pushed == list(lengths), f"the plan pushes {pushed} rows of {list(lengths)}"


class Draw:
    """Random arguments, drawn on the CPU so that a seed means the same numbers on every device."""

    def __init__(self, seed: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.dtype = dtype

    def floats(self, *shape: int, kind: str = "normal", scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """`kind`: normal; wide (48 binades); cancel (neighbours nearly opposite); subnormal (below 2^-126); ties (few values)."""
        x = torch.randn(shape, generator=self.generator) * scale
        if kind == "wide":
            x = x * 2.0 ** self.integers(*shape, below=49).cpu().sub(24)
        elif kind == "cancel":
            even = x[..., : x.shape[-1] // 2 * 2 : 2]
            x[..., 1::2] = -even * (1 + 2.0**-7 * torch.rand(even.shape, generator=self.generator))
        elif kind == "subnormal":
            x = x * 2.0**-129
        elif kind == "ties":
            x = x.round()
        else:
            assert kind == "normal", kind
        return x.to(dtype or self.dtype).to(self.device)

    def integers(self, *shape: int, below: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def choices(self, rows: int, depth: int, of: int) -> Tensor:
        """[rows, depth] distinct integers below `of` in each row."""
        return torch.rand(rows, of, generator=self.generator).argsort(1)[:, :depth].contiguous().to(self.device)
