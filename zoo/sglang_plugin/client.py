"""For trainers and clients: whose numbers are these, and a record that says everything that a trainer needs."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zoo.common.engine.record import Completion
from zoo.common.fingerprint import Fingerprint
from zoo.sglang_plugin.names import FILTERED, ROUTING_WEIGHTS, STATE, WEIGHTS, WEIGHTS_DIGITS
from zoo.sglang_plugin.requests import sampling_params

SGLANGS_MOST = 128  # output tokens of a request that names no max_new_tokens


def fingerprint(server: Any) -> Fingerprint:
    """The fingerprint of a running server: its address ("http://host:port"), or an `sglang.Engine`.

    ValueError if it does not run the plugin, has handed its weights' memory back, or was started without weights and lacks some.
    """
    said = states(server)
    if any(state["fingerprint"] is None for state in said):
        raise ValueError("the server's weights are released, or not all pushed yet: resume and push them before asking for a fingerprint")
    found = [Fingerprint.from_dict(state["fingerprint"]) for state in said]
    for other in found[1:]:
        found[0].check(other)
    return found[0]


def states(server: Any) -> list[dict[str, Any]]:
    """What the plugin says in each scheduler of a server: fingerprint; prefill_graph_rows, the prompt rows that graphs have
    served; drawn_in_graphs, the rows without filters that decode graphs have drawn for (of a request's N tokens N - 1, as its prefill
    drew the first, and under overlap scheduling one that nobody gets). Both since the graphs were captured, which an update from disk
    does again if it asks for it.

    ValueError if nothing answers there, or it does not run the plugin.
    """
    if isinstance(server, str):
        try:
            with urllib.request.urlopen(server.rstrip("/") + "/server_info", timeout=60) as answer:
                info = json.load(answer)
        except (OSError, ValueError) as error:
            raise ValueError(f"no SGLang server answers at {server!r}: {error}") from error
    elif not hasattr(server, "get_server_info"):
        raise ValueError(f"a server is its address or an sglang.Engine, not {type(server).__name__}")
    else:
        info = server.get_server_info()
    said = [state.get(STATE) for state in info.get("internal_states", ())]
    if not said or any(state is None for state in said):
        raise ValueError("this server does not run the zoo's backend: start it with --attention-backend zoo")
    return said


@contextmanager
def updating(engine: Any) -> Iterator[None]:
    """Around an `sglang.Engine`'s updates by tensors or a process group: SGLang 0.5.23 takes them in a session, 0.5.17 has none.

    ValueError if the session does not open or close.
    """
    session = hasattr(engine, "begin_weight_update")
    if session:
        _done(engine.begin_weight_update())
    try:
        yield
    except BaseException:
        if session:
            engine.end_weight_update()  # what it answers would hide the error
        raise
    if session:
        _done(engine.end_weight_update())


def _done(answer: Sequence[Any]) -> None:
    if not answer[0]:
        raise ValueError(f"SGLang's session of weight updates: {answer[1]}")


def record(answer: dict[str, Any], prompt_ids: Sequence[int], sampling: dict[str, Any], printed: Fingerprint) -> Completion:
    """The record of one answer of `/generate` or `Engine.generate`, asked with return_logprob.

    answer    {"output_ids": ..., "meta_info": ...}
    sampling  the parameters that were sent
    printed   `fingerprint` of the server under the weights that it answered with
    ValueError if the answer has no log-probabilities or output tokens, is not finished, is of another prompt's length, comes from
    a server without this plugin's fields, has rows of two weights (updated while it was paused, or over a cache that was not
    flushed), or of others than `printed` names.
    """
    meta = answer["meta_info"]
    if "output_token_logprobs" not in meta:
        raise ValueError("the answer has no log-probabilities: ask for them with return_logprob=True")
    count = meta["completion_tokens"]
    if meta["finish_reason"] is None:
        most = sampling.get("max_new_tokens", SGLANGS_MOST)
        raise ValueError(f"answer {meta['id']} is not finished: {count} of up to {most} tokens so far")
    if meta["prompt_tokens"] != len(prompt_ids):
        raise ValueError(f"answer {meta['id']} is of {meta['prompt_tokens']} prompt tokens, the prompt given has {len(prompt_ids)}")
    if not count:
        raise ValueError(f"answer {meta['id']} has 0 output tokens: nothing was drawn, {WEIGHTS} names what scored its {len(prompt_ids)}")
    for name in (FILTERED, WEIGHTS):
        if name not in meta:
            raise ValueError(f"the answer has no {name}: its server runs another backend, or a plugin of another version than this client")
    scored, filtered, drawn_by = meta["output_token_logprobs"], meta[FILTERED], meta[WEIGHTS]
    output_ids = tuple(token for _, token, _ in scored)
    for what, entries in (("log-probabilities", scored), ("filtered log-probabilities", filtered), ("weights", drawn_by)):
        if len(entries) != count:
            raise ValueError(f"{len(entries)} {what} for {count} output tokens")
    if None in drawn_by:
        raise ValueError(
            f"the weights changed under answer {meta['id']}, or under the cache that it read: update between requests and flush the cache"
        )
    mine = printed.weights[:WEIGHTS_DIGITS]
    for other in set(drawn_by) - {mine}:
        raise ValueError(f"answer {meta['id']} was drawn by weights {other}, the fingerprint is of {mine}")
    prompt = meta.get("input_token_logprobs")
    whole = prompt is not None and len(prompt) == len(prompt_ids)
    return Completion(
        request_id=meta["id"],
        prompt_ids=tuple(prompt_ids),
        output_ids=output_ids,
        log_probs=tuple(value for value, _, _ in scored),
        filtered_log_probs=tuple(filtered),
        prompt_log_probs=tuple(value for value, _, _ in prompt[1:]) if whole else None,
        sampling=sampling_params(sampling, meta["id"]),
        versions=(printed.weights,) * (len(prompt_ids) + len(output_ids) - 1),
        exact=True,
        finish_reason=meta["finish_reason"]["type"],
        fingerprint=printed,
    )


def routing(answer: dict[str, Any], layers: int, top_k: int) -> tuple[Tensor, Tensor]:
    """(experts int32, weights FP32), [tokens, layers, top_k] each, of an answer asked with return_routed_experts.

    Entry k is slot k, the order in which a token's experts are added. Tokens: from `routed_experts_start_len` (0 unless sent) to
    the last but one, since the last drawn token has not run. layers, top_k: of the model, `config.layers` and `.experts_per_token`.
    ValueError if the answer has no routing, or not of this geometry.
    """
    meta = answer["meta_info"]
    texts = meta.get("routed_experts"), (meta.get(ROUTING_WEIGHTS) or [None])[-1]
    if None in texts:
        raise ValueError("the answer has no routing: start with --enable-return-routed-experts and ask with return_routed_experts=True")
    experts, weights = (bytearray(base64.b64decode(text)) for text in texts)
    if len(experts) != len(weights) or len(experts) % (4 * layers * top_k):
        raise ValueError(f"{len(experts)} bytes of experts and {len(weights)} of weights are not whole tokens of {layers} x {top_k} x 4")
    shape = (-1, layers, top_k)
    return torch.frombuffer(experts, dtype=torch.int32).view(shape), torch.frombuffer(weights, dtype=torch.float32).view(shape)
