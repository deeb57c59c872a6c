"""A candidate's bytes against the defining provider's at one shape, in worker processes: compilers side by side, faults apart.

`python -m zoo.verify.admission` is a worker: a JSON line with a task on stdin, a JSON line with its outcome on stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import zoo
from zoo.common.hashing import key64, normal_
from zoo.common.ops import CONTRACTS, Provider
from zoo.common.ops.cases import Draw
from zoo.common.program import Program, resolve
from zoo.testing import as_integers

ROWS = (1, 2, 7, 16, 17, 64, 65, 128, 300, 4096)
KINDS = ("normal", "cancel", "wide", "subnormal")  # the first two take one weight
DRAWN = 1000  # rows really drawn; not a divisor of any tile
# what of an op is compared apart: each part compiles kernels of its own
PARTS = {"linear": ("", "float32"), "experts": ("",)}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A candidate's part of one shape; `part` is the output's dtype where it is not the program's."""

    op: str
    shape: Shape
    candidate: str
    part: str
    rows: int


@dataclass(frozen=True)
class Outcome:
    """Comparisons made, why the candidate is refused (empty: its bytes are equal), and why nothing was decided.

    begin, end: seconds on the monotonic clock.
    """

    checks: int = 0
    reason: str = ""
    undecided: str = ""
    begin: float = 0.0
    end: float = 0.0


def provider_of(op: str, name: str) -> Provider:
    return next(p for p in CONTRACTS[op].providers if p.name == name)


def defining_of(op: str, shape: Shape, program: Program) -> Provider | None:
    """The provider that defines the program's byte class and serves the shape."""
    wanted = (program.byte_class(op), program.device, True)
    members = [p for p in CONTRACTS[op].providers if (p.byte_class, p.device, p.defining) == wanted]
    return next((p for p in members if p.serves(*shape)), None)


def numbers(shape: Shape, kind: str, name: str, program: Program, scale: float = 1.0) -> Tensor:
    """Random numbers of a kind (see `Draw.floats`), made on the device: drawing them on the CPU takes longer than comparing."""
    x, spread = (torch.empty(shape, dtype=torch.float32, device=program.device) for _ in range(2))
    normal_(x, key64("qualification", name), scale)
    if kind == "wide":
        x *= torch.exp2(normal_(spread, key64("spread", name), 12.0).round().clamp(-24, 24))
    elif kind == "cancel":
        even = x[..., : x.shape[-1] // 2 * 2 : 2]
        near = normal_(spread, key64("spread", name), 0.5).abs().clamp(max=1)[..., : even.shape[-1]]
        x[..., 1::2] = -even * (1 + 2.0**-7 * near)
    elif kind == "subnormal":
        x *= 2.0**-129
    return x.to(program.torch_dtype)


def _linear(shape: Shape, part: str, rows: int, program: Program) -> Iterator[tuple[str, list[Any]]]:
    n, k, parts = shape
    dtype = torch.float32 if part == "float32" else program.torch_dtype
    made = ("", 0.0)
    weight = torch.empty(0)
    for kind in KINDS:
        # a subnormal x meets a weight large enough for sums that are subnormal too
        wanted = ("wide" if kind == "wide" else "normal", 2.0**10 if kind == "subnormal" else k**-0.5)
        if wanted != made:
            made = wanted
            weight = _repeated(numbers((min(n, DRAWN), k), wanted[0], "weight", program, wanted[1]), n)
        x = _repeated(numbers((min(rows, DRAWN), k), kind, "x", program), rows)
        yield kind, [(x[:count], weight, dtype, parts) for count in _counts(rows)]


def _experts(shape: Shape, part: str, rows: int, program: Program) -> Iterator[tuple[str, list[Any]]]:
    count, hidden, intermediate = shape
    chosen = Draw(0, program.device, program.torch_dtype).choices(rows, min(8, count), count)
    gate_up = _repeated(numbers((min(count, 4), 2 * intermediate, hidden), "normal", "gate_up", program, hidden**-0.5), count)
    for kind in KINDS:
        scale = 2.0**10 if kind == "subnormal" else intermediate**-0.5
        if kind != "cancel":
            down = _repeated(numbers((min(count, 4), hidden, intermediate), "normal", "down", program, scale), count)
        x = _repeated(numbers((min(rows, DRAWN), hidden), kind, "x", program), rows)
        yield kind, [(x[:r], chosen[:r], gate_up, down) for r in _counts(rows)]


_TRIALS: dict[str, Callable[[Shape, str, int, Program], Iterator[tuple[str, list[Any]]]]] = {"linear": _linear, "experts": _experts}


def _counts(rows: int) -> tuple[int, ...]:
    return (*[r for r in ROWS if r < rows], rows)


def _repeated(x: Tensor, count: int) -> Tensor:
    return x if x.shape[0] == count else x[torch.arange(count, device=x.device) % x.shape[0]]


def compare(task: Task, program: Program) -> Outcome:
    """The candidate twice against the defining provider once, over row counts and kinds of data."""
    candidate = provider_of(task.op, task.candidate)
    defining = defining_of(task.op, task.shape, program)
    assert defining is not None
    checks = 0
    begin = time.monotonic()
    try:
        with torch.no_grad():
            for kind, calls in _TRIALS[task.op](task.shape, task.part, task.rows, program):
                for arguments in calls:
                    expected = defining.functions.forward(*arguments)
                    for _ in range(2):
                        if reason := _differs(candidate, arguments, expected, defining.name, kind):
                            return Outcome(checks, reason, "", begin, time.monotonic())
                    checks += 1
    except torch.OutOfMemoryError as error:  # says nothing about the kernel
        return Outcome(checks, "", f"out of memory: {str(error).splitlines()[0]}", begin, time.monotonic())
    return Outcome(checks, "", "", begin, time.monotonic())


def _differs(candidate: Provider, arguments: Any, expected: Tensor, name: str, kind: str) -> str:
    try:
        found = as_integers(candidate.functions.forward(*arguments))
        if torch.equal(found, as_integers(expected)):
            return ""
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ImportError, AssertionError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return f"it failed: {said[0]}"
    bad = int((found != as_integers(expected)).sum())
    return f"{bad} of {expected.numel()} elements differ from {name} ({kind}, {arguments[0].shape[0]} rows)"


class Worker:
    """A process that answers tasks one after another."""

    def __init__(self, program: Program, modules: Sequence[str]) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `stop`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zoo.verify.admission", json.dumps([program.name, program.device, program.dtype, *modules])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=Path(zoo.__file__).parents[1],
        )

    def ask(self, task: Task) -> Outcome:
        """The worker's outcome; a refusal where its process died of the task."""
        begin = time.monotonic()
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asdict(task)) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except (BrokenPipeError, ValueError):
            answer = ""
        if answer:
            fields = json.loads(answer)
            return Outcome(**{**fields, "begin": begin, "end": time.monotonic()})
        code = self.process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["it said nothing"]
        if code >= 0 or code == -signal.SIGKILL:  # an error of ours, or killed from outside: no crash inside a kernel
            return Outcome(0, "", f"the worker ended: {said[-1]}", begin, time.monotonic())
        return Outcome(0, f"it failed: its process was ended by signal {-code}", "", begin, time.monotonic())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what was still to be written to a dead worker
                    stream.close()


def side_by_side(
    tasks: Sequence[Task], program: Program, jobs: int, modules: Sequence[str] = (), seconds: float | None = None
) -> Iterator[tuple[Task, Outcome]]:
    """Outcomes as they come, from at most `jobs` workers; what is not finished after `seconds` is undecided.

    modules: imported by each worker first, for providers that register themselves.
    """
    waiting = deque(tasks)
    outcomes = queue.Queue[tuple[Task, Outcome]]()
    workers = list[Worker]()
    stopped = threading.Event()
    left = dict.fromkeys(tasks)

    def serve() -> None:
        worker: Worker | None = None
        while not stopped.is_set():
            try:
                task = waiting.popleft()
            except IndexError:
                return
            if worker is None:
                worker = Worker(program, modules)
                workers.append(worker)
                if stopped.is_set():
                    return
            outcome = worker.ask(task)
            if outcome.reason or outcome.undecided:  # a failed kernel may have poisoned its process for the others
                worker.stop()
                workers.remove(worker)
                worker = None
            outcomes.put((task, outcome))

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(jobs, len(tasks)))]
    end = None if seconds is None else time.monotonic() + seconds
    try:
        for thread in threads:
            thread.start()
        while left:
            task, outcome = outcomes.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            del left[task]
            yield task, outcome
    except queue.Empty:
        for task in left:
            yield task, Outcome(undecided=f"not finished after {seconds:.0f} s")
    finally:
        stopped.set()
        waiting.clear()
        for worker in list(workers):
            worker.process.kill()
        for thread in threads:
            thread.join()
        for worker in list(workers):
            worker.stop()


def main() -> None:
    name, device, dtype, *modules = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print too
    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)
    program = resolve(name, device, {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype])
    for line in sys.stdin:
        fields = json.loads(line)
        outcome = compare(Task(**{**fields, "shape": tuple(fields["shape"])}), program)
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


if __name__ == "__main__":
    main()
