"""An outside kernel put through an op's laws, numbers, gradient and a benchmark: `zoo qualify --op OP --kernel module:function`."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.common import verdicts
from zoo.common.ops import CONTRACTS
from zoo.common.ops.cases import Case, Trial, cases_of, check, trial
from zoo.common.program import Program, resolve
from zoo.testing import assert_same_bytes, gradients, tensors
from zoo.verify.accuracy import BOUND, described, misses, reaches, tried

DTYPES_OF_PROGRAMS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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


class NotImportable(Exception):
    """The kernel's own module raised while it was imported."""


def outside(path: str) -> Callable[..., Any]:
    """`module:function`; modules are looked for in the working directory last. ValueError if it can't be found, NotImportable."""
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"--kernel {path!r} must be module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = vars(importlib.import_module(module)).get(name)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}.")
        hint = "; modules are looked for among what is installed and in the working directory" if absent else ""
        raise ValueError(f"--kernel {path!r}: {error}{hint}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise NotImportable(f"importing it failed: {described(error)}") from error
    if not callable(function):
        raise ValueError(f"--kernel {path!r}: {module} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def failed(op: str, path: str, why: str) -> KernelReport:
    """The report of a kernel that did not come to its numbers."""
    return KernelReport(op, path, 0, [why], [], "no numbers", "wrong: none", "no bytes to compare", [])


def put_through(op: str, path: str, program: Program, say: Callable[[str], None] = lambda text: None) -> KernelReport:
    """An outside kernel with the op's public signature through every law of every case, its numbers, gradient and a benchmark.

    Whatever the kernel raises, SystemExit too, is broken or wrong in the report. ValueError for one that can't be tried at all.
    """
    if op not in CONTRACTS:
        raise ValueError(f"there is no op {op!r}; there are {', '.join(sorted(CONTRACTS))}")
    try:
        kernel = outside(path)
    except NotImportable as error:
        return failed(op, path, str(error))
    _check_signature(op, path, kernel)
    kept = 0
    equal = 0
    near = 0
    broken: list[str] = []
    missed: list[str] = []
    cases = cases_of(op, program)
    for case in cases:
        for law in case.laws:
            say(f"{law} law, {case.name}")
            _, fault = tried(check, case, law, program, replace={op: kernel})
            kept += not fault
            broken += [f"{law} law, {case.name}: {fault}"] if fault else []
    cases = [case for case in cases if reaches(case, program, op)]
    for case in cases:
        say(f"numbers, {case.name}")
        far = misses(case, program, op, kernel)
        near = near + (not far)
        missed = missed + far
        equal += _equal(case, program, op, kernel)
    published = sum(case.device_sized for case in cases)
    beside = f"; {published} of them are published shapes, which are held against our kernel instead" if published else ""
    numbers = f"numbers within {BOUND} in {near} of {len(cases)} cases{beside}"
    text = f"bytes equal to ours in {equal} of {len(cases)} cases"
    say("gradients")
    gradient = _gradient(cases, program, op, kernel)
    say("benchmark")
    times, faults = _benchmark(cases, program, op, kernel)
    return KernelReport(op, path, kept, broken + faults, missed, numbers, gradient, text, times)


def put_through_apart(op: str, path: str, program: Program, say: Callable[[str], None] = lambda text: None) -> KernelReport:
    """`put_through` in a process of its own: a kernel that ends its process, by a signal or in silence, gets a report too."""
    where = verdicts.in_use()
    asked = [op, path, program.name, program.device, program.dtype, None if where is None else str(where.absolute())]
    start = "import sys; sys.path[:] = sys.argv[2:]; from zoo.verify.outside import main; main(sys.argv[1])"
    last = "the import"
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", start, json.dumps(asked), *sys.path], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line)
                if "say" in answer:
                    last = answer["say"]
                    say(last)
                if "refused" in answer:
                    raise ValueError(answer["refused"])
                if "report" in answer:
                    return KernelReport(**answer["report"])
        finally:
            process.kill()
            process.stdout.close()
            status = process.wait()
        errors.seek(0)
        said = "".join(f": {line}" for line in errors.read().strip().splitlines()[-1:])
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status} and no verdict"
    return failed(op, path, f"{last}: its process {ended}{said}")


def main(asked: str) -> None:
    """The process of `put_through_apart`: JSON lines on stdout, whatever the kernel prints goes to stderr."""
    op, path, name, device, dtype, store = json.loads(asked)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**line: Any) -> None:
        print(json.dumps(line), file=answers, flush=True)

    program = resolve(name, device, DTYPES_OF_PROGRAMS[dtype])
    if store is not None:
        verdicts.use(Path(store))
    try:
        report = put_through(op, path, program, lambda text: answer(say=text))
    except ValueError as error:
        answer(refused=str(error))
    except Exception as error:  # the kernel left the device in a state in which ours fails too
        answer(report=asdict(failed(op, path, described(error))))
    else:
        answer(report=asdict(report))


def _check_signature(op: str, path: str, kernel: Callable[..., Any]) -> None:
    ours = inspect.signature(vars(importlib.import_module("zoo.common.ops"))[op])
    try:
        theirs = inspect.signature(kernel)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} shows no parameters ({error}), ops.{op} takes {ours}") from error
    if fault := _unlike(list(theirs.parameters), list(ours.parameters)):
        raise ValueError(f"{path} {fault}: it takes {theirs}, ops.{op} takes {ours}")


def _unlike(given: list[str], wanted: list[str]) -> str:
    """How the names of a kernel's parameters differ from the op's; annotations and defaults are not asked for."""
    more, less = ([name for name in one if name not in other] for one, other in ((given, wanted), (wanted, given)))
    faults = [f"lacks the parameter {name}" for name in less] + [f"has a parameter {name} that the op lacks" for name in more]
    return " and ".join(faults) or ("has the op's parameters in another order" if given != wanted else "")


def _equal(case: Case, program: Program, op: str, kernel: Callable[..., Any]) -> bool:
    _, fault = tried(_assert_equal, trial(case, program, replace={op: kernel}), trial(case, program).call())
    return not fault


def _assert_equal(t: Trial, ours: Any) -> None:
    assert_same_bytes(t.call(), ours)


def _gradient(cases: list[Case], program: Program, op: str, kernel: Callable[..., Any]) -> str:
    """The kernel's gradients against ours, relative to their norm, over the cases that have gradients."""
    worst = 0.0
    where = ""
    compared = 0
    for case in cases:
        if not case.gradients or case.device_sized or "subnormal" in case.name or "wide" in case.name:
            continue
        theirs, fault = tried(_gradients, trial(case, program, replace={op: kernel}))
        if theirs is None:
            return f"wrong: {case.name} has no gradient ({fault})"
        for name, expected in _gradients(trial(case, program)).items():
            scale = float(expected.double().norm())
            distance = float((theirs[name].double() - expected.double()).norm()) / scale if scale else 0.0
            compared += 1
            if not distance <= worst:
                worst = distance
                where = f"{name} of {case.name}"
    if not compared:
        return "none to check"
    limit = 2.0**-6  # two roundings to BF16 apart
    verdict = "right" if worst <= limit else "wrong"
    return f"{verdict}: largest relative distance from ours {worst:.2g}{f' ({where})' if where else ''}"


def _gradients(t: Trial) -> dict[str, Tensor]:
    return gradients(t.call, t.args, t.case.gradients)[1]


def _benchmark(cases: list[Case], program: Program, op: str, kernel: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Times at published shapes, or where the device has no such case at the largest one, which is a toy's and said to be; and
    the case at which the kernel failed."""
    chosen = [case for case in cases if case.device_sized] or [max(cases, key=lambda case: _elements(case, program))]
    lines: list[str] = []
    for case in chosen[:4]:
        shapes = ", ".join(f"{name} {'x'.join(map(str, t.shape))}" for name, t in _operands(case, program) if t.dim() > 1)
        theirs, fault = tried(_time, trial(case, program, replace={op: kernel}).call, program.device)
        if theirs is None:
            return lines, [f"benchmark, {case.name}: {fault}"]
        ours = _time(trial(case, program).call, program.device)
        toy = "" if case.device_sized else "; a toy shape: these times mean nothing"
        lines.append(f"{case.name} ({shapes}): {theirs:.1f} us, ours {ours:.1f} us, ratio {theirs / ours:.2f}{toy}")
    return lines, []


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
