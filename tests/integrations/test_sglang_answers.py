"""What a client takes of a server: answers become records, routing becomes tensors, and everything else a sentence."""

from __future__ import annotations

import base64
import dataclasses
import math
import socket
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from zoo.common.fingerprint import Fingerprint
from zoo.common.rollouts import Completion, SamplingParams, seed_of_sample
from zoo.sglang_plugin import FILTERED, REQUEST, ROUTING_WEIGHTS, WEIGHTS, client, fingerprint, names, record, routing
from zoo.sglang_plugin.requests import prompt_digest

PRINTED = Fingerprint({"program": "aligned/1"}, "ffff0123456789", {}, {})
PROMPT = [1, 2, 3]


def answered(output_ids: Sequence[int] = (9, 8), prompt: Sequence[int] = PROMPT, seed: int = 5, **changed: Any) -> dict[str, Any]:
    """An answer as SGLang gives it, with fields of its meta_info changed."""
    meta = {
        "id": "abc",
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [(-0.5, 9, None), (-0.25, 8, None)],
        FILTERED: [-0.125, 0.0],
        WEIGHTS: ["ffff0123"] * 2,
        REQUEST: [None, {"prompt": prompt_digest(prompt), "seed": seed}],
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "input_token_logprobs": [(None, 1, None), (-3.0, 2, None), (-4.0, 3, None)],
    }
    return {"output_ids": list(output_ids), "meta_info": meta | changed}


def test_record_of_an_answer() -> None:
    made = record(answered(), PROMPT, {"temperature": 0.5}, PRINTED)
    assert made.output_ids == (9, 8) and made.log_probs == (-0.5, -0.25) and made.filtered_log_probs == (-0.125, 0.0)
    assert made.prompt_log_probs == (-3.0, -4.0) and made.finish_reason == "length"
    assert made.sampling == SamplingParams(temperature=0.5, seed=5) and made.versions == ("ffff0123456789",) * 4
    assert record(answered(input_token_logprobs=[]), PROMPT, {}, PRINTED).prompt_log_probs is None
    assert record(answered(), np.array(PROMPT), {}, PRINTED).prompt_ids == (1, 2, 3)
    assert Completion.from_dict(made.to_dict()) == made
    with pytest.raises(ValueError, match="1 filtered log-probabilities for 2 output tokens"):
        record(answered(**{FILTERED: [0.0]}), PROMPT, {}, PRINTED)
    with pytest.raises(ValueError, match="ask for them with return_logprob"):
        record({"meta_info": {"id": "x"}}, [1], {}, PRINTED)
    for name in (FILTERED, WEIGHTS, REQUEST):
        other = answered()
        del other["meta_info"][name]
        with pytest.raises(ValueError, match=f"has no {name}: its server runs another backend, or a plugin of another version"):
            record(other, PROMPT, {}, PRINTED)
    with pytest.raises(ValueError, match="weights changed under answer abc"):
        record(answered(**{WEIGHTS: ["ffff0123", None]}), PROMPT, {}, PRINTED)


def test_a_record_says_when_its_request_was_to_end() -> None:
    """SGLang's defaults where nothing was sent; of what was sent, everything that the record's reader checks."""
    sent = {"max_new_tokens": 2, "stop_token_ids": [7, 4]}
    made = record(answered(), PROMPT, sent, PRINTED)
    assert (made.sampling.max_new_tokens, made.sampling.stop_token_ids, made.sampling.ignore_eos) == (2, (7, 4), False)
    through = record(answered(), PROMPT, {**sent, "ignore_eos": True}, PRINTED)  # SGLang then passes over those that were sent too
    assert (through.sampling.stop_token_ids, through.sampling.ignore_eos) == ((), True)
    assert [record(answered(), PROMPT, s, PRINTED).sampling.max_new_tokens for s in ({}, {"max_new_tokens": None})] == [128, 1 << 30]


def test_a_record_names_the_token_that_ended_it() -> None:
    """The model's own end tokens were not sent; a stop string is no token."""
    last = record(answered(), PROMPT, {}, PRINTED).output_ids[-1]
    ended = record(answered(finish_reason={"type": "stop", "matched": last}), PROMPT, {"stop_token_ids": [4]}, PRINTED)
    assert ended.finish_reason == "stop" and ended.sampling.stop_token_ids == (4, last)
    assert Completion.from_dict(ended.to_dict()) == ended
    text = record(answered(finish_reason={"type": "stop", "matched": "</answer>"}), PROMPT, {}, PRINTED)
    assert text.finish_reason == "text" and Completion.from_dict(text.to_dict()) == text
    with pytest.raises(ValueError, match=f"answer abc was ended by token {last + 1}, its last one is {last}"):
        record(answered(finish_reason={"type": "stop", "matched": last + 1}), PROMPT, {}, PRINTED)


@pytest.mark.parametrize(
    ("changed", "prompt", "sampling", "message"),
    [
        ({"prompt_tokens": 4}, [1, 2, 3], {}, "^answer abc is of 4 prompt tokens, the prompt given has 3$"),
        ({}, [1, 2], {}, "is of 3 prompt tokens, the prompt given has 2"),
        ({"finish_reason": None}, [1, 2, 3], {"max_new_tokens": 9}, "^answer abc is not finished: 2 of up to 9 tokens so far$"),
        ({"finish_reason": None}, [1, 2, 3], {}, "2 of up to 128 tokens so far"),
        ({"completion_tokens": 3}, [1, 2, 3], {}, "^2 log-probabilities for 3 output tokens$"),
        ({"output_token_logprobs": [(-0.25, 8, None)]}, [1, 2, 3], {}, "^1 log-probabilities for 2 output tokens$"),
        ({WEIGHTS: ["ffff0123"]}, [1, 2, 3], {}, "^1 weights for 2 output tokens$"),
        ({WEIGHTS: ["eeee0123"] * 2}, [1, 2, 3], {}, "^answer abc was drawn by weights eeee0123, the fingerprint is of ffff0123$"),
        ({WEIGHTS: ["ffff0123", "eeee0123"]}, [1, 2, 3], {}, "drawn by weights eeee0123, the fingerprint is of ffff0123"),
    ],
)
def test_record_refuses_an_answer_of_another_prompt_or_other_weights(
    changed: dict[str, Any], prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        record(answered(**changed), prompt, sampling, PRINTED)


@pytest.mark.parametrize("scored", [[], [(-0.5, 9, None)]])
def test_record_of_a_scored_prompt_says_that_nothing_was_drawn(scored: list[Any]) -> None:
    """A batch with other requests in it gives a log-probability too, of a token that is not returned."""
    changed = {"output_token_logprobs": scored, "completion_tokens": 0, FILTERED: [], WEIGHTS: ["ffff0123"]}
    with pytest.raises(ValueError, match=f"^answer abc has 0 output tokens: nothing was drawn, {WEIGHTS} names what scored its 3$"):
        record(answered(**changed), PROMPT, {}, PRINTED)


def test_record_refuses_ids_other_than_those_beside_the_log_probabilities() -> None:
    for ids in ((9, 7), (9,), (9, 8, 8)):
        with pytest.raises(ValueError, match=r"has the output ids \[9.*, its log-probabilities are of \(9, 8\)"):
            record(answered(output_ids=ids), PROMPT, {}, PRINTED)


@pytest.mark.parametrize("scored", [True, False], ids=["scored prompt", "prompt without scores"])
def test_record_refuses_other_prompt_ids_of_the_same_length(scored: bool) -> None:
    changed: dict[str, Any] = {} if scored else {"input_token_logprobs": []}
    for other in ([1, 2, 4], [4, 2, 3], [3, 2, 1]):
        with pytest.raises(ValueError, match="the prompt given has"):
            record(answered(**changed), other, {}, PRINTED)
    # of a part that was scored the tokens are the prompt's last ones
    assert record(answered(input_token_logprobs=[(None, 2, None), (-4.0, 3, None)]), PROMPT, {}, PRINTED).prompt_log_probs is None
    with pytest.raises(ValueError, match=r"is to the prompt tokens \[1, 2\], the prompt given has \[2, 3\] there"):
        record(answered(input_token_logprobs=[(None, 1, None), (-4.0, 2, None)]), PROMPT, {}, PRINTED)


def test_the_vocabularys_last_id_may_come_back_as_0() -> None:
    """SGLang 0.5.17 and 0.5.23 write it so beside a prompt's log-probabilities."""
    for prompt, said in (([1, 7, 3], [1, 0, 3]), ([7, 0, 7], [0, 0, 0])):
        scores = [(-1.0 if i else None, token, None) for i, token in enumerate(said)]
        assert record(answered(prompt=prompt, input_token_logprobs=scores), prompt, {}, PRINTED).prompt_ids == tuple(prompt)
    # two different ids, or one that is not the largest
    for prompt, said in (([6, 7, 3], [0, 0, 3]), ([1, 2, 3], [1, 0, 3])):
        scores = [(-1.0 if i else None, token, None) for i, token in enumerate(said)]
        with pytest.raises(ValueError, match="is to the prompt tokens"):
            record(answered(prompt=prompt, input_token_logprobs=scores), prompt, {}, PRINTED)


@pytest.mark.parametrize("value", [None, math.nan, 0.25, -math.inf, True, "-0.5", 1e-45, -0.1, -1e39])
@pytest.mark.parametrize("column", ["output_token_logprobs", FILTERED, "input_token_logprobs"])
def test_record_refuses_what_is_no_log_probability(column: str, value: Any) -> None:
    """The last two are no FP32 numbers: a record would change them in silence."""
    given = answered()["meta_info"][column]
    given = [*given[:-1], value if column == FILTERED else (value, *given[-1][1:])]
    with pytest.raises(ValueError, match=f"{column} holds "):
        record(answered(**{column: given}), PROMPT, {}, PRINTED)


def test_record_takes_each_samples_own_seed() -> None:
    sent = {"sampling_seed": 11, "n": 3}
    for index in range(3):
        seed = seed_of_sample(11, index)
        assert record(answered(seed=seed), PROMPT, sent, PRINTED).sampling.seed == seed
    assert record(answered(seed=123), PROMPT, {"n": 3}, PRINTED).sampling.seed == 123
    for asked in (sent, {"sampling_seed": 11}):
        with pytest.raises(
            ValueError, match=f"drawn by seed {seed_of_sample(11, 3)}, asked for were {asked.get('n', 1)} samples of seed 11"
        ):
            record(answered(seed=seed_of_sample(11, 3)), PROMPT, asked, PRINTED)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([answered()], "one dictionary with meta_info, not a list"),
        (None, "one dictionary with meta_info, not a NoneType"),
        ({"error": {"message": "token id 9 is outside"}}, "has no meta_info.*token id 9 is outside"),
        ({"meta_info": []}, "has no meta_info"),
        (answered(id=7), "answer's id is 7, it must be a str"),
        (answered(completion_tokens="2"), "completion_tokens is '2', it must be a number of tokens"),
        (answered(prompt_tokens=None), "prompt_tokens is None, it must be a number of tokens"),
        (answered(finish_reason={"type": "sleep"}), "finish_reason 'sleep' is not one of stop, length, text, abort"),
        (answered(finish_reason=[]), "finish_reason"),
        (answered(output_token_logprobs=[-0.5, -0.25]), "it must hold a log-probability with its token id"),
        (answered(output_token_logprobs=7), "output_token_logprobs is 7, it must be a list"),
        (answered(output_token_logprobs=[(-0.5, "9", None), (-0.25, 8, None)]), "a token id must be an integer"),
        (answered(**{WEIGHTS: [5, 5]}), f"{WEIGHTS} holds 5, it must name weights"),
        (answered(**{REQUEST: [None, None]}), f"{REQUEST} ends with None"),
        (answered(**{REQUEST: []}), f"{REQUEST} ends with None"),
        (answered(input_token_logprobs=[(None, 1, None)] * 4), "scores 4 prompt tokens, the prompt given has 3"),
    ],
)
def test_record_refuses_what_is_no_answer(answer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(answer, PROMPT, {}, PRINTED)


def test_record_refuses_what_is_no_prompt_and_more_tokens_than_were_asked_for() -> None:
    for prompt in (None, "abc", [1.5, 2, 3], [1, -2, 3]):
        with pytest.raises(ValueError, match="prompt_ids must be a sequence|a token id must be an integer"):
            record(answered(), prompt, {}, PRINTED)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling is the dictionary that was sent, not a list"):
        record(answered(), PROMPT, [{}], PRINTED)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="answer abc has 2 output tokens, at most 1 were asked for"):
        record(answered(), PROMPT, {"max_new_tokens": 1}, PRINTED)


LAYERS = 2
TOP_K = 3
TOKENS = 10


def routed(**changed: Any) -> dict[str, Any]:
    """The routing of 6 prompt and 5 drawn tokens, the last of which has none."""
    experts = torch.arange(TOKENS * LAYERS * TOP_K, dtype=torch.int32).view(TOKENS, LAYERS, TOP_K)
    weights = torch.full((TOKENS, LAYERS, TOP_K), 0.25)
    experts, weights = (changed.pop(name, made) for name, made in (("experts", experts), ("weights", weights)))
    texts = [base64.b64encode(t.contiguous().numpy().tobytes()).decode() for t in (experts, weights)]
    meta = {"routed_experts": texts[0], ROUTING_WEIGHTS: [None, texts[1]], "prompt_tokens": 6, "completion_tokens": 5}
    return {"meta_info": meta | changed}


def test_routing_of_an_answer() -> None:
    experts, weights = routing(routed(), LAYERS, TOP_K, experts=60)
    assert experts.shape == weights.shape == (TOKENS, LAYERS, TOP_K) and experts.flatten().tolist() == list(range(60))
    assert routing(routed(experts=experts[4:], weights=weights[4:]), LAYERS, TOP_K, start=4)[0].equal(experts[4:])
    none = routing(routed(experts=experts[:0], weights=weights[:0]), LAYERS, TOP_K, start=10)
    assert [t.shape for t in none] == [(0, LAYERS, TOP_K)] * 2
    # weights of a token that underflow, but for the largest
    small = weights.clone()
    small[..., 1:] = 0
    assert routing(routed(weights=small), LAYERS, TOP_K)[1].equal(small)


@pytest.mark.parametrize("rows", [7, 13])
def test_routing_of_other_rows_than_are_due_is_refused(rows: int) -> None:
    experts = torch.arange(rows * LAYERS * TOP_K, dtype=torch.int32).view(rows, LAYERS, TOP_K)
    with pytest.raises(ValueError, match=f"has routing of {rows} tokens of 2 x 3, 10 are due: 6 of the prompt and 5 drawn"):
        routing(routed(experts=experts, weights=torch.ones(experts.shape)), LAYERS, TOP_K)
    with pytest.raises(ValueError, match="has routing of 10 tokens of 2 x 3, 6 are due: .* from token 4 on"):
        routing(routed(), LAYERS, TOP_K, start=4)


def test_routing_that_no_router_gives_is_refused() -> None:
    good, weights = routing(routed(), LAYERS, TOP_K)

    def changed(of: torch.Tensor, value: float) -> torch.Tensor:
        other = of.clone()
        other[4, 1, 2] = value
        return other

    for value in (-1, 60):
        with pytest.raises(ValueError, match=f"token 4 goes to expert {value} in layer 1, there are 0 .. 59"):
            routing(routed(experts=changed(good, value)), LAYERS, TOP_K, experts=60)
    with pytest.raises(ValueError, match="token 4 goes to expert 27 twice in layer 1"):
        routing(routed(experts=changed(good, 27)), LAYERS, TOP_K)
    with pytest.raises(ValueError, match="token 0 goes to expert 0 twice in layer 0"):
        routing(routed(experts=torch.zeros_like(good)), LAYERS, TOP_K)
    for value in (math.nan, math.inf, -0.25):
        with pytest.raises(ValueError, match=f"token 4 has the routing weight {value} in slot 2 of layer 1"):
            routing(routed(weights=changed(weights, value)), LAYERS, TOP_K)
    with pytest.raises(ValueError, match="token 0 has 3 routing weights in layer 0, and all are 0"):
        routing(routed(weights=torch.zeros_like(weights)), LAYERS, TOP_K)
    # other counts of as many bytes a token look alike: nobody but the model can tell them
    for layers, top_k, message in (
        (3, 3, "are not whole tokens of 3 x 3 x 4"),
        (1, 3, "20 tokens of 1 x 3, 10 are due"),
        (4, 3, "5 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            routing(routed(), layers, top_k)


@pytest.mark.parametrize(
    "changed",
    [
        {"routed_experts": 7},
        {"routed_experts": "%%%"},
        {ROUTING_WEIGHTS: [None, [1.0]]},
        {"prompt_tokens": None},
        {"completion_tokens": -1},
    ],
)
def test_routing_refuses_what_is_no_routing(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        routing(routed(**changed), LAYERS, TOP_K)
    for answer in (None, [], {"error": "x"}):
        with pytest.raises(ValueError, match="meta_info"):
            routing(answer, LAYERS, TOP_K)  # type: ignore[arg-type]


def test_stand_in_fingerprint_of_an_engine() -> None:
    def engine(*states: Any) -> Any:
        return types.SimpleNamespace(get_server_info=lambda: {"internal_states": [*states]})

    mine = {names.STATE: {"fingerprint": PRINTED.to_dict()}}
    assert fingerprint(engine(mine, mine)) == PRINTED
    with pytest.raises(ValueError, match="no SGLang server answers at 'http://127.0.0.1:1': .*refused"):
        fingerprint("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="is its address or an sglang.Engine, not object"):
        fingerprint(object())
    with pytest.raises(ValueError, match="does not run the zoo's backend"):
        fingerprint(engine({"tp_size": 1}))
    with pytest.raises(ValueError, match="weights are released"):
        fingerprint(engine({names.STATE: {"fingerprint": None}}))
    other = {names.STATE: {"fingerprint": dataclasses.replace(PRINTED, weights="0000").to_dict()}}
    with pytest.raises(ValueError, match="weights: ffff0123456789 against 0000"):
        client.fingerprint(engine(mine, other))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (None, "this is no SGLang server"),
        ([], "this is no SGLang server"),
        ({}, "this is no SGLang server"),
        ({"internal_states": None}, "this is no SGLang server"),
        ({"internal_states": {"zoo": 1}}, "this is no SGLang server"),
        ({"internal_states": [7]}, "this is no SGLang server"),
        ({"internal_states": []}, "does not run the zoo's backend"),
        ({"internal_states": [{names.STATE: 7}]}, "plugin is of another version"),
        ({"internal_states": [{names.STATE: {}}]}, "plugin is of another version"),
        ({"internal_states": [{names.STATE: {"fingerprint": 7}}]}, "plugin is of another version"),
        ({"internal_states": [{names.STATE: {"fingerprint": {"weights": "0"}}}]}, "fingerprint has the fields"),
    ],
)
def test_stand_in_an_engine_that_says_something_else_is_none(info: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fingerprint(types.SimpleNamespace(get_server_info=lambda: info))


def test_stand_in_an_engine_that_ended_is_none() -> None:
    def ended() -> Any:
        raise EOFError

    with pytest.raises(ValueError, match="engine does not say what it runs: EOFError"):
        fingerprint(types.SimpleNamespace(get_server_info=ended))


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a socket whose first connection `serve` gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def once() -> None:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                serve(connection)
        except OSError:
            pass  # the client went away first

    thread = threading.Thread(target=once, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        thread.join(timeout=10)


def ok(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01\x00\x05",
        b"HTTP/1.1 nothing\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        ok(b"<html>"),
        ok(b"\xff\xfe\xff"),
        ok(b"[" * 100_000),
        ok(b"null"),
        ok(b"{}", length=100),
        ok(b"[]"),
        ok(b'"zoo"'),
        ok(b'{"internal_states": {}}'),
    ],
    ids=lambda said: repr(said[:24]),
)
def test_a_server_that_is_none_is_a_sentence(said: bytes) -> None:
    with listening(lambda connection: connection.sendall(said)) as address, pytest.raises(ValueError) as caught:
        fingerprint(address)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_server_that_never_ends_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, a byte now and then, and bytes without end."""
    gone = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(ok(b"", length=1 << 40))
        while not gone.wait(0.05):
            connection.sendall(b" ")

    def flood(connection: socket.socket) -> None:
        connection.sendall(ok(b"", length=1 << 40))
        while not gone.is_set():
            connection.sendall(b" " * 65536)

    monkeypatch.setattr(client, "PATIENCE", 0.3)
    monkeypatch.setattr(client, "LARGEST", 1 << 20)
    for serve, message in ((lambda connection: gone.wait(5), "timed out"), (drip, "and no end"), (flood, "more than 1048576 bytes")):
        gone.clear()
        with listening(serve) as address, pytest.raises(ValueError, match=message):
            fingerprint(address)
        gone.set()


@pytest.mark.parametrize(
    "address", ["", "localhost:30000", "file:///etc", "http://", "http://a b:1", "http://127.0.0.1:port", "http://[::1"]
)
def test_an_address_that_is_none_is_a_sentence(address: str) -> None:
    with pytest.raises(ValueError, match="no SGLang server answers|starts with http"):
        fingerprint(address)
