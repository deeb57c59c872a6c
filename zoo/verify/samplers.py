"""Who draws in rungs 4 and 5: the embedded engine, or a stock SGLang with the zoo's plugin."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from zoo.common.engine import Engine
from zoo.common.engine.sizing import MAX_BATCH
from zoo.common.rollouts import Completion, SamplingParams
from zoo.sglang_plugin.requests import sent as sent_params
from zoo.verify.subject import Subject

MARGIN = 8  # tokens that SGLang wants beyond a prompt and its answer


class Sampler(Protocol):
    """Draws with the weights that the subject's trainer had at the start, or at the last `update`."""

    prefix: str  # of a row's name

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """One record per prompt. ValueError if an answer can't be one."""

    def update(self) -> None:
        """Takes the trainer's weights of now. ValueError if they are not taken."""

    def close(self) -> None: ...


def check_engine(engine: str, device: str) -> None:
    """ValueError for an engine that can't run here."""
    if engine == "sglang" and not device.startswith("cuda"):
        raise ValueError(f"--engine sglang needs a GPU, the ladder runs on {device}")
    if engine == "sglang" and importlib.util.find_spec("sglang") is None:
        raise ValueError("--engine sglang needs SGLang: pip install -c constraints/sglang.txt '.[sglang]' in a checkout, Python 3.12")


class Embedded:
    """The subject's own server, which the ladder updates itself."""

    prefix = ""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        memory = self.subject.server.make_memory(2, slots=1)
        # what the requests need and no more: on a GPU the scoring process wants room too
        pages = 1 + sum(memory.pages_for(len(prompt) + p.max_new_tokens) for prompt, p in zip(prompts, params, strict=True))
        engine = Engine(self.subject.server, pages=pages, chunk_rows=1024, max_batch=min(len(prompts), MAX_BATCH))
        return engine.generate([list(prompt) for prompt in prompts], list(params))

    def update(self) -> None: ...

    def close(self) -> None: ...


class SGLang:
    """`sglang.Engine` on the subject's GPU, started by the first draw; weights go through its own update call."""

    prefix = "SGLang: "

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._first = subject.trainer.weights_version
        self._engine: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-weights-")

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        from zoo.sglang_plugin import fingerprint, record

        if self._engine is None:
            self._engine = self._started(prompts, params)
        sent = [sent_params(p) for p in params]
        asked = [list(prompt) for prompt in prompts]
        answers = self._engine.generate(input_ids=asked, sampling_params=sent, return_logprob=True)
        served = fingerprint(self._engine)
        return [record(answer, ids, given, served) for answer, ids, given in zip(answers, asked, sent, strict=True)]

    def update(self) -> None:
        from zoo.sglang_plugin import updating

        if self._engine is not None:
            with updating(self._engine):
                done = self._engine.update_weights_from_tensor(list(self.subject.trainer.published_tensors(aliases=False)))
            if not done[0]:
                raise ValueError(f"SGLang did not take the weights: {done[1]}")

    def close(self) -> None:
        try:
            if self._engine is not None:
                self._engine.shutdown()
        finally:
            self._folder.cleanup()

    def _started(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Any:
        """Started late, so that the weights are those of now and the ladder's own memory is free."""
        longest = max(len(prompt) + p.max_new_tokens for prompt, p in zip(prompts, params, strict=True)) + MARGIN
        most = self.subject.trainer.config.positions
        page = self.subject.server.make_memory(2, slots=1).page_size
        return importlib.import_module("sglang").Engine(
            model_path=self._weights(),
            attention_backend="zoo",
            skip_tokenizer_init=True,
            base_gpu_id=self.subject.device.index or 0,
            context_length=min(longest, most),
            max_total_tokens=(len(prompts) + 1) * -(-longest // page) * page,
            max_running_requests=len(prompts) + 1,
            cuda_graph_bs_decode=[1, len(prompts)],
            mem_fraction_static=0.85,
            log_level="warning",
        )

    def _weights(self) -> str:
        """The checkpoint that the subject came from while its weights are those, else a folder written now."""
        trainer = self.subject.trainer
        source = self.subject.source
        if "checkpoint" in source and trainer.weights_version == self._first:
            return str(source["checkpoint"])
        folder = Path(self._folder.name) / "weights"
        trainer.save_pretrained(folder)
        return str(folder)


def sampler(engine: str, subject: Subject) -> Sampler:
    return SGLang(subject) if engine == "sglang" else Embedded(subject)
