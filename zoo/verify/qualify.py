"""Admission of providers on this GPU and toolchain, and an outside kernel put through laws, gradient and benchmark."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common import qualification
from zoo.common.fingerprint import toolchain
from zoo.common.layers import Experts, Linear
from zoo.common.ops import CONTRACTS, Provider
from zoo.common.ops.cases import Case, Draw, cases_of, check, trial
from zoo.common.program import Program, resolve
from zoo.common.qualification import Verdict
from zoo.testing import LawBroken, as_integers, assert_same_bytes, gradients, tensors
from zoo.verify.calls import head_shapes
from zoo.verify.subject import config_of, sizes

ROWS = (1, 2, 7, 16, 17, 64, 65, 128, 300, 1024, 4096, 8192)
KINDS = ("normal", "wide", "cancel", "subnormal")
DRAWN = 1000  # rows really drawn; not a divisor of any tile
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """One op at one shape."""

    op: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))}"


def targets_of(model: nn.Module) -> list[Target]:
    """Every (op, shape) of a model whose provider is chosen by shape, its vocabulary head included; the meta device is enough."""
    found = set()
    for part in model.modules():
        if isinstance(part, Linear):
            found.add(Target("linear", (*part.weight.shape, part.k_parts)))
        elif isinstance(part, Experts):
            count, hidden, inner = part.down.shape
            found.add(Target("experts", (count, hidden, inner)))
    inner_model = model.get_submodule("model")
    vocabulary, hidden = inner_model.head_weight_VD.shape  # type: ignore[union-attr,misc]
    found |= {Target("linear", shape) for shape in head_shapes(int(vocabulary), int(hidden))}
    return sorted(found, key=lambda t: (t.op, t.shape))


def targets_of_sizes(arch: str, names: Iterable[str]) -> list[Target]:
    """The same for published sizes, without any weights."""
    from zoo.common.registry import model_class

    program = resolve("aligned", "cuda", torch.bfloat16)
    found: dict[Target, None] = {}
    for name in names:
        config = config_of(arch, name, None)
        made = model_class({"model_type": config.model_type}, "serving")
        with torch.device("meta"):
            found |= dict.fromkeys(targets_of(made(config, program)))  # type: ignore[call-arg]
    return list(found)


def _linear(draw: Draw, shape: Shape, rows: int, kind: str) -> list[tuple[Any, ...]]:
    n, k, parts = shape
    # a subnormal x meets a weight large enough for sums that are subnormal too
    scale = 2.0**10 if kind == "subnormal" else k**-0.5
    weight = _repeated(draw.floats(min(n, DRAWN), k, kind="wide" if kind == "wide" else "normal", scale=scale), n)
    x = _repeated(draw.floats(min(rows, DRAWN), k, kind=kind), rows)
    return [(x[:count], weight, dtype, parts) for count in _counts(rows) for dtype in (x.dtype, torch.float32)]


def _experts(draw: Draw, shape: Shape, rows: int, kind: str) -> list[tuple[Any, ...]]:
    count, hidden, inner = shape
    gate_up = _repeated(draw.floats(min(count, 4), 2 * inner, hidden, scale=hidden**-0.5), count)
    down = _repeated(draw.floats(min(count, 4), hidden, inner, scale=2.0**10 if kind == "subnormal" else inner**-0.5), count)
    x, chosen = _repeated(draw.floats(min(rows, DRAWN), hidden, kind=kind), rows), draw.choices(rows, min(8, count), count)
    return [(x[:r], chosen[:r], gate_up, down) for r in _counts(rows)]


def _counts(rows: int) -> tuple[int, ...]:
    return (*[r for r in ROWS if r < rows], rows)


def _repeated(x: Tensor, count: int) -> Tensor:
    """Enough rows from the ones drawn: drawing takes longer than everything else."""
    return x if x.shape[0] == count else x[torch.arange(count, device=x.device) % x.shape[0]]


_TRIALS: dict[str, Callable[[Draw, Shape, int, str], list[tuple[Any, ...]]]] = {"linear": _linear, "experts": _experts}


def admit(target: Target, candidate: Provider, defining: Provider, device: str, rows: int = ROWS[-1]) -> Verdict:
    """Compares a candidate's bytes with the defining provider's over row counts and kinds of data, forward twice each."""
    draw = Draw(0, device, torch.bfloat16)
    checks, reason = 0, ""
    with torch.no_grad():
        for kind in KINDS:
            for arguments in _TRIALS[target.op](draw, target.shape, rows, kind):
                try:
                    found = [candidate.function("forward")(*arguments) for _ in range(2)]
                except (RuntimeError, ImportError, AssertionError) as error:
                    reason = f"it failed: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
                    break
                expected = defining.function("forward")(*arguments)
                checks += 1
                bad = [int((as_integers(y) != as_integers(expected)).sum()) for y in found]
                if any(bad):
                    differ = f"{max(bad)} of {expected.numel()} elements differ from {defining.name}"
                    reason = f"{differ} ({kind}, {arguments[0].shape[0]} rows)"
                    break
            if reason:
                break
    return Verdict(target.op, candidate.name, target.shape, CONTRACTS[target.op].version, checks, reason)


def qualify(
    targets: Iterable[Target],
    say: Callable[[str], None] = lambda text: None,
    *,
    program: Program | None = None,
    again: bool = False,
    rows: int = ROWS[-1],
) -> list[Verdict]:
    """Admits or refuses every candidate at every target that has no verdict yet (`again`: at all), and stores the verdicts."""
    program = program or resolve("aligned", "cuda", torch.bfloat16)
    verdicts = []
    for target in targets:
        wanted = program.byte_class(target.op)
        members = [p for p in CONTRACTS[target.op].providers if p.byte_class == wanted and p.device == program.device]
        defining = [p for p in members if p.defining and p.serves(*target.shape)]
        for candidate in members:
            if candidate.defining or not defining or not candidate.installed() or not candidate.serves(*target.shape):
                continue
            if not again and qualification.tried(target.op, candidate.name, target.shape):
                continue
            say(f"{target} by {candidate.name}")
            verdicts.append(admit(target, candidate, defining[0], program.device, rows))
    if verdicts:
        about = {"toolchain": toolchain(torch.device(program.device))}
        qualification.write(qualification.path_for_this_machine(), verdicts, about)
    return verdicts


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
    """What an outside kernel did: laws kept and broken by case, its gradient, and its time beside ours."""

    op: str
    kernel: str
    kept: int
    broken: list[str]
    gradient: str
    equal: str
    benchmark: list[str]

    @property
    def ok(self) -> bool:
        return not self.broken and not self.gradient.startswith("wrong")


def outside(path: str) -> Callable[..., Any]:
    """`module:function`. ValueError if it can't be imported."""
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"--kernel {path!r} must be module:function")
    try:
        function = vars(importlib.import_module(module)).get(name)
    except ImportError as error:
        raise ValueError(f"--kernel {path!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"--kernel {path!r}: {module} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def put_through(op: str, path: str, program: Program, say: Callable[[str], None] = lambda text: None) -> KernelReport:
    """An outside kernel with the op's public signature through every law of every case, its gradient and a benchmark."""
    if op not in CONTRACTS:
        raise ValueError(f"there is no op {op!r}; there are {', '.join(sorted(CONTRACTS))}")
    kernel = outside(path)
    ours = vars(importlib.import_module("zoo.common.ops"))[op]
    if list(inspect.signature(kernel).parameters) != list(inspect.signature(ours).parameters):
        raise ValueError(f"{path} takes {inspect.signature(kernel)}, ops.{op} takes {inspect.signature(ours)}")
    kept, broken, equal, total = 0, [], 0, 0
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
        total += 1
        equal += _equal(case, program, op, kernel)
    text = f"bytes equal to ours in {equal} of {total} cases"
    gradient = _gradient(cases, program, op, kernel)
    return KernelReport(op, path, kept, broken, gradient, text, _benchmark(cases, program, op, kernel))


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
    chosen = [case for case in cases if case.device_sized] or cases[-1:]
    lines: list[str] = []
    for case in chosen[:4]:
        times = []
        for replace in ({op: kernel}, {}):
            t = trial(case, program, replace=replace)
            try:
                times.append(_time(t.call, program.device))
            except (RuntimeError, ValueError, TypeError) as error:
                return [*lines, f"{case.name}: it failed: {error}"]
        lines.append(f"{case.name}: {times[0]:.1f} us, ours {times[1]:.1f} us, ratio {times[0] / times[1]:.2f}")
    return lines


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
    for arch, names in (("qwen3", ("tiny", "4b", "8b", "32b")), ("qwen3_moe", ("tiny", "30b-a3b"))):
        found |= dict.fromkeys(targets_of_sizes(arch, [name for name in names if name in sizes(arch)]))
    return list(found)

