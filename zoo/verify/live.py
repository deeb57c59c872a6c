"""Rung 4: the embedded engine samples at one version of the weights, and a trainer in another process scores what was written down."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo.common.sampling import SamplingParams
from zoo.verify.score import SCORES
from zoo.verify.subject import Settings, Subject
from zoo.verify.tally import Tally, emptiness

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_k=20, seed=3),
    SamplingParams(min_p=0.05, seed=4),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=2**64 - 1),
)


@dataclass
class Records:
    """A rollout as written to a file: `fields` is the JSON object that zoo.verify.score reads."""

    fields: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Records:
        return cls(json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.fields))

    @property
    def completions(self) -> list[dict[str, Any]]:
        completions: list[dict[str, Any]] = self.fields["completions"]
        return completions

    def sequences(self) -> list[list[int]]:
        return [[*c["prompt"], *c["output"]] for c in self.completions]


def sample(subject: Subject, settings: Settings) -> Records:
    """Draws from the server through the embedded engine: prompts of different lengths, greedy, temperatures and filters mixed."""
    from zoo.common.engine import Engine

    raise AssertionError("engine")


class Scorer:
    """A process with the trainer in it, started at once so that it loads while the sampler works, ended with the `with` block."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.first_weights = subject.trainer.weights_version
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-records-")
        self.folder = Path(self._folder.name)
        self._saved = 0
        self._errors = (self.folder / "errors.txt").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zoo.verify.score", "--threads", str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=Path(zoo.__file__).parents[1],
        )

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def score(self, records: Records) -> dict[str, list[list[float]]]:
        """The trainer's scores of what was written. ValueError if it refuses, or if the process died."""
        source, out = self.folder / "records.json", self.folder / "scores.json"
        records.fields["source"] = self._source()
        records.write(source)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{source}\t{out}\n")
            self._process.stdin.flush()
            answered = self._process.stdout.readline() == "done\n"
        except BrokenPipeError:
            answered = False
        if not answered:
            said = (self.folder / "errors.txt").read_text().strip().splitlines() or ["it said nothing"]
            raise ValueError(f"the scoring process ended before it answered: {said[-1]}")
        answer = json.loads(out.read_text())
        if "refused" in answer:
            raise ValueError(f"the trainer refuses the records: {answer['refused']}")
        scores: dict[str, list[list[float]]] = answer["scores"]
        return scores

    def _source(self) -> dict[str, Any]:
        """Where the weights of this moment are: where the subject came from, or a folder written after an optimizer step."""
        if self.subject.trainer.weights_version == self.first_weights:
            source = dict(self.subject.source)
            if "checkpoint" in source and Path(source["checkpoint"]).exists():
                source["checkpoint"] = str(Path(source["checkpoint"]).resolve())
            return source
        self._saved += 1
        folder = self.folder / f"step-{self._saved}"
        self.subject.trainer.save_pretrained(folder)
        return {"checkpoint": str(folder)}


def compare(
    records: Records, scores: dict[str, list[list[float]]], vocabulary: int
) -> Iterator[tuple[str, Tally, str | None]]:
    """Rows by kind of sampling: the sampler's reported log-probabilities against the trainer's."""
    groups: dict[str, list[int]] = {"greedy": [], "temperature": [], "top-k, top-p, min-p": []}
    for i, c in enumerate(records.completions):
        params = SamplingParams.from_dict(c["params"])
        groups["greedy" if params.is_greedy else "top-k, top-p, min-p" if params.filters else "temperature"].append(i)
    reported = torch.tensor([value for c in records.completions for value in c["log_prob"]])
    empty = emptiness(reported, None, vocabulary)
    for name, members in groups.items():
        if not members:
            continue
        tally = Tally()
        for i in members:
            c = records.completions[i]
            for kind in SCORES:
                tally.log_probs(torch.tensor(scores[kind][i]), torch.tensor(c[kind]), i, len(c["prompt"]) - 1)
        yield f"live sampling, {name}", tally, empty
