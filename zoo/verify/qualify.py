"""Admission of providers on this GPU and toolchain, and an outside kernel put through laws, numbers, gradient and benchmark."""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common import qualification
from zoo.common.fingerprint import products_of, toolchain
from zoo.common.ops import CONTRACTS
from zoo.common.ops.cases import Case, cases_of, check, trial
from zoo.common.program import Program, resolve
from zoo.common.qualification import Verdict
from zoo.common.registry import architectures, find
from zoo.testing import LawBroken, assert_same_bytes, gradients, tensors
from zoo.verify.accuracy import BOUND, misses, reaches
from zoo.verify.admission import PARTS, ROWS, Outcome, Shape, Task, compare, defining_of, side_by_side
from zoo.verify.subject import config_of


@dataclass(frozen=True)
class Target:
    """One op at one shape."""

    op: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))}"


def targets_of(model: nn.Module) -> list[Target]:
    """Every (op, shape) of a model whose provider is chosen by shape, its vocabulary head included; the meta device is enough."""
    return sorted((Target(op, shape) for op, shape in products_of(model)), key=lambda t: (t.op, t.shape))


def targets_of_sizes(arch: str, names: Iterable[str]) -> list[Target]:
    """The same for published sizes, without any weights."""
    family, _ = find(arch)
    program = resolve("aligned", "cuda", torch.bfloat16, family.contributors)
    found: dict[Target, None] = {}
    for name in names:
        config = config_of(arch, name, None)
        with torch.device("meta"):
            found |= dict.fromkeys(targets_of(family.serving(config, program)))
    return list(found)


def qualify(
    targets: Iterable[Target],
    say: Callable[[str], None] = lambda text: None,
    *,
    program: Program | None = None,
    again: bool = False,
    rows: int = ROWS[-1],
    jobs: int | None = None,
    modules: Sequence[str] = (),
    seconds: float | None = None,
) -> list[Verdict]:
    """Admits or refuses every candidate at every target that has no verdict yet (`again`: at all), and stores the verdicts at once.

    `say` gets a line per shape as it is decided. jobs: worker processes, by default one per CPU core, at most 16; 1: this process
    does it. modules: imported by the workers first. What is not decided after `seconds` stays without a verdict.
    """
    program, begin = program or resolve("aligned", "cuda", torch.bfloat16), time.monotonic()
    wanted: dict[tuple[Target, str], dict[str, Outcome | None]] = {}
    for target in dict.fromkeys(targets):
        if defining_of(target.op, target.shape, program) is None:
            continue
        for candidate in _candidates(target, program, modules):
            if again or not qualification.tried(target.op, candidate, target.shape):
                wanted[target, candidate] = dict.fromkeys(PARTS[target.op])
    tasks = [Task(t.op, t.shape, candidate, part, rows) for (t, candidate), parts in wanted.items() for part in parts]
    jobs = jobs or min(16, os.cpu_count() or 1)
    if tasks:
        say(f"qualifying {len(wanted)} shapes in {min(jobs, len(tasks))} processes")
    verdicts = []
    try:
        here = ((task, compare(task, program)) for task in tasks)
        for task, outcome in here if jobs == 1 else side_by_side(tasks, program, jobs, modules, seconds):
            target = Target(task.op, task.shape)
            parts = wanted[target, task.candidate]
            parts[task.part] = outcome
            done = [o for o in parts.values() if o is not None]
            if len(done) == len(parts):
                verdict, line = _verdict(target, task.candidate, done, program)
                say(line)
                verdicts += [] if verdict is None else [verdict]
    finally:
        if verdicts:
            about = {"toolchain": toolchain(torch.device(program.device))}
            qualification.write(qualification.path_for_this_machine(), verdicts, about)
    if tasks:
        say(f"qualified {len(verdicts)} of {len(wanted)} shapes in {time.monotonic() - begin:.1f} s")
    return verdicts


def _candidates(target: Target, program: Program, modules: Sequence[str]) -> list[str]:
    """Providers that could run a shape besides the defining one."""
    for module in modules:
        importlib.import_module(module)
    wanted = (program.byte_class(target.op), program.device, False)
    members = [p for p in CONTRACTS[target.op].providers if (p.byte_class, p.device, p.defining) == wanted]
    return [p.name for p in members if p.installed() and p.serves(*target.shape)]


def _verdict(target: Target, candidate: str, outcomes: list[Outcome], program: Program) -> tuple[Verdict | None, str]:
    """The verdict of all parts, and its line."""
    checks, seconds = sum(o.checks for o in outcomes), max(o.end for o in outcomes) - min(o.begin for o in outcomes)
    reason = next((o.reason for o in outcomes if o.reason), "")
    undecided = next((o.undecided for o in outcomes if o.undecided), "")
    if undecided and not reason:
        return None, f"{target}: {candidate} not decided: {undecided}"
    defining = defining_of(target.op, target.shape, program)
    assert defining is not None
    text = f"falls back to {defining.name}, {candidate}: {reason}" if reason else f"{candidate} admitted, {checks} comparisons"
    contract = CONTRACTS[target.op]
    version = next(p.version for p in contract.providers if p.name == candidate)
    return Verdict(target.op, candidate, target.shape, contract.version, checks, reason, version), f"{target}: {text} ({seconds:.1f} s)"


def running(targets: Iterable[Target], program: Program) -> list[tuple[Target, str, str]]:
    """(target, provider that runs it now, why no faster one does: empty where one does)."""
    out = []
    for target in targets:
        contract = CONTRACTS[target.op]
        provider = contract.provider(program, target.shape)
        wanted = program.byte_class(target.op)
        reasons = []
        for p in contract.providers:
            if p.defining or p.byte_class != wanted or p.device != program.device or not provider.defining:
                continue
            if not p.installed():
                reasons.append(f"{p.name} needs {', '.join(p.needs)}")
            elif not p.serves(*target.shape):
                reasons.append(f"{p.name} does not serve this shape")
            else:
                reasons.append(f"{p.name}: {qualification.reason(target.op, p.name, target.shape)}")
        out.append((target, provider.name, "; ".join(reasons)))
    return out


@dataclass(frozen=True)
class KernelReport:
    """What an outside kernel did: laws kept and broken by case, its numbers and gradient, and its time beside ours.

    missed   outputs whose error is too large, with their case and both numbers
    numbers  how many cases had none
    """

    op: str
    kernel: str
    kept: int
    broken: list[str]
    missed: list[str]
    numbers: str
    gradient: str
    equal: str
    benchmark: list[str]

    @property
    def ok(self) -> bool:
        return not self.broken and not self.missed and not self.gradient.startswith("wrong")


def outside(path: str) -> Callable[..., Any]:
    """`module:function`. ValueError if it can't be imported."""
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"--kernel {path!r} must be module:function")
    try:
        function = vars(importlib.import_module(module)).get(name)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}.")
        hint = "; `python -m zoo qualify ...` finds modules of the current folder" if absent else ""
        raise ValueError(f"--kernel {path!r}: {error}{hint}") from error
    if not callable(function):
        raise ValueError(f"--kernel {path!r}: {module} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def put_through(op: str, path: str, program: Program, say: Callable[[str], None] = lambda text: None) -> KernelReport:
    """An outside kernel with the op's public signature through every law of every case, its numbers, gradient and a benchmark."""
    if op not in CONTRACTS:
        raise ValueError(f"there is no op {op!r}; there are {', '.join(sorted(CONTRACTS))}")
    kernel = outside(path)
    ours = vars(importlib.import_module("zoo.common.ops"))[op]
    if fault := _unlike(list(inspect.signature(kernel).parameters), list(inspect.signature(ours).parameters)):
        raise ValueError(f"{path} {fault}: it takes {inspect.signature(kernel)}, ops.{op} takes {inspect.signature(ours)}")
    kept, equal, near = 0, 0, 0
    broken: list[str] = []
    missed: list[str] = []
    cases = cases_of(op, program)
    for case in cases:
        for law in case.laws:
            say(f"{law} law, {case.name}")
            try:
                check(case, law, program, replace={op: kernel})
                kept += 1
            except LawBroken as error:
                broken.append(f"{law} law, {case.name}: {error}")
            except (RuntimeError, ValueError, TypeError) as error:
                broken.append(f"{law} law, {case.name}: it failed: {error}")
    cases = [case for case in cases if reaches(case, program, op)]
    for case in cases:
        say(f"numbers, {case.name}")
        far = misses(case, program, op, kernel)
        near, missed = near + (not far), missed + far
        equal += _equal(case, program, op, kernel)
    published = sum(case.device_sized for case in cases)
    beside = f"; {published} of them are published shapes, which are held against our kernel instead" if published else ""
    numbers = f"numbers within {BOUND} in {near} of {len(cases)} cases{beside}"
    text = f"bytes equal to ours in {equal} of {len(cases)} cases"
    gradient = _gradient(cases, program, op, kernel)
    return KernelReport(op, path, kept, broken, missed, numbers, gradient, text, _benchmark(cases, program, op, kernel))


def _unlike(given: list[str], wanted: list[str]) -> str:
    """How the names of a kernel's parameters differ from the op's; annotations and defaults are not asked for."""
    more, less = ([name for name in one if name not in other] for one, other in ((given, wanted), (wanted, given)))
    faults = [f"lacks the parameter {name}" for name in less] + [f"has a parameter {name} that the op lacks" for name in more]
    return " and ".join(faults) or ("has the op's parameters in another order" if given != wanted else "")


def _equal(case: Case, program: Program, op: str, kernel: Callable[..., Any]) -> bool:
    try:
        assert_same_bytes(trial(case, program, replace={op: kernel}).call(), trial(case, program).call())
    except (LawBroken, RuntimeError, ValueError, TypeError):
        return False
    return True


def _gradient(cases: list[Case], program: Program, op: str, kernel: Callable[..., Any]) -> str:
    """The kernel's gradients against ours, relative to their norm, over the cases that have gradients."""
    worst, where = 0.0, ""
    compared = 0
    for case in cases:
        if not case.gradients or case.device_sized or "subnormal" in case.name or "wide" in case.name:
            continue
        try:
            trials = (trial(case, program, replace={op: kernel}), trial(case, program))
            found = [gradients(t.call, t.args, case.gradients)[1] for t in trials]
        except (RuntimeError, ValueError, TypeError) as error:
            return f"wrong: {case.name} has no gradient ({str(error).splitlines()[0]})"
        for name, expected in found[1].items():
            scale = float(expected.double().norm())
            distance = float((found[0][name].double() - expected.double()).norm()) / scale if scale else 0.0
            compared += 1
            if not distance <= worst:
                worst, where = distance, f"{name} of {case.name}"
    if not compared:
        return "none to check"
    limit = 2.0**-6  # two roundings to BF16 apart
    verdict = "right" if worst <= limit else "wrong"
    return f"{verdict}: largest relative distance from ours {worst:.2g}{f' ({where})' if where else ''}"


def _benchmark(cases: list[Case], program: Program, op: str, kernel: Callable[..., Any]) -> list[str]:
    """Times at published shapes, or where the device has no such case at the largest one, which is a toy's and said to be."""
    chosen = [case for case in cases if case.device_sized] or [max(cases, key=lambda case: _elements(case, program))]
    lines: list[str] = []
    for case in chosen[:4]:
        times = []
        shapes = ", ".join(f"{name} {'x'.join(map(str, t.shape))}" for name, t in _operands(case, program) if t.dim() > 1)
        for replace in ({op: kernel}, {}):
            t = trial(case, program, replace=replace)
            try:
                times.append(_time(t.call, program.device))
            except (RuntimeError, ValueError, TypeError) as error:
                return [*lines, f"{case.name}: it failed: {error}"]
        toy = "" if case.device_sized else "; a toy shape: these times mean nothing"
        lines.append(f"{case.name} ({shapes}): {times[0]:.1f} us, ours {times[1]:.1f} us, ratio {times[0] / times[1]:.2f}{toy}")
    return lines


def _elements(case: Case, program: Program) -> int:
    return sum(t.numel() for name, t in _operands(case, program) if not name.startswith("table"))


def _operands(case: Case, program: Program) -> list[tuple[str, Tensor]]:
    args = case.make(0, program.device, program.torch_dtype)
    return [(name, value) for name, value in args.items() if isinstance(value, Tensor)]


def _time(call: Callable[[], Any], device: str) -> float:
    """Median microseconds of a call."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=50, rep=200, return_mode="median")) * 1e3
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert tensors(call())
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)[len(times) // 2]


def default_targets() -> list[Target]:
    """The shapes of the sizes that most people run; `zoo verify` qualifies any other when it meets it."""
    found: dict[Target, None] = {}
    for arch, (_, architecture) in architectures().items():
        found |= dict.fromkeys(targets_of_sizes(arch, architecture.qualified_sizes))
    return list(found)
