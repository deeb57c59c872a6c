"""Seeds of requests, given where they leave the process that takes them: a fresh one to each that names none, and to sample i of a
request for several with a seed one derived from both.

SGLang sends the n samples of a request one by one, each with the same parameters, and before them the prompt alone, of which it draws
nothing (max_new_tokens 0).
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zoo.common.rollouts import seed_of_sample
from zoo.sglang_plugin.names import PROGRAMS

SAMPLES = "_zoo_samples"  # left on SGLang's request of one prompt, whose copies share it
FRESH_BITS = 63  # SGLang 0.5.23 takes no larger seed, so that a client can send one again


@dataclass
class Samples:
    """Of one prompt: how many of its samples were sent."""

    sent: int = 0


def before_send(manager: Any, tokenized: Any) -> None:
    """Hook before `TokenizerManager._send_one_request`."""
    if manager.server_args.attention_backend in PROGRAMS:
        _give_seed(manager, tokenized)


def before_send_batch(manager: Any, tokenized: Sequence[Any]) -> None:
    """Hook before `TokenizerManager._send_batch_request`."""
    if manager.server_args.attention_backend in PROGRAMS:
        for each in tokenized:
            _give_seed(manager, each)


def _give_seed(manager: Any, tokenized: Any) -> None:
    params = copy.copy(tokenized.sampling_params)  # several samples share them
    asked = params.sampling_seed
    if asked is None:
        params.sampling_seed = secrets.randbits(FRESH_BITS)
    elif params.n > 1 and params.max_new_tokens != 0:
        samples: Samples = vars(manager.rid_to_state[tokenized.rid].obj)[SAMPLES]
        params.sampling_seed = seed_of_sample(asked, samples.sent)
        samples.sent += 1
    tokenized.sampling_params = params
