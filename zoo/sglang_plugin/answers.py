"""A server's answer, read strictly before a record is made of it: each field is there, of its kind, and agrees with the others."""

from __future__ import annotations

import base64
import binascii
import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.common.rollouts import seed_of_sample
from zoo.common.rollouts.completion import REASONS
from zoo.common.rollouts.readers import IDS
from zoo.sglang_plugin.names import FILTERED, REQUEST, ROUTING_WEIGHTS, WEIGHTS
from zoo.sglang_plugin.requests import SGLANGS_MOST, prompt_digest

OTHER_SERVER = "its server runs another backend, or a plugin of another version than this client"


@dataclass(frozen=True)
class Answer:
    """What a finished answer says of its drawn tokens, all of one length, and of its request.

    drawn_by          the weights of each token; None where there are none such
    prompt_log_probs  None unless the whole prompt was scored
    ended_by          the token that ended it, which the model's own end tokens decide too; None for any other finish_reason than "stop"
    seed              the one that drew
    """

    request_id: str
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    filtered_log_probs: tuple[float, ...]
    drawn_by: tuple[str | None, ...]
    prompt_log_probs: tuple[float, ...] | None
    finish_reason: str
    ended_by: int | None
    seed: int


def read_answer(answer: Any, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Answer:
    """`answer` to `prompt_ids`, asked with `sampling`. ValueError in one sentence for an answer to anything else, or one that
    contradicts itself."""
    meta = meta_of(answer)
    if "output_token_logprobs" not in meta:
        raise ValueError("the answer has no log-probabilities: ask for them with return_logprob=True")
    name = _field(meta, "id", str)
    count = _count(meta, "completion_tokens")
    if meta.get("finish_reason") is None:
        most = sampling.get("max_new_tokens", SGLANGS_MOST)
        raise ValueError(f"answer {name} is not finished: {count} of up to {most} tokens so far")
    if _count(meta, "prompt_tokens") != len(prompt_ids):
        raise ValueError(f"answer {name} is of {meta['prompt_tokens']} prompt tokens, the prompt given has {len(prompt_ids)}")
    if not count:
        raise ValueError(f"answer {name} has 0 output tokens: nothing was drawn, {WEIGHTS} names what scored its {len(prompt_ids)}")
    most = sampling.get("max_new_tokens", SGLANGS_MOST)
    if type(most) is int and count > most:
        raise ValueError(f"answer {name} has {count} output tokens, at most {most} were asked for")
    for column in (FILTERED, WEIGHTS, REQUEST):
        if column not in meta:
            raise ValueError(f"the answer has no {column}: {OTHER_SERVER}")
    scored = [_pair(entry, "output_token_logprobs") for entry in _field(meta, "output_token_logprobs", list, tuple)]
    filtered, drawn_by = (_field(meta, column, list, tuple) for column in (FILTERED, WEIGHTS))
    for what, entries in (("log-probabilities", scored), ("filtered log-probabilities", filtered), ("weights", drawn_by)):
        if len(entries) != count:
            raise ValueError(f"{len(entries)} {what} for {count} output tokens")
    output_ids = tuple(_token(token) for _, token in scored)
    if "output_ids" in answer and answer["output_ids"] != list(output_ids):
        raise ValueError(f"answer {name} has the output ids {answer['output_ids']!r:.80}, its log-probabilities are of {output_ids!r:.80}")
    for weights in drawn_by:
        if weights is not None and not isinstance(weights, str):
            raise ValueError(f"{WEIGHTS} holds {weights!r:.40}, it must name weights")
    reason, ended_by = _reason(meta, name, output_ids[-1])
    return Answer(
        request_id=name,
        output_ids=output_ids,
        log_probs=tuple(_log_prob(value, "output_token_logprobs") for value, _ in scored),
        filtered_log_probs=tuple(_log_prob(value, FILTERED) for value in filtered),
        drawn_by=tuple(drawn_by),
        prompt_log_probs=_prompt_log_probs(meta, name, prompt_ids),
        finish_reason=reason,
        ended_by=ended_by,
        seed=_seed(meta, name, prompt_ids, sampling),
    )


def meta_of(answer: Any) -> dict[str, Any]:
    """The `meta_info` of one answer. ValueError for anything that has none, among it a list of answers and SGLang's error bodies."""
    if not isinstance(answer, dict):
        raise ValueError(f"an answer is one dictionary with meta_info, not a {type(answer).__name__}")
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        said = answer.get("error") or answer.get("message") or sorted(map(str, answer))
        raise ValueError(f"the answer has no meta_info, it is no answer of SGLang's /generate: {said!r:.120}")
    return meta


def token_ids(given: Sequence[int]) -> tuple[int, ...]:
    """Prompt ids as Python's integers. ValueError for what is no sequence of them."""
    try:
        ids = tuple(operator.index(token) for token in given)
    except TypeError as error:
        raise ValueError(f"prompt_ids must be a sequence of token ids, not {given!r:.40}") from error
    return tuple(_token(token) for token in ids)


def read_routing(answer: Any, layers: int, top_k: int, experts: int | None, start: int) -> tuple[Tensor, Tensor]:
    """See `client.routing`."""
    meta = meta_of(answer)
    texts = meta.get("routed_experts"), _last(meta.get(ROUTING_WEIGHTS))
    if None in texts:
        raise ValueError("the answer has no routing: start with --enable-return-routed-experts and ask with return_routed_experts=True")
    ids, weights = (_decoded(text) for text in texts)
    if len(ids) != len(weights) or len(ids) % (4 * layers * top_k):
        raise ValueError(f"{len(ids)} bytes of experts and {len(weights)} of weights are not whole tokens of {layers} x {top_k} x 4")
    prompt = _count(meta, "prompt_tokens")
    drawn = _count(meta, "completion_tokens")
    found = len(ids) // (4 * layers * top_k)
    due = max(prompt + drawn - 1 - start, 0)
    if found != due:
        raise ValueError(
            f"the answer has routing of {found} tokens of {layers} x {top_k}, {due} are due: {prompt} of the prompt and {drawn} drawn, "
            f"but the last, from token {start} on"
        )
    shape = (due, layers, top_k)
    if not due:
        return torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    expert_TLK = torch.frombuffer(ids, dtype=torch.int32).view(shape)
    weight_TLK = torch.frombuffer(weights, dtype=torch.float32).view(shape)
    _check_experts(expert_TLK, experts)
    _check_weights(weight_TLK)
    return expert_TLK, weight_TLK


def _check_experts(expert_TLK: Tensor, experts: int | None) -> None:
    last = (IDS if experts is None else experts) - 1
    odd = (expert_TLK < 0) | (expert_TLK > last)
    if odd.any():
        token, layer, _ = odd.nonzero()[0].tolist()
        raise ValueError(f"token {token} goes to expert {int(expert_TLK[odd][0])} in layer {layer}, there are 0 .. {last}")
    ordered = expert_TLK.sort(-1).values
    twice = ordered[..., 1:] == ordered[..., :-1]
    if twice.any():
        token, layer, _ = twice.nonzero()[0].tolist()
        raise ValueError(f"token {token} goes to expert {int(ordered[..., 1:][twice][0])} twice in layer {layer}")


def _check_weights(weight_TLK: Tensor) -> None:
    """A weight may underflow to 0, the largest of a token's can't."""
    odd = ~weight_TLK.isfinite() | (weight_TLK < 0)
    if odd.any():
        token, layer, slot = odd.nonzero()[0].tolist()
        value = float(weight_TLK[token, layer, slot])
        raise ValueError(f"token {token} has the routing weight {value} in slot {slot} of layer {layer}, it must be finite and at least 0")
    zero = (weight_TLK == 0).all(-1)
    if zero.any():
        token, layer = zero.nonzero()[0].tolist()
        raise ValueError(f"token {token} has {weight_TLK.shape[-1]} routing weights in layer {layer}, and all are 0")


def _decoded(text: Any) -> bytearray:
    try:
        return bytearray(base64.b64decode(text, validate=True))
    except (TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"routing must be base64 text, not {text!r:.40}") from error


def _last(entries: Any) -> Any:
    return entries[-1] if isinstance(entries, list | tuple) and entries else None


def _field(meta: dict[str, Any], name: str, *kinds: type) -> Any:
    value = meta.get(name)
    if type(value) not in kinds:
        raise ValueError(f"the answer's {name} is {value!r:.40}, it must be a {kinds[0].__name__}")
    return value


def _count(meta: dict[str, Any], name: str) -> int:
    value = meta.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"the answer's {name} is {value!r:.40}, it must be a number of tokens")
    return value


def _pair(entry: Any, column: str) -> tuple[Any, Any]:
    """(log-probability, token id) of SGLang's (log-probability, token id, text)."""
    if not isinstance(entry, list | tuple) or len(entry) < 2:
        raise ValueError(f"{column} holds {entry!r:.40}, it must hold a log-probability with its token id")
    return entry[0], entry[1]


def _token(value: Any) -> int:
    if type(value) is not int or not 0 <= value < IDS:
        raise ValueError(f"a token id must be an integer of at least 0 and below 2^31, not {value!r:.40}")
    return value


def _log_prob(value: Any, column: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 0:
        raise ValueError(f"{column} holds {value!r:.40}; a log-probability is a finite number, at most 0")
    try:
        whole = struct.unpack("<f", struct.pack("<f", value))[0] == value
    except OverflowError:
        whole = False
    if not whole:
        raise ValueError(f"{column} holds {value!r:.40}, which is no FP32 number")
    return float(value)


def _reason(meta: dict[str, Any], name: str, last: int) -> tuple[str, int | None]:
    """Why a record's request ended, and the token that ended it: SGLang says "stop" for a stop string too, which is no token."""
    said = meta["finish_reason"]
    reason = said.get("type") if isinstance(said, dict) else said
    if reason not in REASONS:
        raise ValueError(f"finish_reason {reason!r:.40} is not one of {', '.join(REASONS)}")
    if reason != "stop":
        return str(reason), None
    matched = said.get("matched") if isinstance(said, dict) else None
    if type(matched) is not int:
        return "text", None
    if matched != last:
        raise ValueError(f"answer {name} was ended by token {matched}, its last one is {last}")
    return "stop", matched


def _prompt_log_probs(meta: dict[str, Any], name: str, prompt_ids: Sequence[int]) -> tuple[float, ...] | None:
    """Of the whole prompt, if all of it was scored; the tokens beside those of a part must be the prompt's last ones in any case."""
    if meta.get("input_token_logprobs") is None:
        return None
    scored = [_pair(entry, "input_token_logprobs") for entry in _field(meta, "input_token_logprobs", list, tuple)]
    if len(scored) > len(prompt_ids):
        raise ValueError(f"answer {name} scores {len(scored)} prompt tokens, the prompt given has {len(prompt_ids)}")
    said = [_token(token) for _, token in scored]
    mine = list(prompt_ids[len(prompt_ids) - len(said) :])
    # SGLang writes 0 for the vocabulary's last id
    last = {token for token, other in zip(mine, said, strict=True) if token != other == 0}
    if [0 if token in last else token for token in mine] != said or len(last) > 1 or any(token > max(last) for token in mine if last):
        raise ValueError(f"answer {name} is to the prompt tokens {said!r:.80}, the prompt given has {mine!r:.80} there")
    values = [_log_prob(value, "input_token_logprobs") for value, _ in scored[1:]]
    return tuple(values) if scored and len(scored) == len(prompt_ids) else None


def _seed(meta: dict[str, Any], name: str, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> int:
    """The seed that drew, which the server says beside a digest of the prompt that it answered."""
    said = _last(meta[REQUEST])
    if not isinstance(said, dict) or type(said.get("seed")) is not int or not isinstance(said.get("prompt"), str):
        raise ValueError(f"{REQUEST} ends with {said!r:.80}, it must name the seed and the prompt's digest")
    mine = prompt_digest(prompt_ids)
    if said["prompt"] != mine:
        raise ValueError(f"answer {name} is to a prompt of digest {said['prompt']:.32}, the prompt given has {mine}")
    asked = sampling.get("sampling_seed")
    seed = int(said["seed"])
    samples = sampling.get("n") or 1
    if asked is not None and seed not in (seed_of_sample(int(asked), i) for i in range(samples)):
        raise ValueError(f"answer {name} was drawn by seed {seed}, asked for were {samples} samples of seed {asked}")
    return seed
