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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import zoo
from zoo.common.ops import CONTRACTS, Provider
from zoo.common.ops.comparison import Shape, comparison_of
from zoo.common.program import Program, resolve
from zoo.testing import as_integers


@dataclass(frozen=True)
class Task:
    """A candidate's part of one shape, see `Comparison`."""

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


def compare(task: Task, program: Program) -> Outcome:
    """The candidate twice against the defining provider once, over row counts and kinds of data."""
    candidate = provider_of(task.op, task.candidate)
    defining = defining_of(task.op, task.shape, program)
    assert defining is not None
    checks = 0
    begin = time.monotonic()
    try:
        with torch.no_grad():
            for kind, calls in comparison_of(task.op).calls(task.shape, task.part, task.rows, program):
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
