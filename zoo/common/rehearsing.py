"""Shares of a rehearsal in processes of their own, so that compilers run side by side.

`python -m zoo.common.rehearsing` is such a process: a JSON object on stdin says which model and which pushes, an "x" on stdout says that a
push is done. It makes the model's first layers with weights of zeros, since a compiler asks for shapes alone, and what it compiles stays in
the compilers' folders on disk, where the process that waits for it finds it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

import zoo
from zoo.common import verdicts
from zoo.common.compilations import keep
from zoo.common.program import Program, resolve
from zoo.common.pushes import Push, run
from zoo.common.registry import model_class
from zoo.common.serving import ForServing

LOGGER = logging.getLogger("zoo.rehearsal")
PROCESSES = 16
BESIDE = 3 << 30  # bytes of GPU memory that a process takes beside its weights: its context, a push's rows
SECONDS = 300.0  # after which what is left is compiled by the process that waits

Counts = tuple[Sequence[int], Sequence[int]]  # rows of each sequence of a push, and the tokens before them


def program_of(name: str, device: str, dtype: str, serving: type[ForServing]) -> Program:
    return resolve(name, torch.device(device), getattr(torch, dtype), serving.family.contributors)


def can_be_made_anew(model: ForServing) -> bool:
    """Whether another process builds the same model from its config.json and its program's name."""
    serving = type(model)
    fields = json.loads(json.dumps(model.config.to_hf()))
    program = model.program
    try:
        named = program_of(program.name, program.device, program.dtype, serving)
        return model_class(fields, "serving") is serving and serving.family.config.from_hf(fields) is not None and named == program
    except ValueError:  # a family or a program that this process alone knows
        return False


def processes_for(model: ForServing, pushes: int) -> int:
    """How many processes share `pushes`: by cores, and by half of the GPU's free memory. 0 on a CPU, and where no other process can."""
    if model.device.type != "cuda" or not can_be_made_anew(model):
        return 0
    free, _ = torch.cuda.mem_get_info(model.device)
    each = BESIDE + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(min(PROCESSES, os.cpu_count() or 1, pushes, free // 2 // each))


def side_by_side(model: ForServing, shares: Sequence[Sequence[Counts]], page_size: int | None) -> Iterator[int]:
    """Starts a process for each share of pushes, and yields the pushes that have been done since it last did, until all have ended.

    A process that fails is told in a warning: who waits compiles the rest itself, and meets the fault where it can be seen.
    """
    reads, writes = os.pipe()
    started: list[tuple[subprocess.Popen[str], IO[str]]] = []
    try:
        try:
            for share in shares:
                started.append(_start(_task(model, share, page_size), writes))
        finally:
            os.close(writes)
        end = time.monotonic() + SECONDS
        while True:
            if not select.select([reads], [], [], max(0.0, end - time.monotonic()))[0]:
                LOGGER.warning("compiling side by side took over %.0f s, what is left is compiled here", SECONDS)
                return
            done = os.read(reads, 4096)
            if not done:
                return
            yield len(done)
    finally:
        os.close(reads)
        for process, errors in started:
            process.kill()  # one that has ended stays ended
            _tell(process.wait(), errors)
            errors.close()


def _task(model: ForServing, share: Sequence[Counts], page_size: int | None) -> dict[str, Any]:
    store = verdicts.in_use()
    return {
        "config": model.config.to_hf(),
        "program": [model.program.name, str(model.device), model.program.dtype],
        "page_size": page_size,
        "store": None if store is None else str(store.absolute()),
        "pushes": share,
    }


def _start(task: dict[str, Any], answers: int) -> tuple[subprocess.Popen[str], IO[str]]:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by who reads it
    process = subprocess.Popen(
        [sys.executable, "-m", "zoo.common.rehearsing"],
        stdin=subprocess.PIPE,
        stdout=answers,
        stderr=errors,
        text=True,
        cwd=Path(zoo.__file__).parents[1],
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(task))
        process.stdin.close()
    except BrokenPipeError:  # it died at once: its end says why
        pass
    return process, errors


def _tell(code: int, errors: IO[str]) -> None:
    if code:
        errors.seek(0)
        said = errors.read().strip().splitlines() or ["it said nothing"]
        LOGGER.warning("a process that compiled ended with status %d: %s", code, said[-1])


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # compilers print too
    task = json.load(sys.stdin)
    torch.set_num_threads(1)
    keep()
    if task["store"] is not None:
        verdicts.use(Path(task["store"]))
    serving = model_class(task["config"], "serving")
    assert issubclass(serving, ForServing)
    name, device, dtype = task["program"]
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.device(device))
    model = serving._on_meta(serving.family.config.from_hf(task["config"]), program_of(name, device, dtype, serving))
    model._allocate(torch.device(device))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for counts, contexts in task["pushes"]:
            run(model, Push(tuple(counts), tuple(contexts)), task["page_size"])
            os.write(answers, b"x")


if __name__ == "__main__":
    main()
