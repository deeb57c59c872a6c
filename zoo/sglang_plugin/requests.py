"""Requests: SGLang's sampling parameters as the zoo's, and what a trainer could not replay."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from zoo.common.rollouts import SamplingParams

TOP_K_ALL = 1 << 30  # SGLang's "whole vocabulary"
SGLANGS_MOST = 128  # output tokens of a request that names no max_new_tokens
UNBOUNDED = 1 << 30  # of one that says None: no context is longer
SENT_SEEDS = 1 << 63  # SGLang sends seeds as int64
GREEDY_BELOW = 1e-6  # SGLang turns a lower temperature into temperature 1 with top_k 1
# field of a request -> the values that leave the logits alone
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "logit_bias": (None, {}),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "watermark": (None,),
}
# fields of the request itself that the plugin does not serve
UNSERVED = (
    "lora_path",
    "lora_id",
    "return_entropy",
    "return_indexer_topk",
    "custom_logit_processor",
    "return_hidden_states",
    "return_sampling_mask",
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "session_params",
    "positional_embed_overrides",
    "sampling_logprobs_mode",
    "watermark",
)


def prompt_digest(ids: Sequence[int]) -> str:
    """32 hexadecimal digits that name a prompt's token ids."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()[:32]


def sampling_params(given: Any, seed: int | None = None) -> SamplingParams:
    """The zoo's parameters from SGLang's: a dict as a client sends it, or its SamplingParams object.

    SGLang writes greedy as temperature 1 with top_k 1, so both spellings are greedy: scored at temperature 1, unfiltered.
    seed  of a request that names none
    ValueError, naming the field, for what the trainer could not replay. RuntimeError if it has no seed at all.
    """

    def field(name: str, default: Any) -> Any:
        value = given.get(name) if isinstance(given, dict) else getattr(given, name, None)
        return default if value is None else value

    for name, neutral in NEUTRAL.items():
        value = field(name, None)
        if value not in neutral:
            raise ValueError(f"{name}={value!r} changes the logits in a way that the trainer can't replay")
    if field("beam_width", 1) != 1:
        raise ValueError(f"beam_width={field('beam_width', 1)} is not sampling: only drawn tokens are served")
    temperature = float(field("temperature", 1.0))
    top_k = int(field("top_k", -1))
    seed = field("sampling_seed", seed)
    if seed is None:
        raise RuntimeError("a request that draws has no seed: the hook on TokenizerManager._send_one_request is not active")
    if 0 <= temperature < GREEDY_BELOW or (temperature == 1.0 and top_k == 1):
        return SamplingParams(temperature=0.0, seed=seed)
    return SamplingParams(
        temperature=temperature,
        top_k=0 if top_k < 0 or top_k >= TOP_K_ALL else top_k,
        top_p=float(field("top_p", 1.0)),
        min_p=float(field("min_p", 0.0)),
        seed=seed,
    )


def sent(params: SamplingParams) -> dict[str, Any]:
    """The zoo's parameters as a client of SGLang sends them; a seed that SGLang can't is left to it, and comes back in the answer."""
    out: dict[str, Any] = {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens, "ignore_eos": params.ignore_eos}
    if params.filters:
        out |= {"top_k": params.top_k or -1, "top_p": params.top_p, "min_p": params.min_p}
    if params.stop_token_ids:
        out["stop_token_ids"] = list(params.stop_token_ids)
    if params.stop:
        out["stop"] = list(params.stop)
    if params.seed is not None and params.seed < SENT_SEEDS:
        out["sampling_seed"] = params.seed
    return out


def ending(given: dict[str, Any], ended_by: int | None = None) -> dict[str, Any]:
    """Fields of the zoo's parameters that say when a request ends, from SGLang's, for its record: SGLang itself ends it.

    ended_by  the token that ended it, where one did: the model's own end tokens are not among what was sent
    Under ignore_eos SGLang passes over every stop token. A request that names no max_new_tokens gets SGLang's default, one that says
    None as many as its context holds.
    """
    most = given.get("max_new_tokens", SGLANGS_MOST)
    ignore_eos = given.get("ignore_eos") or False
    ends = () if ignore_eos else given.get("stop_token_ids") or ()
    return {
        "max_new_tokens": UNBOUNDED if most is None else most,
        "stop_token_ids": tuple(dict.fromkeys(ends if ended_by is None else (*ends, ended_by))),
        "ignore_eos": ignore_eos,
        "stop": given.get("stop") or (),
    }


def check_request(request: Any, input_ids: Sequence[int] | None, vocabulary: int) -> None:
    """ValueError, one sentence, for a request (one item of SGLang's GenerateReqInput) that is not served exactly, or would end the
    scheduler: token ids, or a number of top log-probabilities, outside the vocabulary, a logprob_start_len below -1."""
    for name in UNSERVED:
        value = getattr(request, name, None)
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name} is not served by the zoo's backend")
    sampling_params(request.sampling_params or {}, seed=0)  # a fresh one is given to it where it leaves
    if input_ids is not None and len(input_ids) and not 0 <= min(input_ids) <= max(input_ids) < vocabulary:
        odd = next(token for token in input_ids if not 0 <= token < vocabulary)
        raise ValueError(f"token id {odd} of the prompt is outside the vocabulary of {vocabulary}")
    start = getattr(request, "logprob_start_len", None)
    if start is not None and start < -1:
        raise ValueError(f"logprob_start_len {start} is below -1, which scores no prompt token")
    most = getattr(request, "top_logprobs_num", None) or 0
    if most > vocabulary:
        raise ValueError(f"top_logprobs_num {most} is more than the vocabulary of {vocabulary}")
