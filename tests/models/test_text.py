"""Text and chats in, text out, stop strings, tokens as they are drawn, the most likely tokens: none of them moves a byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.engine.text import Increments, Texts
from zoo.common.generate import generate_command
from zoo.common.ops.sample import sample
from zoo.common.rollouts import Completion, SamplingParams
from zoo.qwen3 import Qwen3ForServing
from zoo.testing import assert_same_bytes

PARAMS = SamplingParams(seed=5, max_new_tokens=12, ignore_eos=True, temperature=1.3)
CHAT = [{"role": "user", "content": "Guess the word"}]
TEXT = "The trainer and the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3", layers=1)


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine(zoo.load(folder, role="serving", device="cpu"), pages=24, page_size=16)


def numbers(record: Completion) -> tuple[Any, ...]:
    return record.output_ids, record.log_probs, record.filtered_log_probs, record.sampling


def test_a_text_and_a_chat_are_their_token_ids(engine: Engine, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat_ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    for prompt, ids in ((TEXT, tokenizer(TEXT)["input_ids"]), (CHAT, chat_ids)):
        [said] = engine.generate(prompt, PARAMS)
        [plain] = engine.generate([ids], PARAMS)
        assert said.prompt_ids == tuple(ids) and numbers(said) == numbers(plain)
        assert said.text == tokenizer.decode(said.output_ids, skip_special_tokens=True) and plain.text is None
        assert Completion.from_dict(json.loads(json.dumps(said.to_dict()))) == said
    several = engine.generate([TEXT, CHAT, [5, 6]], PARAMS, n=2)
    assert [record.text is None for record in several] == [False] * 4 + [True] * 2
    assert engine.add(TEXT, PARAMS) and engine.run()[0].text == several[0].text


def test_a_stop_string_ends_a_request_where_it_is_complete(engine: Engine) -> None:
    [whole] = engine.generate(TEXT, PARAMS)
    assert whole.text is not None
    mark = next(text for text in (whole.text[i : i + 3] for i in range(4, len(whole.text))) if "\ufffd" not in text and len(text) == 3)
    [cut] = engine.generate([list(whole.prompt_ids)], replace(PARAMS, stop=(mark, "never said")))
    count = len(cut.output_ids)
    assert cut.finish_reason == "text" and count < 12 and cut.text == whole.text[: whole.text.index(mark)]
    assert cut.output_ids == whole.output_ids[:count] and cut.log_probs == whole.log_probs[:count]
    without_last = engine.texts.decode(cut.output_ids[:-1])
    assert mark not in without_last and mark in engine.texts.decode(cut.output_ids)
    assert Completion.from_dict(cut.to_dict()) == cut and cut.sampling.stop == (mark, "never said")
    assert engine.generate([list(whole.prompt_ids)], replace(PARAMS, stop="never said"))[0].finish_reason == "length"


def test_a_broken_step_draws_the_stop_string_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    [whole] = engine.generate(TEXT, PARAMS)
    assert whole.text is not None
    params = replace(PARAMS, stop=whole.text[5:8])
    expected = engine.generate(TEXT, params)
    complete = engine.requests.complete
    broken: list[int] = []

    def fails(*given: Any) -> Completion:
        if not broken:
            broken.append(1)
            raise KeyboardInterrupt
        return complete(*given)

    monkeypatch.setattr(engine.requests, "complete", fails)
    engine.add(TEXT, params)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert numbers(engine.run()[0]) == numbers(expected[0])


def test_a_stream_says_what_generate_returns(engine: Engine) -> None:
    prompts = [TEXT, [5, 6, 7]]
    expected = engine.generate(prompts, PARAMS, n=2, top_log_probs=2)
    heard = list(engine.stream(prompts, PARAMS, n=2, top_log_probs=2))
    assert not engine.busy and not engine.requests.finished
    assert [token.prompt for token in heard[:4]] == [0, 0, 1, 1]  # as they are drawn, not one request after the other
    for place, record in enumerate(expected):
        mine = [token for token in heard if (token.prompt, token.sample) == divmod(place, 2)]
        assert [token.index for token in mine] == list(range(12)) and tuple(token.token for token in mine) == record.output_ids
        assert tuple(token.log_prob for token in mine) == record.log_probs
        assert tuple(token.filtered_log_prob for token in mine) == record.filtered_log_probs
        assert mine[-1].completion is not None and numbers(mine[-1].completion) == numbers(record)
        assert all(token.completion is None for token in mine[:-1])
        if record.text is not None:
            assert "".join(token.text or "" for token in mine) == record.text


def test_who_stops_listening_drops_the_rest_and_others_go_on(engine: Engine) -> None:
    other = engine.add([5, 6, 7], PARAMS)
    stream = engine.stream([TEXT], PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert list(engine.requests.active) == [other]
    assert [record.request_id for record in engine.run()] == [other]
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(engine.stream([[]], PARAMS))
    assert not engine.busy


def test_a_character_is_said_when_it_is_complete(folder: Path) -> None:
    texts = Texts(folder)
    text = "né 😀 word"
    ids = texts.tokenizer.encode(text).ids
    said = Increments(texts)
    pieces = [said.next(ids[: i + 1]) for i in range(len(ids))]
    assert "".join(pieces) == text and "" in pieces and not any("\ufffd" in piece for piece in pieces)
    held = Increments(texts)
    cut = next(i for i in range(len(ids)) if texts.decode(ids[: i + 1]).endswith("\ufffd")) + 1
    assert "\ufffd" in "".join(held.next(ids[: i + 1], last=i == cut - 1) for i in range(cut))


def test_top_log_probs_are_the_trainer_s(engine: Engine, folder: Path) -> None:
    trainer = zoo.load(folder, role="rl", device="cpu")
    params = [PARAMS, replace(PARAMS, temperature=0.7, top_p=0.9), SamplingParams(temperature=0.0, max_new_tokens=4)]
    prompts = [[5, 6, 7], [8, 9], [10, 11]]
    records = engine.generate(prompts, params, top_log_probs=3)
    for record, plain in zip(records, engine.generate(prompts, params), strict=True):
        assert numbers(record) == numbers(plain) and plain.top_ids is None and plain.top_log_probs is None
        ids = [*record.prompt_ids, *record.output_ids]
        scores = trainer.score(ids, [0, len(ids)], sampling=record.sampling, top_k=3)
        rows = slice(len(record.prompt_ids) - 1, len(ids) - 1)
        assert record.top_ids is not None and record.top_log_probs is not None
        assert torch.tensor(record.top_ids).equal(scores.top_ids_RK[rows])
        assert_same_bytes(torch.tensor(record.top_log_probs), scores.top_log_prob_RK[rows].contiguous())
        assert Completion.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert records[2].top_ids is not None and [row[0] for row in records[2].top_ids] == list(records[2].output_ids)  # greedy
    beside = engine.generate([[5, 6, 7]], PARAMS, top_log_probs=5)[0]
    assert beside.top_ids is not None and [row[:3] for row in beside.top_ids] == list(records[0].top_ids or ())


BAD: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "a message without content": (lambda e: e.generate([[{"role": "user"}]]), "a chat holds messages with role and content, not"),
    "half a character": (lambda e: e.generate("\ud800"), "a prompt must be text in valid UTF-8"),
    "a chat of numbers": (lambda e: e.generate([[{"role": "user", "content": 5}]]), "a message's content must be text"),
    "an empty stop string": (lambda e: e.generate([[5]], SamplingParams(stop=("",))), "stop must hold texts of at least one character"),
    "a number to stop at": (lambda e: e.generate([[5]], SamplingParams(stop=5)), "stop must be a text or several, not 5"),  # type: ignore[arg-type]
    "too many of the likeliest": (lambda e: e.generate([[5]], top_log_probs=513), "between 0 and the vocabulary of 512, not 513"),
    "a fraction of them": (lambda e: e.generate([[5]], top_log_probs=1.5), "top_log_probs must be between 0 and"),
    "no prompts": (lambda e: e.generate(5), "prompts must be a sequence of prompts, token ids or text each, not 5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_text_is_refused_and_nothing_queued(engine: Engine, name: str) -> None:
    call, sentence = BAD[name]
    with pytest.raises(ValueError, match=sentence):
        call(engine)
    assert not engine.busy


def test_without_a_tokenizer_text_is_refused_in_a_sentence(folder: Path) -> None:
    model = Qwen3ForServing.from_config(zoo.load(folder, device="cpu").config, device="cpu")
    bare = Engine(model, pages=8)
    for call in (lambda: bare.generate(TEXT), lambda: bare.generate([[5]], SamplingParams(stop=("a",)))):
        with pytest.raises(ValueError, match=r"was not loaded from a folder: give token ids, or Engine\(tokenizer=FOLDER\)"):
            call()
    assert not bare.busy and bare.generate([[5]], PARAMS)[0].text is None
    assert Engine(model, pages=8, tokenizer=folder).generate(TEXT, PARAMS)[0].text is not None
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Engine(model, pages=8, tokenizer=folder.parent).generate(TEXT)


def test_the_likeliest_are_asked_of_the_logits_that_draw(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no second product with the vocabulary."""
    drawn: list[int] = []
    runner = __import__("zoo.common.engine.runner", fromlist=["sample"])

    def counted(logits: torch.Tensor, *others: Any) -> Any:
        drawn.append(len(logits))
        return sample(logits, *others)

    products = []
    logits = Qwen3ForServing.logits
    monkeypatch.setattr(runner, "sample", counted)
    monkeypatch.setattr(Qwen3ForServing, "logits", lambda self, *given: products.append(1) or logits(self, *given))
    engine.generate([[5, 6]], PARAMS, top_log_probs=4)
    assert len(products) == len(drawn) == 12


def test_generate_stops_at_a_text(folder: Path) -> None:
    [whole] = generate_command(folder, TEXT, 12, seed=5, temperature=1.3, ignore_eos=True, device="cpu")
    mark = whole.text[4:7]
    [cut] = generate_command(folder, TEXT, 12, seed=5, temperature=1.3, ignore_eos=True, stop=[mark], device="cpu")
    assert cut.text == whole.text[: whole.text.index(mark)] and cut.completion.finish_reason == "text"
