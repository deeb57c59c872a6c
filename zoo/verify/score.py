"""Scores a rollout's record with the trainer, in a process of its own: `python -m zoo.verify.score records.json`.

A records file holds where the weights are ("source": {"checkpoint": path} or {"config": config.json's fields, "seed": n}), the
device, and the engine's completions as they were recorded. The trainer is loaded, every completion's fingerprint must agree with
it, and every sampled token is scored under the parameters that it was drawn with.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.common.reading import printable
from zoo.common.rollouts import Completion, check_draws
from zoo.common.training import ForRL
from zoo.verify.scored import SCORES, Scores, compare
from zoo.verify.subject import load


@torch.no_grad()
def score(model: ForRL, completions: list[Completion]) -> Scores:
    """FP32 log-probabilities of every completion's tokens: after the temperature, and after the filters too.

    ValueError with the differing lines if a fingerprint does not agree, or if a completion mixes versions of the weights.
    """
    mine = model.fingerprint()
    for c in completions:
        c.fingerprint.check(mine)
        if not c.exact or set(c.versions) != {mine.weights}:
            raise ValueError(f"completion {c.request_id} mixes weights: {', '.join(dict.fromkeys(c.versions))}")
    device = next(model.parameters()).device
    params = [c.sampling for c in completions]
    plain = [replace(p, top_k=0, top_p=1.0, min_p=0.0) for p in params]
    ids = torch.tensor([token for c in completions for token in (*c.prompt_ids, *c.output_ids)], device=device)
    ends = torch.tensor([len(c.prompt_ids) + len(c.output_ids) for c in completions]).cumsum(0).tolist()
    cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    out = {}
    for name, sampling in zip(SCORES, (plain, params), strict=True):
        scored = model.score(ids, cu_seqlens, sampling=sampling)
        assert isinstance(scored, Tensor)
        # the token at position p is scored by the row before it; a document's last row scores nothing
        spans = [(end - len(c.output_ids) - 1, end - 1) for end, c in zip(ends, completions, strict=True)]
        out[name] = [scored[begin:end].tolist() for begin, end in spans]
    return out


class _Models:
    """The last model loaded: a climb scores several records of the same weights."""

    def __init__(self) -> None:
        self.key = ""
        self.model: ForRL | None = None

    def of(self, records: dict[str, Any]) -> ForRL:
        key = json.dumps([records["source"], records["device"]])
        if key != self.key or self.model is None:
            self.model = None  # frees the old weights first
            self.model = load(records["source"], "rl", records["device"])
            self.key = key
        assert self.model is not None
        return self.model


def score_file(path: Path, out: Path, models: _Models) -> None:
    """Writes {"scores": ...}, or {"refused": a sentence}."""
    records = json.loads(path.read_text())
    try:
        completions = [Completion.from_dict(c) for c in records["completions"]]
        model = models.of(records)
        scores = score(model, completions)
        # where the bytes differ, the ladder counts them
        check_draws(model, *(c for c, again in zip(completions, scores["log_probs"], strict=True) if again == list(c.log_probs)))
        answer: dict[str, Any] = {"scores": scores}
    except ValueError as error:
        answer = {"refused": str(error)}
    out.write_text(json.dumps(answer))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo.verify.score", description="Score recorded rollouts with the trainer.")
    parser.add_argument("records", nargs="?", type=Path, help="a file; without one, pairs of paths are read from standard input")
    parser.add_argument("--out", type=Path, help="write the scores here")
    parser.add_argument("--threads", type=int, help="CPU threads")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    models = _Models()
    if given.records is None:
        for line in sys.stdin:
            source, out = line.rstrip("\n").split("\t")
            score_file(Path(source), Path(out), models)
            print("done", flush=True)
        return 0
    records = json.loads(given.records.read_text())
    try:
        completions = [Completion.from_dict(c) for c in records["completions"]]
        model = models.of(records)
        scores = score(model, completions)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    if given.out:
        given.out.write_text(json.dumps({"scores": scores}))
    rows = [tally.row(4, what, empty) for what, tally, empty in compare(completions, scores, model.config.vocabulary)]
    for row in rows:
        print(f"{row.what}: {row.compared} compared, {row.differing} bytes differ, K3 {row.k3:.3g}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
