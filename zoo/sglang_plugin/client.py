"""For trainers and clients: whose numbers are these, and a record that says everything that a trainer needs."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException
from typing import Any

from torch import Tensor

from zoo.common.fingerprint import Fingerprint
from zoo.common.rollouts import Completion
from zoo.sglang_plugin.answers import read_answer, read_routing, token_ids
from zoo.sglang_plugin.names import STATE, WEIGHTS_DIGITS
from zoo.sglang_plugin.requests import ending, sampling_params

PATIENCE = 60.0  # seconds for a server to say what it runs, and for each of its bytes
LARGEST = 1 << 26  # bytes of that at most: SGLang's own are some 100 KiB
PIECE = 1 << 16


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
    does again if it asks for it; compilations, the kernel variants that were compiled since it takes requests.

    ValueError if nothing answers there, or it does not run the plugin.
    """
    info = _server_info(server)
    given = info.get("internal_states") if isinstance(info, dict) else None
    if not isinstance(given, list | tuple) or not all(isinstance(state, dict) for state in given):
        raise ValueError(f"this is no SGLang server: it says nothing of its schedulers, but {info!r:.120}")
    said = [state.get(STATE) for state in given]
    if not said or None in said:
        raise ValueError("this server does not run the zoo's backend: start it with --attention-backend zoo")
    for state in said:
        if not isinstance(state, dict) or not isinstance(state.get("fingerprint", ()), dict | None):
            raise ValueError(f"the server's plugin is of another version than this client: it says {state!r:.120} of itself")
    return [dict(state) for state in said]


def _server_info(server: Any) -> Any:
    if not isinstance(server, str):
        if not hasattr(server, "get_server_info"):
            raise ValueError(f"a server is its address or an sglang.Engine, not {type(server).__name__}")
        try:
            return server.get_server_info()
        except Exception as error:
            raise ValueError(f"the engine does not say what it runs: {first_words(error)}") from error
    if not server.startswith(("http://", "https://")):
        raise ValueError(f"a server's address starts with http:// or https://, not {server!r:.80}")
    try:
        with urllib.request.urlopen(server.rstrip("/") + "/server_info", timeout=PATIENCE) as answer:
            return json.loads(_body(answer))
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise ValueError(f"no SGLang server answers at {server!r:.80}: {first_words(error)}") from error


def first_words(error: Exception, body: bytes = b"") -> str:
    """What an error says, or the answer that came with it, on one line that a terminal can show: a stranger may have written it."""
    said = (body.decode(errors="replace") or str(error))[:200] or type(error).__name__
    return said if said.isprintable() else repr(said)


def _body(answer: Any) -> bytes:
    """All of a body, in bounds: a socket's own timeout starts anew with each byte."""
    deadline = time.monotonic() + PATIENCE
    pieces = []
    size = 0
    while piece := answer.read1(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{size} bytes in {PATIENCE:g} s and no end")
    return b"".join(pieces)


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

    Its seed is the one that the server says: of several samples each has its own. ValueError if the answer has no log-probabilities
    or output tokens, is not finished, is to another prompt, comes from a server without this plugin's fields, has rows of two weights
    (updated while it was paused, or over a cache that was not flushed), or of others than `printed` names; if its ids, log-probabilities
    or counts contradict each other or are no such thing; and for what is no answer of SGLang's at all.
    """
    if not isinstance(sampling, dict):
        raise ValueError(f"sampling is the dictionary that was sent, not a {type(sampling).__name__}")
    ids = token_ids(prompt_ids)
    found = read_answer(answer, ids, sampling)
    if None in found.drawn_by:
        raise ValueError(
            f"the weights changed under answer {found.request_id}, or under the cache that it read: update between requests and flush "
            "the cache"
        )
    mine = printed.weights[:WEIGHTS_DIGITS]
    for other in set(found.drawn_by) - {mine}:
        raise ValueError(f"answer {found.request_id} was drawn by weights {other}, the fingerprint is of {mine}")
    return Completion(
        request_id=found.request_id,
        prompt_ids=ids,
        output_ids=found.output_ids,
        log_probs=found.log_probs,
        filtered_log_probs=found.filtered_log_probs,
        prompt_log_probs=found.prompt_log_probs,
        sampling=replace(sampling_params(sampling, found.seed), seed=found.seed, **ending(sampling, found.ended_by)),
        versions=(printed.weights,) * (len(ids) + len(found.output_ids) - 1),
        exact=True,
        finish_reason=found.finish_reason,
        fingerprint=printed,
    )


def routing(answer: dict[str, Any], layers: int, top_k: int, experts: int | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
    """(experts int32, weights FP32), [tokens, layers, top_k] each, of an answer asked with return_routed_experts.

    Entry k is slot k, the order in which a token's experts are added. Tokens: from `start` (the `routed_experts_start_len` that was
    sent) to the last but one, since the last drawn token has not run. layers, top_k, experts: of the model, `config.layers`,
    `.experts_per_token` and `.experts`.
    ValueError if the answer has no routing, of other counts, with an expert that there isn't or twice for a token, or with weights that
    no router gives.
    """
    return read_routing(answer, layers, top_k, experts, start)
