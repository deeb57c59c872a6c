"""What a sampler reported of its tokens against what the trainer scored."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zoo.common.rollouts import Completion
from zoo.verify.tally import Tally, emptiness

Scores = dict[str, list[list[float]]]  # for each of SCORES a list a completion
SCORES = ("log_probs", "filtered_log_probs")


def compare(completions: list[Completion], scores: Scores, vocabulary: int) -> Iterator[tuple[str, Tally, str | None]]:
    """Rows by kind of sampling: the sampler's reported log-probabilities against the trainer's."""
    groups: dict[str, list[int]] = {"greedy": [], "temperature": [], "top-k, top-p, min-p": []}
    for i, c in enumerate(completions):
        groups["greedy" if c.sampling.is_greedy else "top-k, top-p, min-p" if c.sampling.filters else "temperature"].append(i)
    for name, members in groups.items():
        if not members:
            continue
        empty = emptiness(torch.tensor([value for i in members for value in completions[i].log_probs]), None, vocabulary)
        tally = Tally()
        for i in members:
            c = completions[i]
            for kind, reported in zip(SCORES, (c.log_probs, c.filtered_log_probs), strict=True):
                tally.log_probs(torch.tensor(scores[kind][i]), torch.tensor(reported), i, len(c.prompt_ids) - 1)
        yield f"live sampling, {name}", tally, empty
