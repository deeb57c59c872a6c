"""What `zoo verify` is asked for, checked by what is written alone, before anything is read or built."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from zoo.common.registry import find

PROGRAMS = ("aligned", "fp8", "mxfp4")
ENGINES = ("embedded", "sglang")
RUNGS = {
    1: "the same program twice",
    2: "other batch shapes and launches",
    3: "training against prefill, decode and graph",
    4: "live sampling, scored by the trainer in another process",
    5: "optimizer steps, then rungs 3 and 4 again",
}


@dataclass(frozen=True)
class Asked:
    """The command line of `zoo verify`. ValueError for an architecture, layout or engine that there is not."""

    arch: str
    checkpoint: str | None
    revision: str | None
    device: str | None
    size: str | None
    layers: int | None
    rungs: tuple[int, ...]
    lengths: tuple[int, ...] | None
    layout: str | None
    engine: str
    seed: int
    store: Path | None
    masters: bool = True
    program: str | None = None
    shared_weights: bool = False

    @property
    def trains_masters(self) -> bool:
        """Whether the trainer's parameters are FP32 masters: rung 5 takes optimizer steps."""
        return self.masters and 5 in self.rungs

    def command(self) -> str:
        """The command line that asks for the same, what is written beside it left out."""
        defaults = {field.name: field.default for field in fields(self)}
        words = ["zoo", "verify", self.arch]
        for name in ("checkpoint", "revision", "device", "size", "layers", "layout", "program", "store"):
            value = getattr(self, name)
            words += [] if value is None else [f"--{name}", str(value)]
        words += ["--rungs", ",".join(map(str, self.rungs))]
        words += ["--lengths", ",".join(map(str, self.lengths))] if self.lengths is not None else []
        words += ["--engine", self.engine, "--seed", str(self.seed)]
        words += [] if self.masters == defaults["masters"] else ["--no-masters"]
        words += ["--shared-weights"] if self.shared_weights else []
        return shlex.join(words)

    def __post_init__(self) -> None:
        family, _ = find(self.arch)
        check_random(self.checkpoint, self.size, self.layers, self.revision)
        check_program(self.program, self.checkpoint)
        if self.layout is not None:
            raise ValueError(f"--layout {self.layout!r} is not supported yet: one device only")
        if self.shared_weights and 5 in self.rungs:
            raise ValueError(
                "--shared-weights: rung 5 hands weights from the trainer to the server, so each needs its own: take --rungs 1-4"
            )
        if self.engine not in ENGINES:
            raise ValueError(f"--engine {self.engine!r} must be {' or '.join(ENGINES)}")
        if self.engine == "sglang" and not family.sglang:
            raise ValueError(f"--engine sglang: the plugin does not serve {self.arch} yet")


def check_random(checkpoint: str | None, size: str | None, layers: int | None, revision: str | None = None) -> None:
    """ValueError for a geometry of random weights beside a checkpoint, which has its own, and for a revision without one."""
    if checkpoint is None and revision is not None:
        raise ValueError(f"--revision {revision!r} needs --checkpoint, a hub id")
    if checkpoint is not None and size is not None:
        raise ValueError(f"--size is for random weights; a checkpoint has its own, {size!r} was asked for")
    if checkpoint is not None and layers is not None:
        raise ValueError("--layers is for random weights; a checkpoint has all its layers")


def check_program(program: str | None, checkpoint: str | None) -> None:
    """ValueError for a program that the ladder is not climbed with, or one beside a checkpoint, whose weights say what it is."""
    if program is not None and program not in PROGRAMS:
        raise ValueError(f"--program {program!r} must be {' or '.join(PROGRAMS)}")
    if program is not None and checkpoint is not None:
        raise ValueError(f"--program {program!r} is for random weights: a checkpoint is computed with as it is stored")


def rungs_of(text: str) -> tuple[int, ...]:
    """3, 1,3 or 1-5. ValueError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--rungs {text!r} must be like 3, 1,3 or 1-5")
        lowest = int(first)
        highest = int(last or first)
        if lowest > highest:
            raise ValueError(f"--rungs {text!r}: {lowest}-{highest} goes down, the ladder is climbed up: {highest}-{lowest}")
        if lowest < 1 or highest > len(RUNGS):
            raise ValueError(f"--rungs {text!r}: the ladder has the rungs 1 to {len(RUNGS)}")
        found |= set(range(lowest, highest + 1))
    return tuple(sorted(found))


def lengths_of(text: str | None) -> tuple[int, ...] | None:
    """1,63,300. ValueError for anything else, and for 0."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--lengths {text!r} must be whole numbers with commas between them")
    lengths = tuple(int(part) for part in parts)
    if 0 in lengths:
        raise ValueError(f"--lengths {text!r}: a sequence has at least 1 token")
    return lengths


def check_lengths(lengths: tuple[int, ...], longest: int) -> None:
    """ValueError for a length that a model with `longest` positions has not."""
    for length in lengths:
        if not 1 <= length <= longest:
            raise ValueError(f"--lengths {length}: a sequence has 1 to {longest} tokens here")
