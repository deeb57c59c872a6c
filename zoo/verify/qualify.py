"""Admission of providers on this GPU and toolchain."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zoo.common import qualification
from zoo.common import verdicts as store
from zoo.common.fingerprint import products_of
from zoo.common.ops import CONTRACTS
from zoo.common.ops.comparison import ROWS, Shape, comparison_of
from zoo.common.program import Program, resolve
from zoo.common.registry import architectures, find
from zoo.common.toolchain import toolchain
from zoo.common.verdicts import Verdict
from zoo.verify.admission import Outcome, Task, compare, defining_of, side_by_side
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
    program = program or resolve("aligned", "cuda", torch.bfloat16)
    begin = time.monotonic()
    wanted: dict[tuple[Target, str], dict[str, Outcome | None]] = {}
    for target in dict.fromkeys(targets):
        if defining_of(target.op, target.shape, program) is None:
            continue
        for candidate in _candidates(target, program, modules):
            if again or not qualification.tried(target.op, candidate, target.shape):
                wanted[target, candidate] = dict.fromkeys(comparison_of(target.op).parts)
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
            store.write(store.path_for_this_machine(), verdicts, about)
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
    checks = sum(o.checks for o in outcomes)
    seconds = max(o.end for o in outcomes) - min(o.begin for o in outcomes)
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


def default_targets() -> list[Target]:
    """The shapes of the sizes that most people run; `zoo verify` qualifies any other when it meets it."""
    found: dict[Target, None] = {}
    for arch, (_, architecture) in architectures().items():
        found |= dict.fromkeys(targets_of_sizes(arch, architecture.qualified_sizes))
    return list(found)
