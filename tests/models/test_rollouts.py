"""Records of rollouts: whose weights drew them, what a reader refuses, which seeds they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import QWEN3, REQUESTS, STEM, baseline, scored, serving, tokens, twins
from transformers import BatchEncoding

from zoo.common.engine import Engine
from zoo.common.engine.request import Request
from zoo.common.engine.runner import Runner
from zoo.common.engine.scheduler import Scheduler
from zoo.common.fingerprint import Fingerprint
from zoo.common.rollouts import Completion, SamplingParams, check_draws, seed_of_sample

ASKED = SamplingParams(temperature=0.8, top_k=50, seed=4, max_new_tokens=6)


def engine(**options: Any) -> Engine:
    return Engine(twins("dense")[1], **{"pages": 24, "page_size": 16, **options})


def drawn(params: SamplingParams = ASKED, **options: Any) -> Completion:
    return engine(**options).generate([STEM[:9]], params)[0]


# seeds


def test_samples_without_a_seed_are_no_clones() -> None:
    """Twice in one call, again in the next call, in another engine: eight samples of one prompt, no two alike."""
    params = SamplingParams(temperature=2.0, max_new_tokens=6)
    shared = engine()
    records = shared.generate([STEM] * 2, params) + shared.generate([STEM] * 2, params) + shared.generate([STEM], params, n=2)
    records += engine().generate([STEM] * 2, params)
    assert len({record.output_ids for record in records}) == len({record.sampling.seed for record in records}) == 8
    for record in records:
        assert record.sampling.seed is not None
        again = engine().generate([STEM], record.sampling)[0]
        assert (again.output_ids, again.log_probs, again.sampling) == (record.output_ids, record.log_probs, record.sampling)
    check_draws(twins("dense")[0], *records)


def test_an_engines_seed_repeats_its_run() -> None:
    def run(seed: int | None) -> list[dict[str, Any]]:
        served = engine(seed=seed)
        records = served.generate([STEM, STEM[:5]], SamplingParams(max_new_tokens=4), n=2)
        served.add(STEM[:7], SamplingParams(max_new_tokens=3))
        return [record.to_dict() for record in records + served.run()]

    assert run(7) == run(7) == run(np.int64(7))  # type: ignore[arg-type]
    assert run(7) != run(8) and run(None) != run(None)
    for wrong in (-1, 1 << 64, 1.0, True, "7"):
        with pytest.raises(ValueError, match="seed must be an integer of at least 0 and below 2.64, not"):
            engine(seed=wrong)


def test_a_seed_and_n_give_derived_seeds() -> None:
    other = replace(ASKED, seed=5)
    records = engine().generate([STEM, STEM[:5]], [ASKED, other], n=3)
    assert [record.prompt_ids for record in records] == [tuple(STEM)] * 3 + [tuple(STEM[:5])] * 3
    assert [record.sampling.seed for record in records] == [seed_of_sample(seed, i) for seed in (4, 5) for i in range(3)]
    assert records[0].sampling.seed == 4 and records[3].sampling.seed == 5
    assert records[0].output_ids == engine().generate([STEM], ASKED)[0].output_ids
    assert len({record.output_ids for record in records}) == 6
    for wrong in (0, -2, 1.5, True, "2"):
        with pytest.raises(ValueError, match="n must be an integer of at least 1, not"):
            engine().generate([STEM], ASKED, n=wrong)  # type: ignore[arg-type]


def test_rows_without_a_seed_score_and_do_not_draw() -> None:
    """Nothing falls back to a seed of its own."""
    trainer = twins("dense")[0]
    record = drawn()
    ids = torch.tensor(record.prompt_ids + record.output_ids)
    starts = torch.tensor([0, len(ids)])
    seedless = replace(record.sampling, seed=None)
    assert torch.equal(trainer.score(ids, starts, sampling=seedless), trainer.score(ids, starts, sampling=record.sampling))
    with pytest.raises(ValueError, match=f"request '{record.request_id}' names no seed: its tokens can't be drawn again"):
        check_draws(trainer, replace(record, sampling=seedless))
    with pytest.raises(ValueError, match="sampling names no seed"):
        Completion.from_dict(replace(record, sampling=seedless).to_dict())
    greedy = drawn(SamplingParams(temperature=0.0, max_new_tokens=3))
    assert greedy.sampling.seed is None and Completion.from_dict(greedy.to_dict()) == greedy
    check_draws(trainer, greedy)


def test_numbers_may_be_numpys() -> None:
    given = SamplingParams(
        np.float32(0.5),
        np.int64(20),
        np.float64(0.75),
        np.float16(0.25),
        np.uint64(2**64 - 1),
        np.int32(5),
        np.array([3, 4]),  # type: ignore[arg-type]
    )
    plain = SamplingParams(0.5, 20, 0.75, 0.25, 2**64 - 1, 5, (3, 4))
    assert given == plain and json.dumps(given.to_dict()) == json.dumps(plain.to_dict())
    for wrong in (np.bool_(True), np.float64("nan"), np.array([1.0, 2.0])):
        with pytest.raises(ValueError, match="temperature must be a finite number, not"):
            SamplingParams(temperature=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top_k must be an integer"):
        SamplingParams(top_k=np.float64(3.0))  # type: ignore[arg-type]
    sized = Engine(twins("dense")[1], pages=np.int64(24), page_size=np.int32(16))  # type: ignore[arg-type]
    assert sized.generate([np.array(STEM[:9])], ASKED)[0].output_ids == drawn().output_ids  # type: ignore[list-item]


def test_what_a_chat_template_gives_gets_a_hint() -> None:
    encoded = BatchEncoding({"input_ids": STEM[:9], "attention_mask": [1] * 9})
    for call in (lambda: engine().add(encoded), lambda: engine().generate([encoded]), lambda: engine().generate(encoded)):
        with pytest.raises(ValueError, match=r'not a BatchEncoding: its \["input_ids"\] are the token ids'):
            call()
    assert engine().generate([encoded["input_ids"]], ASKED)[0].output_ids == drawn().output_ids
    for tensor, message in (
        (torch.zeros(3, dtype=torch.int64, device="meta"), "a prompt must be a dense tensor with data, .* not one on meta"),
        (torch.tensor([1, 2]).to_sparse(), "a prompt must be a dense tensor with data, .* not torch.sparse_coo"),
    ):
        with pytest.raises(ValueError, match=message):
            engine().add(tensor)


# whose weights


@pytest.mark.parametrize("mode", ("recompute", "keep"))
def test_a_request_that_ran_through_an_update_is_not_on_policy(mode: str) -> None:
    served = Engine(serving("dense"), pages=24, page_size=16)
    old = served.fingerprint()
    through = served.add(STEM[:9], ASKED)
    served.step()
    before = served.generate([STEM[:9]], replace(ASKED, max_new_tokens=1))[0]
    served.update_weights(QWEN3.weights("dense"), mode)
    late = served.add(STEM[:9], ASKED)
    records = {record.request_id: record for record in served.run()}
    new = served.fingerprint()
    mixed = records[through]
    after = records[late]
    assert mixed.exact == (mode == "recompute") and mixed.fingerprint == after.fingerprint == new
    assert not mixed.on_policy(new) and not mixed.on_policy(old)
    assert before.on_policy(old) and not before.on_policy(new)
    assert after.on_policy(new) and not after.on_policy(old)
    assert not after.on_policy(replace(new, program={**new.program, "vocab_group": "1"}))
    assert not replace(after, versions=after.versions[:-1]).on_policy(new)


def test_prompt_rows_pushed_again_are_of_the_weights_that_pushed_them() -> None:
    served = Engine(serving("dense"), pages=24, page_size=16)
    old = served.version
    served.add(STEM, ASKED)
    served.step()
    served.update_weights(QWEN3.weights("dense"))
    [record] = served.run()
    assert record.versions == (served.version,) * (len(STEM) - 1) + (old,) + (served.version,) * (len(record.output_ids) - 1)


def test_an_update_after_a_step_that_broke_off_names_the_weights_that_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row was pushed and marked, its token never recorded: the weights after the update draw it."""
    served = Engine(serving("dense"), pages=24, page_size=16)
    old = served.version
    served.add(STEM, ASKED)
    served.step()
    advance = Scheduler.advance

    def breaking(scheduler: Scheduler, request: Request, count: int) -> None:
        advance(scheduler, request, count)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "advance", breaking)
        with pytest.raises(KeyboardInterrupt):
            served.step()
    served.update_weights(QWEN3.weights("dense"))
    [record] = served.run()
    assert record.output_versions == (old,) + (served.version,) * (len(record.output_ids) - 1)
    alone = Engine(served.model, pages=24, page_size=16)
    prompt = [*record.prompt_ids, record.output_ids[0]]
    assert record.log_probs[1:] == alone.generate([prompt], replace(ASKED, max_new_tokens=5))[0].log_probs


class NotANumber(Runner):
    """A fault: what overflowing weights do to a row."""

    def _decode(self, requests: list[Request]) -> torch.Tensor:
        return super()._decode(requests) * torch.nan


def test_a_record_with_a_nan_is_not_exact() -> None:
    served = engine()
    served.runner = NotANumber(served.model, served.scheduler.memory, graphs=False, chunk_rows=2048)
    record = served.generate([STEM[:9]], ASKED)[0]
    assert record.log_probs[1] != record.log_probs[1]
    assert not record.exact and not record.on_policy(served.fingerprint())
    assert not Completion.from_dict(record.to_dict()).exact
    with pytest.raises(ValueError, match="exact is True and a log-probability is NaN"):
        Completion.from_dict(replace(record, exact=True).to_dict())
    assert drawn().exact


# what a reader refuses


def test_records_survive_json() -> None:
    record = engine().generate([STEM], SamplingParams(temperature=0.3, top_k=5, max_new_tokens=4), prompt_log_probs=True)[0]
    values = json.loads(json.dumps(record.to_dict()))
    assert Completion.from_dict(values) == record
    odd = replace(record, log_probs=(-0.0, float("-inf"), float("nan"), -1e-45), filtered_log_probs=(0.0,) * 4, exact=False)
    assert Completion.from_dict(odd.to_dict()).to_dict() == odd.to_dict() != replace(odd, log_probs=(0.0,) * 4).to_dict()
    for change, message in (
        ({"extra": 1}, "extra"),
        ({"log_probs": "00000000"}, "1 log_probs for 4"),
        ({"finish_reason": "x"}, "'x'"),
        ({"log_probs": "0000803f" * 4}, "log_probs holds 1.0"),
        ({"output_ids": [1.5] * 4}, "output_ids must be a list of integers of at least 0 and below 2.31, not 1.5"),
        ({"prompt_ids": ["x"] * 48}, "prompt_ids must be a list of integers"),
        ({"prompt_ids": 5}, "prompt_ids must be a list of integers"),
        ({"output_ids": [1, 2, 3, 1 << 31]}, "output_ids must be .* below 2.31, not 2147483648"),
        ({"request_id": 5}, "request_id must be text, not 5"),
        ({"exact": "no"}, "exact must be True or False, not 'no'"),
        ({"sampling": None}, "sampling must be a dictionary, not None"),
        ({"fingerprint": None}, "fingerprint must be a dictionary, not None"),
        ({"versions": [["0" * 32, 51]]}, "the last row is of 0{32}, the fingerprint of"),
        ({"versions": [[values["versions"][0][0], -3]]}, "versions must be runs"),
        ({"versions": "x"}, "versions must be runs"),
        ({"versions": [["a", 10**12]]}, "versions count 1000000000000 rows for"),
    ):
        with pytest.raises(ValueError, match=message):
            Completion.from_dict({**values, **change})


def test_records_are_drawn_again_together() -> None:
    """Packed: one of another seed is found between others, and only it."""
    trainer = twins("dense")[0]
    prompts = [STEM, STEM[:3], STEM[:17]]
    params = [SamplingParams(temperature=t, seed=7 + n, max_new_tokens=5 + n) for n, t in enumerate((0.0, 1.0, 0.7))]
    good = engine().generate(prompts, params)
    check_draws(trainer, *good)
    check_draws(trainer)
    for none in (list(good), good[0].to_dict()):
        with pytest.raises(ValueError, match=f"one argument each .*, not a {type(none).__name__}"):
            check_draws(trainer, none)
    bad = replace(good[1], sampling=replace(good[1].sampling, seed=1))
    other = replace(good[2], versions=(*good[2].versions[:-1], "0" * 32))
    with pytest.raises(ValueError, match=f"output token 6 of request '{other.request_id}' was drawn by weights 0{{32}}, this model has"):
        check_draws(trainer, good[0], other)
    with pytest.raises(ValueError, match=f"of request '{bad.request_id}' is .*drawn again it is"):
        check_draws(trainer, good[0], bad, good[2])


def test_a_record_is_drawn_again() -> None:
    trainer = twins("dense")[0]
    for values in baseline("dense"):
        record = Completion.from_dict({**values, "request_id": "0"})
        check_draws(trainer, record)
        with torch.autocast("cpu", torch.bfloat16):
            check_draws(trainer, record)
    seeded = Completion.from_dict({**baseline("dense")[0], "request_id": "0"})
    other = replace(seeded, sampling=replace(seeded.sampling, seed=99))
    assert scored(trainer, other, other.sampling) == other.filtered_log_probs  # which a score does not see
    bit = tuple(torch.nextafter(torch.tensor(seeded.log_probs), torch.tensor(-100.0)).tolist())
    swapped = (*seeded.output_ids[:-1], seeded.output_ids[-1] ^ 1)
    for wrong in (other, replace(seeded, log_probs=bit), replace(seeded, output_ids=swapped)):
        with pytest.raises(ValueError, match="output token . of request '0' is .*, drawn again it is"):
            check_draws(trainer, wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values | {"log_probs": "00 00 00" * 2}, "log_probs must be hexadecimal text of whole FP32 numbers"),
        (lambda values: values | {"log_probs": "0000000g"}, "log_probs must be hexadecimal text of whole FP32 numbers"),
        (lambda values: values | {"sampling": {}}, "sampling has lost ignore_eos, .*seed, .*temperature"),
        (lambda values: None, "a completion is a dictionary, not None"),
    ],
)
def test_a_damaged_record_is_refused_by_its_field(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    values = engine().generate([REQUESTS[5][0]], REQUESTS[5][1])[0].to_dict()
    assert Completion.from_dict(values).to_dict() == values
    with pytest.raises(ValueError, match=message):
        Completion.from_dict(change(values))


def deep() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


def in_fingerprint(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {**values, "fingerprint": {**values["fingerprint"], **changes}}


def in_sampling(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {**values, "sampling": {**values["sampling"], **changes}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_sampling(max_new_tokens=1), "6 output tokens, max_new_tokens was 1"),
        (lambda v: in_sampling(stop_token_ids=[2, v["output_ids"][2]])(v), r"output token 2 of 6 is \d+, which ends the request"),
        (lambda v: {**v, "finish_reason": "stop"}, r"finish_reason 'stop' after token \d+, which is not in stop_token_ids"),
        (lambda v: {**v, "finish_reason": "abort", "versions": []}, "0 versions for 15 tokens; all but the last have a row"),
        (
            lambda v: {**v, "output_ids": [], "log_probs": "", "filtered_log_probs": "", "versions": [[v["versions"][0][0], 8]]},
            "finish_reason 'length' without an output token",
        ),
        (in_fingerprint(program=None), "a fingerprint's program is a dictionary of text, not None"),
        (in_fingerprint(program=["a"]), r"a fingerprint's program is a dictionary of text, not \['a'\]"),
        (in_fingerprint(program={"a": 1}), "a fingerprint's program is a dictionary of text, not {'a': 1}"),
        (in_fingerprint(toolchain={3: "a"}), "a fingerprint's toolchain is a dictionary of text, not {3: 'a'}"),
        (in_fingerprint(realisation={"a": deep()}), "a fingerprint's realisation is a dictionary of text, not"),
        (in_fingerprint(weights=5), "a fingerprint's weights are text, not 5"),
        (lambda v: {**v, "fingerprint": {**v["fingerprint"], 5: 6}}, "a fingerprint has the fields .*, this one .*, 5$"),
        (lambda v: {**v, "fingerprint": deep()}, "fingerprint must be a dictionary, not"),
        (lambda v: {**v, 5: 6}, "a completion has the fields .*, this one .*5"),
        (lambda v: deep(), "a completion is a dictionary, not"),
        (lambda v: {**v, "output_ids": deep()}, "output_ids must be a list of integers"),
        (lambda v: {**v, "versions": deep()}, "versions must be runs"),
        (lambda v: {**v, "finish_reason": deep()}, "finish_reason .* is not one of stop, length, text, abort"),
        (lambda v: {**v, "sampling": {**v["sampling"], 7: 1}}, "SamplingParams has no 7"),
        (in_sampling(stop_token_ids=deep()), "stop_token_ids must be integers of at least 0, not"),
        (in_sampling(temperature=deep()), "temperature must be a finite number, not"),
        (in_sampling(seed=None), "sampling names no seed"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    values = drawn().to_dict()
    assert Completion.from_dict(json.loads(json.dumps(values))).to_dict() == values
    with pytest.raises(ValueError, match=message) as caught:
        Completion.from_dict(change(values))
    assert len(str(caught.value)) < 1000


def test_a_fingerprint_that_is_none_is_refused() -> None:
    for wrong in (None, [], "a", deep()):
        with pytest.raises(ValueError, match="a fingerprint is a dictionary, not"):
            Fingerprint.from_dict(wrong)


def test_records_that_end_in_every_way_are_read() -> None:
    whole = drawn().output_ids
    model = serving("dense")
    model.config = replace(model.config, eos=(whole[3],))
    stopped = Engine(model, pages=24, page_size=16).generate([STEM[:9]], ASKED)[0]
    assert (stopped.finish_reason, stopped.output_ids) == ("stop", whole[: whole.index(whole[3]) + 1])
    assert whole[3] in stopped.sampling.stop_token_ids  # the model's own end tokens are named
    served = engine()
    ids = [served.add(tokens(9, 1), ASKED), served.add(tokens(40, 2), ASKED)]
    unstarted = served.abort(ids[1])
    served.step()
    for record in (stopped, drawn(), unstarted, served.abort(ids[0])):
        assert Completion.from_dict(record.to_dict()) == record


def test_check_draws_refuses_what_score_refuses() -> None:
    trainer = twins("dense")[0]
    record = drawn()
    size = trainer.config.vocabulary
    most = trainer.config.positions
    for wrong in (replace(record, output_ids=(*record.output_ids[:-1], size)), replace(record, prompt_ids=(size, *record.prompt_ids[1:]))):
        with pytest.raises(ValueError, match=f"token id {size} is outside the vocabulary of {size}"):
            check_draws(trainer, wrong)
    long = replace(record, prompt_ids=(1,) * most, versions=(record.fingerprint.weights,) * (most + 5))
    with pytest.raises(ValueError, match=f"a document of {most + 6} tokens is longer than the position table of {most}"):
        check_draws(trainer, long)


def test_check_draws_compares_what_the_filters_left_too() -> None:
    record = drawn()
    assert record.filtered_log_probs != record.log_probs
    bit = tuple(torch.nextafter(torch.tensor(record.filtered_log_probs), torch.tensor(-100.0)).tolist())
    check_draws(twins("dense")[0], record)
    with pytest.raises(ValueError, match="output token 0 of request .* drawn again it is"):
        check_draws(twins("dense")[0], replace(record, filtered_log_probs=bit))
