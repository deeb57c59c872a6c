"""`zoo generate`: text in, text and records out, of any checkpoint that loads and leaves room for one request."""

from __future__ import annotations

import json as json_files
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo.common.engine import Engine
from zoo.common.engine.sizing import MAX_BATCH
from zoo.common.engine.text import check_text, read_tokenizer
from zoo.common.files import check_file, write_file
from zoo.common.hub import locate
from zoo.common.rollouts import Completion, SamplingParams, seed_of_sample
from zoo.common.serving import ForServing
from zoo.common.threads import suited


@dataclass(frozen=True)
class Generation:
    """One prompt, the text drawn after it (special tokens left out, up to a stop string), and its record."""

    prompt: str
    text: str
    completion: Completion

    def to_dict(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "text": self.text, "completion": self.completion.to_dict()}


def generate_command(
    checkpoint: str | Path,
    prompts: str | Sequence[str],
    max_new_tokens: int = 128,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    stop: Sequence[str] = (),
    prompt_log_probs: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    json: str | Path | None = None,
    progress: bool = False,
) -> list[Generation]:
    """Draws a continuation of each prompt. Prompt n has the seed `seed_of_sample(seed, n)`, so that equal prompts differ; fresh ones
    without a seed. The records name them.

    `json` names a file for {"checkpoint", "fingerprint", "generations": [{"prompt", "text", "completion"}]}, written when all
    are done. The engine has its default memory and as many slots as there are prompts, up to its own number. ValueError in one
    sentence for a faulty checkpoint, one without a tokenizer.json, an empty prompt, bad parameters, or a request too long for memory.
    """
    check_file("json", None if json is None else Path(json))
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise ValueError("there is no prompt")
    for text in texts:
        check_text("a prompt", text)
    params = SamplingParams(temperature, top_k, top_p, min_p, seed, max_new_tokens, ignore_eos=ignore_eos, stop=tuple(stop))
    each = [params if params.seed is None else replace(params, seed=seed_of_sample(params.seed, n)) for n in range(len(texts))]
    read_tokenizer(locate(checkpoint, revision))  # a checkpoint without one is refused before its weights are read
    model = zoo.load(checkpoint, "serving", device=device, dtype=dtype, revision=revision)
    assert isinstance(model, ForServing)
    with suited(model):  # the content hash of the weights too
        engine = Engine(model, max_batch=min(len(texts), MAX_BATCH), progress=progress)
        done = engine.generate(texts, each, prompt_log_probs=prompt_log_probs)
    made = [Generation(p, c.text or "", c) for p, c in zip(texts, done, strict=True)]
    if json is not None:
        fields = {
            "checkpoint": str(checkpoint),
            "fingerprint": engine.fingerprint().to_dict(),
            "generations": [generation.to_dict() for generation in made],
        }
        write_file(json, json_files.dumps(fields, indent=2) + "\n")
    return made
