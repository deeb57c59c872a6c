"""The operation map: every op call of a real run, in order, with its contract's own words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from zoo.common.ops import CONTRACTS
from zoo.common.program import DECISIONS
from zoo.common.rows import Rows
from zoo.common.terminal import Terminal
from zoo.verify import ways
from zoo.verify.calls import Call
from zoo.verify.subject import Subject
from zoo.verify.trace import Tracer

PHASES = ("training", "prefill", "decode")


@dataclass
class Place:
    """One op call of the model, its layer number as `*`. launched: provider and rows of the call in each phase."""

    layer: str
    op: str
    call: str
    byte_class: str
    inputs: str
    outputs: str
    launched: dict[str, str] = field(default_factory=dict)


class _Recorder(Tracer):
    """Keeps each call of the last batch instead of checksums."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.calls: list[tuple[str, Call]] = []

    @contextmanager
    def rows(self, sequences: list[int], rows: Rows) -> Iterator[None]:
        self.calls.clear()
        with super().rows(sequences, rows):
            yield

    def _observe(self, contract: Any, seen: dict[str, Any], result: Any) -> None:
        if self._batch is not None:
            self.calls.append((self._path[-1] if self._path else "head", Call.of(contract, seen, result)))


def operation_map(subject: Subject) -> list[Place]:
    """Runs training, prefill and one decode step of a short sequence. Every layer of one kind is one entry."""
    subject.draw((40, 5))
    places: dict[tuple[str, str], Place] = {}
    for phase in PHASES:
        model = subject.trainer if phase == "training" else subject.server
        recorder = _Recorder(model)
        with recorder:
            if phase == "training":
                ways.exhaust(ways.train(subject, recorder, [0, 1]))
            elif phase == "prefill":
                ways.exhaust(ways.prefill(subject, recorder, [0, 1]))
            else:
                ways.exhaust(ways.decode(subject, recorder, [0, 1], tail=1))
        seen: set[tuple[str, str]] = set()
        for layer, call in recorder.calls:
            name = re.sub(r"\.\d+(?=\.|$)", ".*", layer)
            key = (name, call.name)
            if key in seen:
                continue
            seen.add(key)
            place = places.setdefault(key, _place(name, call))
            place.launched[phase] = f"{call.provider.name}, {_rows(call)}"
    return list(places.values())


def _place(layer: str, call: Call) -> Place:
    inputs = [f"{n} {_kind(v)}" for n, v in call.arguments.items() if isinstance(v, Tensor)]
    outputs = [_kind(t) for _, t in call.outputs()]
    byte_class = call.program.byte_class(call.contract.name, call.shape)
    return Place(layer, call.contract.name, call.name, byte_class, ", ".join(inputs), ", ".join(outputs))


def _kind(x: Tensor) -> str:
    name = str(x.dtype).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float64": "fp64"}.get(name, name)
    return f"{short}{list(x.shape)}"


def _rows(call: Call) -> str:
    count = next(t for _, t in call.outputs()).shape[0]
    rows = "1 row" if count == 1 else f"{count} rows"
    return rows if call.history is None else f"{rows}, {call.history.words()}"


def to_dict(subject: Subject, places: list[Place]) -> dict[str, Any]:
    used = sorted({p.op for p in places})
    return {
        "arch": subject.arch,
        "device": str(subject.device),
        "program": subject.trainer.program.name,
        "calls": [asdict(p) for p in places],
        "contracts": {name: words(name) for name in used},
        "decisions": [asdict(decision) for decision in DECISIONS],
    }


def words(op: str) -> dict[str, str]:
    """An op's promise in its own words."""
    c = CONTRACTS[op]
    return {
        "version": str(c.version),
        "shapes": c.shapes,
        "reads": ", ".join(f"{name}: {kind}" for name, kind in c.reads.items()),
        "rounds": c.rounds,
        "adds": c.adds,
        "laws": ", ".join(c.laws),
        "backward": c.backward,
        "launch": c.launch,
    }


def show(subject: Subject, places: list[Place], console: Terminal) -> None:
    title = f"{subject.arch}: op calls in order, program {subject.trainer.program.name!r} on {subject.device}"
    table = Table(title=title, show_lines=True)
    for column in ("layer", "op (byte class)", "results", *PHASES):
        table.add_column(column, overflow="fold")
    for p in places:
        table.add_row(p.layer, Text(f"{p.call}\n({p.byte_class})"), p.outputs, *[p.launched.get(phase, "-") for phase in PHASES])
    console.print(table)
    for op in dict.fromkeys(p.op for p in places):
        console.print(Text(op, "bold"), f"version {CONTRACTS[op].version}")
        for name, text in words(op).items():
            if name != "version":
                console.print(f"  {name:9}{text}", soft_wrap=True)
    decided = Table(title="decided by measurements before version 1 was frozen (--json has the evidence)", show_lines=True)
    for column in ("question", "answer"):
        decided.add_column(column, overflow="fold")
    for decision in DECISIONS:
        decided.add_row(decision.question, decision.answer)
    console.print(decided)
