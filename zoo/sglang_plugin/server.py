"""A stock SGLang with the plugin behind the two calls of the embedded engine that a trainer needs: `generate` and `update_weights`."""

from __future__ import annotations

import json
import secrets
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from zoo.common.fingerprint import Fingerprint
from zoo.common.reading import shown
from zoo.common.rollouts import Completion, SamplingParams, seed_of_sample
from zoo.common.rollouts.params import hashed_seed
from zoo.common.rows import is_whole
from zoo.sglang_plugin.client import fingerprint, first_words, record, updating
from zoo.sglang_plugin.requests import SENT_SEEDS, sent

PATIENCE = 600.0  # seconds for all answers of a call


class Server:
    """Draws from a running server, and hands it weights.

    where   its address ("http://host:port"), or an `sglang.Engine` of this process
    seed    where fresh seeds come from, as in `Engine`; the system's randomness by default
    folder  where weights are laid down for a server with an address, which reads them from there: on a disk of both, /dev/shm by default
            where there is one. An `sglang.Engine` takes them as tensors

    ValueError for what runs no plugin, and in every call for what the server refuses, in its own words.
    """

    def __init__(self, where: Any, *, seed: int | None = None, folder: str | Path | None = None) -> None:
        self.where = where.rstrip("/") if isinstance(where, str) else where
        memory = Path("/dev/shm")
        self._folder = Path(folder) if folder is not None else memory if memory.is_dir() else None
        self._seed = secrets.randbits(64) if seed is None else seed
        self._count = 0
        self._printed = fingerprint(self.where)

    def fingerprint(self) -> Fingerprint:
        """Of the weights that it serves now."""
        return self._printed

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None, *, n: int = 1
    ) -> list[Completion]:
        """As `Engine.generate` of token ids: records in the order of the prompts, `n` of each side by side.

        ValueError too for an answer that is none, or that other weights drew than the server named.
        """
        if not is_whole(n) or n < 1:
            raise ValueError(f"n must be an integer of at least 1, not {shown(n)}")
        given = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(given) != len(prompts):
            raise ValueError(f"{len(given)} sampling parameters for {len(prompts)} prompts")
        asked = [[int(token) for token in prompt] for prompt in prompts for _ in range(n)]
        fields = [sent(self._seeded(p or SamplingParams(), i)) for p in given for i in range(n)]
        if isinstance(self.where, str):
            answers = self._post("generate", {"input_ids": asked, "sampling_params": fields, "return_logprob": True})
        else:
            answers = self.where.generate(input_ids=asked, sampling_params=fields, return_logprob=True)
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise ValueError(
                f"the server gave {len(answers) if isinstance(answers, list) else 'no list of'} answers to {len(asked)} requests"
            )
        return [record(answer, ids, field, self._printed) for answer, ids, field in zip(answers, asked, fields, strict=True)]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: str | None = None) -> str:
        """Through SGLang's own update call; returns the content hash of what is served then. `version` is SGLang's own label.

        ValueError for a label where the server is an `sglang.Engine`, whose call takes none.
        A tied weight comes once: `published_tensors(aliases=False)`.
        """
        if isinstance(self.where, str):
            with tempfile.TemporaryDirectory(dir=self._folder, prefix="zoo-weights-") as folder:
                save_file({name: tensor.contiguous() for name, tensor in tensors}, Path(folder) / "model.safetensors")
                label = {} if version is None else {"weight_version": version}
                answer = self._post("update_weights_from_disk", {"model_path": folder, **label})
            done = (answer.get("success"), answer.get("message")) if isinstance(answer, dict) else (False, answer)
        else:
            if version is not None:
                raise ValueError(f"version {shown(version)} is a label of servers with an address; an sglang.Engine's update takes none")
            with updating(self.where):
                done = self.where.update_weights_from_tensor(list(tensors))
        if not done[0]:
            raise ValueError(f"the server did not take the weights: {done[1]}")
        self._printed = fingerprint(self.where)
        return self._printed.weights

    def _seeded(self, params: SamplingParams, sample: int) -> SamplingParams:
        if params.is_greedy:
            return params
        if params.seed is not None:
            return replace(params, seed=seed_of_sample(params.seed, sample))
        self._count += 1
        return replace(params, seed=hashed_seed("request", self._seed, self._count) % SENT_SEEDS)

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        question = urllib.request.Request(f"{self.where}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(question, timeout=PATIENCE) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ValueError(f"the server refuses /{route}: {first_words(error, error.read())}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise ValueError(f"no SGLang server answers /{route} at {self.where:.80}: {first_words(error)}") from error
