"""Stock SGLang serves, another process trains: every returned log-probability against `ForRL.score`, byte by byte.

    python -m benchmarks.sglang_proof qwen3 --size 8b [--layers N] [--no-http | --no-engine] [--out rows.jsonl]

Processes one after another: random weights of realistic scale as a published checkpoint; `sglang.Engine` with too few pages for its
requests (chunked prefill, retraction), asked again (cache hits), updated by tensors, paused in the middle, updated from disk and by a
process group; the trainer on the recorded token ids; the HTTP server with a client's concurrent calls, its memory released and resumed;
the trainer on those. Compared: output log-probabilities after temperature alone and after the filters, prompt log-probabilities, routed
experts and their weights; and every token is drawn again with its request's seed. A phase that fails is a row with its error, and the
others go on. Exit status 1 if a byte differs or a phase is missing.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import sglang_phases as phases
from benchmarks.common import USUAL_HELP, USUAL_SIZES, Recorder, about, check_served, check_server, first_line, table
from benchmarks.sglang_phases import Model, say
from zoo.common.fingerprint import products
from zoo.common.registry import architectures

TOGETHER = 8  # records scored in one packed batch
# in this order: what the engine left is scored before the server starts
STEPS = ("make", "engine", "score", "http", "score-http")


def make(model: Model, folder: Path) -> None:
    model.server.from_config(model.config, seed=phases.SEEDS[0], device=phases.DEVICE).save_pretrained(folder / "weights")


@dataclass
class Count:
    """Entries compared and bytes that differ, by what was compared; where the first differing entry is."""

    compared: dict[str, int] = field(default_factory=dict)
    redrawn: int = 0  # tokens that the trainer drew again, each the same one
    differing: dict[str, int] = field(default_factory=dict)
    first: str = ""

    def add(self, what: str, trained: Tensor, served: Tensor, where: str) -> None:
        """Equal shapes and dtypes. ValueError otherwise: a shorter answer is no proof."""
        if trained.shape != served.shape or trained.dtype != served.dtype:
            raise ValueError(f"{what}, {where}: {trained.dtype} {list(trained.shape)} against {served.dtype} {list(served.shape)}")
        a, b = (t.contiguous().view(torch.uint8) for t in (trained, served))
        self.compared[what] = self.compared.get(what, 0) + trained.numel()
        self.differing[what] = self.differing.get(what, 0) + int((a != b).sum())
        if not self.first and not torch.equal(a, b):
            entry = (a != b).nonzero()[0].tolist()
            self.first = f"{what}, {where}, byte {entry}"


@dataclass
class Phase:
    """What a phase left and what came of it. notes: of the step that ran it, with its error if it failed."""

    name: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    count: Count = field(default_factory=Count)


def recorded(folder: Path, names: Sequence[str]) -> list[Phase]:
    """Phases of these names, with their records and notes; one that left nothing is there too."""
    found = {name: Phase(name) for name in names}
    for file, add in (("records.jsonl", lambda p, line: p.lines.append(line)), ("phases.jsonl", lambda p, line: p.notes.update(line))):
        for text in (folder / file).read_text().splitlines() if (folder / file).exists() else ():
            line = json.loads(text)
            if line["phase"] in found:
                add(found[line["phase"]], line)
    return list(found.values())


def score(model: Model, folder: Path, wanted: dict[str, bool]) -> Iterator[Phase]:
    """Compared phases as they are done, by a trainer that loads the same files and then takes the same update.

    wanted: phase -> whether it was served by the weights pushed later.
    """
    trainer = model.trainer.from_pretrained(folder / "weights", device=phases.DEVICE)
    updated = False
    for phase in sorted(recorded(folder, list(wanted)), key=lambda phase: wanted[phase.name]):
        try:
            if wanted[phase.name] and not updated:
                trainer.load_weights(model.update())
                updated = True
            for first in range(0, len(phase.lines), TOGETHER):
                for what, trained, served, where in _compared(trainer, phase.lines[first : first + TOGETHER], first):
                    phase.count.add(what, trained, served, where)
            if not phase.count.first:  # where bytes differ, that is the finding
                _redraw(trainer, phase)
        except Exception as error:
            phase.notes.setdefault("error", first_line(error))
        yield phase


@torch.no_grad()
def _redraw(trainer: Any, phase: Phase) -> None:
    """ValueError naming the first token that its request's seed doesn't draw: scores alone can't tell whose seed drew it."""
    from zoo.common.rollouts import Completion, check_draws

    records = [Completion.from_dict(line["record"]) for line in phase.lines]
    for first in range(0, len(records), TOGETHER):
        check_draws(trainer, *records[first : first + TOGETHER])
    phase.count.redrawn = sum(len(record.output_ids) for record in records)


@torch.no_grad()
def _compared(trainer: Any, lines: list[dict[str, Any]], first: int) -> Iterator[tuple[str, Tensor, Tensor, str]]:
    """(what, the trainer's, the server's, where) of some records in one packed batch."""
    from zoo.common import ops
    from zoo.common.rollouts import Completion

    records = [Completion.from_dict(line["record"]) for line in lines]
    trainer.fingerprint().check(records[0].fingerprint)
    documents = [[*r.prompt_ids, *r.output_ids] for r in records]
    device = next(trainer.parameters()).device
    ids = torch.tensor([token for d in documents for token in d], device=device)
    starts = torch.tensor([0, *(len(d) for d in documents)], device=device).cumsum(0)
    routed: list[tuple[Tensor, Tensor]] = []

    def watch(contract: Any, seen: Any, result: Any) -> None:
        if contract.name == "route":
            routed.append((result[0].cpu(), result[1].int().cpu()))

    alone = [replace(r.sampling, top_k=0, top_p=1.0, min_p=0.0) for r in records]
    with ops.watch(watch):
        own = trainer.score(ids, starts).cpu()
    temperature, filtered = (trainer.score(ids, starts, sampling=s).cpu() for s in (alone, [r.sampling for r in records]))
    for n, (record, line) in enumerate(zip(records, lines, strict=True)):
        begin = int(starts[n])
        end = int(starts[n + 1])
        prompt = len(record.prompt_ids)
        where = f"request {first + n}, prompt of {prompt}, {line['cached']} cached, {record.sampling.to_dict()}"
        drawn = slice(begin + prompt - 1, end - 1)
        yield "temperature", temperature[drawn], torch.tensor(record.log_probs), where
        yield "filtered", filtered[drawn], torch.tensor(record.filtered_log_probs), where
        if record.prompt_log_probs:
            yield "prompt", own[begin : begin + prompt - 1], torch.tensor(record.prompt_log_probs), where
        if routed:
            weights, experts = (torch.stack([layer[i][begin : end - 1] for layer in routed], 1) for i in range(2))
            yield "experts", experts, _unpacked(line["experts"], experts), where
            yield "weights", weights, _unpacked(line["weights"], weights), where


def _unpacked(text: str | None, like: Tensor) -> Tensor:
    """What SGLang's API returned, in the shape of `like` if it has as many entries."""
    flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=like.dtype) if text else like.new_empty(0)
    return flat.view(like.shape) if flat.numel() == like.numel() else flat


def report(found: Iterable[Phase], model: Model, record: Recorder) -> int:
    """Records a row per phase as it comes and prints them; 1 if a byte differs, nothing was compared or a phase failed."""
    body = []
    bad = []
    for phase in found:
        count = phase.count
        lines = phase.lines
        values = [value for line in lines for value in _distinct(line)]
        row = {
            "kind": "sglang proof",
            "arch": model.arch,
            "size": model.size,
            "layers": model.config.layers,
            **phase.notes,
            "phase": phase.name,
            "requests": len(lines),
            "compared": count.compared,
            "differing_bytes": count.differing,
            "redrawn": count.redrawn,
            "cached_tokens": sum(line["cached"] for line in lines),
            "retractions": sum(line["retracted"] for line in lines),
            "distinct_log_probs": len(set(values)),
            "first": count.first,
            "providers": _providers(lines),
        }
        record.add(row)
        compared = sum(count.compared.values())
        differing = sum(count.differing.values())
        body.append([phase.name, len(lines), compared, differing, row["cached_tokens"], row["retractions"], row["distinct_log_probs"]])
        if "error" in phase.notes or differing or not compared or len(set(values)) * 2 < len(values):
            bad.append(phase.name)
            print(f"{phase.name}: {phase.notes.get('error') or count.first or 'nothing worth comparing'}", flush=True)
    print(table(body, (f"{model.arch} {model.size}, phase", "requests", "compared", "differing", "cached", "retracted", "distinct")))
    print("every phase equal" if not bad else f"NOT PROVEN: {', '.join(bad)}", flush=True)
    return 1 if bad else 0


def _providers(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Which provider of the server ran each matrix product; all of them where records differ."""
    found: dict[str, set[str]] = {}
    for line in lines:
        for product, provider in products(line["record"]["fingerprint"]["realisation"]).items():
            found.setdefault(product, set()).add(provider)
    return {product: " and ".join(sorted(names)) for product, names in found.items()}


def _distinct(line: dict[str, Any]) -> tuple[float, ...]:
    """Log-probabilities that say something: of draws that were not forced."""
    from zoo.common.rollouts import Completion

    completion = Completion.from_dict(line["record"])
    return () if completion.sampling.is_greedy else completion.log_probs


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.sglang_proof", description=__doc__)
    made.add_argument("arch", choices=tuple(architectures()))
    made.add_argument("--size", help=USUAL_HELP)
    made.add_argument("--layers", type=int, help="the first layers only")
    made.add_argument("--requests", type=int, default=64)
    made.add_argument("--tokens", type=int, default=96, help="drawn by each request")
    made.add_argument("--no-http", action="store_true")
    made.add_argument("--no-engine", action="store_true", help="the HTTP server only")
    made.add_argument("--folder", type=Path, help="weights, records and logs; a temporary one by default")
    made.add_argument("--out", type=Path, help="append JSON rows to this file")
    made.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    given.size = USUAL_SIZES[given.arch] if given.size is None else given.size
    try:
        check_served(given.arch)
        model = Model(given.arch, given.size, given.layers)
        if given.step is None:
            check_server(phases.DEVICE)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.step is None:
        with tempfile.TemporaryDirectory() as folder:
            return _all(given, given.folder or Path(folder))
    if given.step == "make":
        make(model, given.folder)
    elif given.step == "engine":
        phases.engine(model, given.folder, given.requests, given.tokens)
    elif given.step == "http":
        phases.http(model, given.folder, given.tokens)
    else:
        wanted = phases.ENGINE_PHASES if given.step == "score" else phases.SERVER_PHASES
        record = Recorder(given.out, about(torch.device(phases.DEVICE), smoke=False))
        return report(score(model, given.folder, wanted), model, record)
    return 0


def _all(given: argparse.Namespace, folder: Path) -> int:
    """Every step in a process of its own, so that each finds the GPU empty. What was recorded is scored whatever came after it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("records.jsonl", "phases.jsonl"):
        (folder / name).unlink(missing_ok=True)
    shared = [given.arch, "--size", given.size, "--folder", str(folder), "--requests", str(given.requests), "--tokens", str(given.tokens)]
    shared += [] if given.layers is None else ["--layers", str(given.layers)]
    shared += [] if given.out is None else ["--out", str(given.out)]
    worst = 0
    for step in STEPS:
        if (given.no_http and "http" in step) or (given.no_engine and step in ("engine", "score")):
            continue
        status = subprocess.run([sys.executable, "-m", "benchmarks.sglang_proof", *shared, "--step", step], check=False).returncode
        say(f"{step}: exit status {status}")
        worst = max(worst, abs(status))
        if status and step == "make":
            break
    return min(worst, 1)


if __name__ == "__main__":
    sys.exit(main())
