"""All requests of an engine: their names, order and fresh seeds, those in progress, and the records of those that have ended."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from zoo.common.engine.request import Request, read_prompt
from zoo.common.fingerprint import Fingerprint
from zoo.common.reading import shown
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.rollouts.completion import has_nan
from zoo.common.rollouts.params import hashed_seed
from zoo.common.row_sampling import SEEDS
from zoo.common.rows import check_id, is_whole


class Requests:
    """The book of requests; whether one runs or waits is the scheduler's.

    active    in progress, by name
    finished  records that nobody has taken yet, by the order of their requests
    """

    def __init__(self, seed: int | None) -> None:
        """`seed` is where fresh seeds come from, the system's randomness by default. ValueError for one that is none."""
        if seed is not None and not (is_whole(seed) and 0 <= seed < SEEDS):
            raise ValueError(f"seed must be an integer of at least 0 and below 2^64, not {shown(seed)}")
        self.active: dict[str, Request] = {}
        self.finished: dict[int, Completion] = {}
        self._seed = secrets.randbits(64) if seed is None else int(seed)
        self._count = 0

    def made(
        self,
        prompt_ids: Any,
        params: SamplingParams | None,
        request_id: str | None,
        prompt_log_probs: bool,
        vocabulary: int,
        end_tokens: Iterable[int],
        ahead: int = 0,
    ) -> Request:
        """A request that is not in the book yet, `ahead` of others that will be before it. Its parameters name its seed and its ends.

        ValueError for a prompt that is no row of token ids, parameters that are none, ids outside the vocabulary, a name in use.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id must be text, not {shown(request_id)}")
        if not isinstance(prompt_log_probs, bool):
            raise ValueError(f"prompt_log_probs must be True or False, not {shown(prompt_log_probs)}")
        tokens = read_prompt(prompt_ids)
        for token in (*tokens, *params.stop_token_ids):
            check_id(token, vocabulary)
        order = self._count + ahead
        if request_id is None:
            request_id = str(order)
            while request_id in self.active:  # somebody chose this name
                request_id += "+"
        if request_id in self.active:
            raise ValueError(f"request id {shown(request_id)} is in use")
        if not params.ignore_eos:
            params = replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *end_tokens))))
        if params.seed is None and not params.is_greedy:
            params = replace(params, seed=hashed_seed("request", self._seed, order))
        return Request(request_id, order, len(tokens), params, prompt_log_probs, tokens)

    def enter(self, request: Request) -> None:
        self._count += 1
        self.active[request.request_id] = request

    def find(self, request_id: str) -> Request:
        """ValueError for an id that is not in progress."""
        if not isinstance(request_id, str) or request_id not in self.active:
            raise ValueError(f"no request {shown(request_id)} is in progress ({len(self.active)} are)")
        return self.active[request_id]

    def complete(self, request: Request, reason: str, fingerprint: Fingerprint) -> Completion:
        """Ends a request; the record of an aborted one goes to its caller alone."""
        record = Completion(
            request_id=request.request_id,
            prompt_ids=tuple(request.tokens[: request.prompt_length]),
            output_ids=tuple(request.output),
            log_probs=tuple(request.log_probs),
            filtered_log_probs=tuple(request.filtered_log_probs),
            prompt_log_probs=tuple(request.prompt_log_probs) if request.scores_prompt else None,
            sampling=request.params,
            versions=tuple(request.versions),
            exact=request.exact and not has_nan(request.log_probs, request.filtered_log_probs, request.prompt_log_probs),
            finish_reason=reason,
            fingerprint=fingerprint,
            text=request.text(),
            top_ids=tuple(request.top_ids) if request.top else None,
            top_log_probs=tuple(request.top_log_probs) if request.top else None,
        )
        if reason != "abort":
            self.finished[request.order] = record
        request.ended = True
        del self.active[request.request_id]
        return record

    def taken(self) -> list[Completion]:
        """The records that nobody has taken yet, in the order in which they ended."""
        finished = list(self.finished.values())
        self.finished = {}
        return finished

    def taken_of(self, requests: Iterable[Request]) -> list[Completion]:
        """The records of some requests, in their order."""
        records = [self.finished[request.order] for request in requests]
        for request in requests:
            del self.finished[request.order]
        return records

    def rewind(self, dropped: Iterable[Request]) -> None:
        """Without `dropped`, all requests as they were before what broke off, those whose record was made ended; it may run again."""
        for request in dropped:
            self.finished.pop(request.order, None)
            if self.active.get(request.request_id) is request:
                del self.active[request.request_id]
        for request in list(self.active.values()):
            if request.order in self.finished:
                request.ended = True
                del self.active[request.request_id]
            else:
                request.rewind()
