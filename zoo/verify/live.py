"""Rung 4: an engine samples at one version of the weights; a trainer in another process scores what was recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo.common.rollouts import Completion, SamplingParams
from zoo.verify.samplers import Sampler
from zoo.verify.scored import Scores
from zoo.verify.subject import Settings, Subject

PARAMS = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_k=20, seed=3),
    SamplingParams(min_p=0.05, seed=4),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=2**64 - 1),
)


def sample(subject: Subject, settings: Settings, sampler: Sampler) -> list[Completion]:
    """Draws: prompts of different lengths, greedy, temperatures and filters mixed, all at once."""
    longest = subject.trainer.config.positions - settings.drawn
    prompts = []
    params = []
    for i in range(settings.requests):
        document = subject.ids(i % len(subject.documents)).tolist()
        # a second request of a document reads another prefix of it
        prompts.append(document[: max(1, min(len(document), longest) - 5 * (i // len(subject.documents)))])
        params.append(replace(PARAMS[i % len(PARAMS)], max_new_tokens=settings.drawn, ignore_eos=True))
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()  # for whoever draws or scores in another process
    completions = sampler.generate(prompts, params)
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
    return completions


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

    def score(self, completions: list[Completion]) -> Scores:
        """The trainer's scores of what was written. ValueError if it refuses, or if the process died."""
        source = self.folder / "records.json"
        out = self.folder / "scores.json"
        records: dict[str, Any] = {"source": self._source(), "device": str(self.subject.device)}
        records["completions"] = [c.to_dict() for c in completions]
        source.write_text(json.dumps(records))
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
        scores: Scores = answer["scores"]
        return scores

    def _source(self) -> dict[str, Any]:
        """Where the weights of this moment are: where the subject came from, or a folder written after an optimizer step."""
        if self.subject.trainer.weights_version == self.first_weights:
            source = dict(self.subject.source)
            if "checkpoint" in source and Path(source["checkpoint"]).exists():
                source["checkpoint"] = str(Path(source["checkpoint"]).resolve())
            return source
        shutil.rmtree(self.folder / f"step-{self._saved}", ignore_errors=True)
        self._saved += 1
        folder = self.folder / f"step-{self._saved}"
        self.subject.trainer.save_pretrained(folder)
        return {"checkpoint": str(folder)}
