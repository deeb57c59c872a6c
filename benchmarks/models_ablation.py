"""What an aligned op adds: programs between the unaligned and the aligned one, and the shares of their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import table
from benchmarks.models_bench import Bench, free, turns, twin
from benchmarks.models_parts import decoders
from zoo.common.program import PROGRAMS, Program

ALIGNED = PROGRAMS["aligned"].classes["cuda"]
UNALIGNED = PROGRAMS["unaligned"].classes["cuda"]


@dataclass(frozen=True)
class Mixed(Program):
    """For measurements only: the unaligned program with the ops of `switched` taken from the aligned one."""

    switched: tuple[str, ...] = ()

    def byte_class(self, op: str, shape: tuple[int, ...] = ()) -> str:
        return PROGRAMS["aligned" if op in self.switched else "unaligned"].byte_class("cuda", op, shape)


def mixed(switched: Sequence[str], contributors: int = 8) -> Mixed:
    segments = PROGRAMS["aligned"].key_segments["cuda"] if "attention" in switched else ()
    return Mixed("unaligned", "cuda", "bfloat16", key_segments=segments, contributors=contributors, switched=tuple(sorted(switched)))


def switchable(names: Sequence[str]) -> list[str]:
    """The ops of `names` whose byte class the two programs do not share: what --ablate can switch one by one."""
    return [name for name in names if ALIGNED[name] != UNALIGNED[name]]


def shares(base_us: float, alone_us: Mapping[str, float], whole_us: float) -> list[dict[str, Any]]:
    """Added microseconds per switched op, and its share of what all of them add; the rest is their interaction."""
    whole = whole_us - base_us
    out = [{"op": op, "added_us": us - base_us, "share": (us - base_us) / whole if whole else None} for op, us in alone_us.items()]
    rest = whole - sum(us - base_us for us in alone_us.values())
    return [*out, {"op": "together beyond the sum", "added_us": rest, "share": rest / whole if whole else None}]


def ablate(bench: Bench, batches: Sequence[int], context: int, documents: int, length: int, parts: Sequence[str]) -> None:
    """Switches one op at a time from the unaligned to the aligned class, in a decode step and in scoring."""
    assert bench.rival is not None
    base = bench.rival.switched if isinstance(bench.rival, Mixed) else ()
    names = [op for op in switchable(bench.trainer.family.used_ops(bench.config)) if op not in base]
    programs: dict[str, Program] = {
        "unaligned": bench.rival,
        **{op: mixed([*base, op], bench.aligned.contributors) for op in names},
        "aligned": bench.aligned,
    }
    with torch.no_grad():
        for batch in batches if "decode" in parts else ():
            if bench.budget.allows(f"ablation, decode {batch}", 15.0):
                made = decoders(bench, programs, batch, context)
                times = turns({name: d.turn for name, d in made.items()}, bench.rounds, bench.device)
                _shares(bench, "decode", {n: us / bench.steps for n, us in times.items()}, batch=batch, context=context)
                del made
                free(bench)
        if "score" in parts and bench.budget.allows("ablation, score", 15.0):
            ids = bench.ids(documents * length)
            starts = torch.arange(0, documents * length + 1, length, device=bench.device)
            trainers = {name: twin(bench.source, bench.trainer, program).eval() for name, program in programs.items()}
            times = turns({name: lambda t=t: t.score(ids, starts) for name, t in trainers.items()}, min(2, bench.rounds), bench.device)
            _shares(bench, "score", times, documents=documents, length=length)


def _shares(bench: Bench, what: str, times: dict[str, float], **more: Any) -> None:
    alone = {name: us for name, us in times.items() if name not in ("aligned", "unaligned")}
    found = shares(times["unaligned"], alone, times["aligned"])
    bench.record.add(
        {
            "kind": "ablation",
            "arch": bench.arch,
            "size": bench.size,
            "layers": bench.config.layers,
            "what": what,
            **more,
            "us": times["aligned"],
            "rival": "unaligned",
            "rival_us": times["unaligned"],
            "ops": found,
            "providers": bench.providers,
        }
    )
    where = ", ".join(f"{key} {value}" for key, value in more.items())
    print(f"{what} ({where}): unaligned {times['unaligned']:.1f} us, aligned {times['aligned']:.1f} us")
    print(table([[f["op"], f["added_us"], f["share"]] for f in found], ("switched to aligned", "added us", "share")), flush=True)
