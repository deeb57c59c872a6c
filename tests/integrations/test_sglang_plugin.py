"""The SGLang plugin without a GPU: forward batches, memory views, options, requests, registration.

Where SGLang is not installed its objects are stand-ins with the fields that the plugin reads; such tests have it in their names.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zoo.common.fingerprint import Fingerprint
from zoo.common.memory import PagedMemory
from zoo.common.rows import Rows
from zoo.common.sampling import RowSampling, SamplingParams
from zoo.qwen3 import MOE_SIZES, SIZES, Qwen3ForRL, Qwen3ForServing
from zoo.sglang_plugin import FILTERED, client, fingerprint, memory, names, options, record, register, requests, seed_of
from zoo.sglang_plugin.columns import HostColumn, joined
from zoo.sglang_plugin.scores import prompt_scores, scored_rows

PAGE = 8
SEGMENT = 32


def slots_of(pages: list[int], count: int) -> list[int]:
    return [pages[i // PAGE] * PAGE + i % PAGE for i in range(count)]


def request_table(held: dict[int, list[int]], positions: int = 128) -> Tensor:
    """[requests, positions] as SGLang keeps it; entries beyond a sequence are stale."""
    table = torch.full((8, positions), 12345, dtype=torch.int32)
    for request, pages in held.items():
        row = slots_of(pages, len(pages) * PAGE)
        table[request, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table


HELD = {3: [7, 2, 9], 5: [4], 1: [6, 1]}


def builder(positions: int = 128) -> memory.StepBuilder:
    return memory.StepBuilder(request_table(HELD), PAGE, SEGMENT, positions)


def test_decode_batch_becomes_rows() -> None:
    requests_N, lengths_N = torch.tensor([3, 5, 1]), torch.tensor([17, 3, 9])
    slots = torch.tensor([slots_of(HELD[r], n)[-1] for r, n in zip((3, 5, 1), (17, 3, 9), strict=True)])
    step = builder().decode(requests_N, lengths_N, lengths_N - 1, slots, 17)
    wanted = Rows.pushed([1, 1, 1], [16, 2, 8], "cpu")
    for name in ("positions_R", "sequence_R", "starts_N1", "lengths_N"):
        assert torch.equal(getattr(step.rows, name), getattr(wanted, name)), name
        assert getattr(step.rows, name).dtype == getattr(wanted, name).dtype, name
    assert (step.rows.max_rows, step.rows.max_length) == (1, 17)
    assert step.table_NB.tolist() == [[7, 2, 9], [4, 0, 0], [6, 1, 0]]
    # rows at positions 16 and 8 start a page and zero its rest
    assert step.tail_R.tolist() == [PAGE - 1, 0, PAGE - 1]
    assert step.decode


def test_extend_batch_becomes_rows() -> None:
    counts, contexts = [9, 2, 1], [8, 0, 8]
    wanted = Rows.pushed(counts, contexts, "cpu")
    slots = torch.tensor([s for r, c, b in zip((3, 5, 1), counts, contexts, strict=True) for s in slots_of(HELD[r], b + c)[b:]])
    counts_N, contexts_N = torch.tensor(counts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32)
    step = builder().extend(
        torch.tensor([3, 5, 1]), counts_N + contexts_N, wanted.positions_R, slots, counts_N, contexts_N, counts, contexts
    )
    for name in ("positions_R", "sequence_R", "starts_N1", "lengths_N", "max_rows", "max_length"):
        mine, theirs = getattr(step.rows, name), getattr(wanted, name)
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype if isinstance(mine, Tensor) else mine == theirs, name
    assert step.table_NB.tolist() == [[7, 2, 9], [4, 0, 0], [6, 1, 0]]
    tails = step.tail_R.tolist()
    # ends of the three pushes, in pages that these pushes started: 17 of 24, 2 of 8, 9 of 16 slots
    assert [tails[8], tails[10], tails[11]] == [7, 6, 7]
    assert sum(t > 0 for t in tails) == 3
    # a later chunk inside a page that an earlier push started leaves the rest as it is
    later = builder().extend(
        torch.tensor([5]), torch.tensor([5]), torch.tensor([2, 3, 4]), torch.tensor(slots_of([4], 5)[2:]), torch.tensor([3]),
        torch.tensor([2]), [3], [2],
    )  # fmt: skip
    assert later.tail_R.tolist() == [0, 0, 0]


def test_pool_of_odd_layout_is_refused() -> None:
    good = [torch.zeros(6 * PAGE, 2, 4, dtype=torch.bfloat16)]
    memory.KeyValuePool(good, good, PAGE, torch.bfloat16)
    with pytest.raises(ValueError, match="49 slots are not whole pages of 8"):
        memory.KeyValuePool([torch.zeros(49, 2, 4, dtype=torch.bfloat16)], good, PAGE, torch.bfloat16)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        memory.KeyValuePool([good[0].to(torch.float8_e4m3fn)], good, PAGE, torch.bfloat16)
    with pytest.raises(ValueError, match="not \\[slots, heads, width\\]"):
        memory.KeyValuePool([good[0].transpose(1, 2)], good, PAGE, torch.bfloat16)


@pytest.fixture(scope="module")
def serving() -> Qwen3ForServing:
    return Qwen3ForServing.from_config(SIZES["tiny"], seed=3, device="cpu")


@pytest.fixture(scope="module")
def trainer() -> Qwen3ForRL:
    return Qwen3ForRL.from_config(SIZES["tiny"], seed=3, device="cpu")


def test_pages_of_a_dirty_pool_give_the_bytes_of_the_zoos_own_memory(serving: Qwen3ForServing) -> None:
    """Two sequences, one in two chunks and then decoded; the pool starts as NaN, its pages are scattered."""
    c = serving.config
    shape = (12 * PAGE, c.kv_heads, c.head_dim)
    buffers = [[torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(c.layers)] for _ in range(2)]
    pool = memory.KeyValuePool(*buffers, PAGE, torch.bfloat16)
    made = builder()
    own = PagedMemory(c.layers, 12, PAGE, c.kv_heads, c.head_dim, torch.bfloat16, "cpu")
    own_table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    ids = torch.randint(0, c.vocabulary, (2, 20))
    before = [0, 0]
    for counts in ([13, 5], [4, 7], [1, 1]):
        wanted_rows = Rows.pushed(counts, before, "cpu")
        after = [b + n for b, n in zip(before, counts, strict=True)]
        tokens = torch.cat([ids[n, before[n] : after[n]] for n in range(2)])
        slots = torch.tensor([s for r, b, a in zip((3, 1), before, after, strict=True) for s in slots_of(HELD[r], a)[b:]])
        table_N, lengths = torch.tensor([3, 1]), torch.tensor(after)
        if counts == [1, 1]:
            step = made.decode(table_N, lengths, lengths - 1, slots, max(after))
        else:
            step = made.extend(table_N, lengths, wanted_rows.positions_R, slots, torch.tensor(counts), torch.tensor(before), counts, before)
        mine = serving.hidden_rows(tokens, step.rows, pool.during(step), step.table_NB)
        wanted = serving.hidden_rows(tokens, wanted_rows, own, own_table)
        assert mine.isfinite().all() and torch.equal(mine.view(torch.int16), wanted.view(torch.int16)), counts
        before = after
    for buffer in (*buffers[0], *buffers[1]):
        pages = buffer.view(-1, PAGE, *shape[1:])
        # every page in use is clean to its end, pages of nobody are untouched
        assert pages[[7, 2, 9, 6, 1]].isfinite().all() and pages[[4, 5, 8]].isnan().all()


def test_control_without_tails_the_dirt_stays(serving: Qwen3ForServing) -> None:
    c = serving.config
    shape = (12 * PAGE, c.kv_heads, c.head_dim)
    buffers = [[torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(c.layers)] for _ in range(2)]
    pool = memory.KeyValuePool(*buffers, PAGE, torch.bfloat16)
    step = builder().extend(
        torch.tensor([5]),
        torch.tensor([3]),
        torch.arange(3),
        torch.tensor(slots_of([4], 3)),
        torch.tensor([3]),
        torch.tensor([0]),
        [3],
        [0],
    )
    step = dataclasses.replace(step, tail_R=torch.zeros_like(step.tail_R))
    serving.hidden_rows(torch.tensor([1, 2, 3]), step.rows, pool.during(step), step.table_NB)
    assert buffers[0][0].view(-1, PAGE, *shape[1:])[4].isnan().any()


def dirty_pool(serving: Qwen3ForServing, pages: int) -> memory.KeyValuePool:
    c = serving.config
    shape = (pages * PAGE, c.kv_heads, c.head_dim)
    return memory.KeyValuePool(
        *([torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(c.layers)] for _ in range(2)), PAGE, torch.bfloat16
    )


def test_padded_prefills_of_a_dirty_pool_leave_every_byte(serving: Qwen3ForServing) -> None:
    """The same prefills eagerly and padded, page 0 dirty too; what no captured prefill serves is left to the eager one."""
    held = {3: list(range(40, 10, -2)), 5: [4, 9, 2], 1: list(range(41, 11, -2))}
    made = memory.StepBuilder(request_table(held, 256), PAGE, 256, 256)
    plain, padded = dirty_pool(serving, 50), dirty_pool(serving, 50)
    prefills = memory.PrefillSteps(made, 256, 100, "cpu")
    assert list(prefills.steps) == [64]

    def run(ids: Tensor, step: memory.Step, pool: memory.KeyValuePool) -> Tensor:
        step.rows.launch.clear()
        return serving.hidden_rows(ids, step.rows, pool.during(step), step.table_NB)

    static = prefills.steps[64]
    prefills.replays = {64: lambda: run(static.padded.ids_R, static.step, padded)}
    before = {3: 0, 5: 0, 1: 0}
    for counts in ({3: 13, 1: 20}, {3: 51, 5: 2}, {1: 64}, {5: 15, 3: 1, 1: 3}, {3: 40, 1: 33}):
        requests, contexts = list(counts), [before[r] for r in counts]
        before |= {r: before[r] + n for r, n in counts.items()}
        rows = Rows.pushed(list(counts.values()), contexts, "cpu")
        slots = torch.tensor([s for r, b in zip(requests, contexts, strict=True) for s in slots_of(held[r], before[r])[b:]])
        step = made.extend(
            torch.tensor(requests), rows.lengths_N, rows.positions_R, slots, torch.tensor(list(counts.values())),
            torch.tensor(contexts), list(counts.values()), contexts,
        )  # fmt: skip
        ids = torch.randint(0, serving.config.vocabulary, (rows.count,))
        wanted, found = run(ids, step, plain), prefills.push(ids, step)
        assert (found is None) == (rows.count > 64)
        if found is None:
            found = run(ids, step, padded)
        assert wanted.isfinite().all() and torch.equal(found.view(torch.int16), wanted.view(torch.int16)), counts
        for mine, theirs in zip(padded.k_pages + padded.v_pages, plain.k_pages + plain.v_pages, strict=True):
            assert torch.equal(mine[1:].view(torch.int16), theirs[1:].view(torch.int16)), counts
            assert mine[0].isfinite().all()
    # control: padding that does not clean its page
    unclean = memory.PaddedStep(made, 64, 256, "cpu")
    unclean.step.tail_R.zero_()
    run(unclean.padded.ids_R, unclean.step, pool := dirty_pool(serving, 50))
    assert pool.k_pages[0][0].isnan().any()


@pytest.mark.parametrize(
    ("context", "segment", "lengths"),
    [
        (40960, 2048, [2048, 8192, 40960]),
        (131072, 2048, [2048, 8192, 32768, 131072]),
        (3000, 2048, [2048, 3000]),
        (2048, 2048, [2048]),
        (900, 2048, [900]),
        (4096, None, [4096]),
    ],
)
def test_graph_bounds(context: int, segment: int | None, lengths: list[int]) -> None:
    assert memory.graph_lengths(context, segment) == lengths


def test_graph_steps_are_static_and_refreshed_in_place() -> None:
    made = builder()
    steps = memory.GraphSteps(made, 4, 128, "cpu")
    assert steps.lengths == [32, 128]
    assert [steps.length_for(n) for n in (1, 32, 33, 128)] == [32, 32, 128, 128]
    with pytest.raises(ValueError, match="129 tokens is longer than the largest captured graph's 128"):
        steps.length_for(129)
    positions, slots = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    padded = torch.tensor([0, 0, 0])
    captured = {length: steps.step(length, padded, positions, slots) for length in steps.lengths}
    assert captured[32].table_NB.shape == (3, 32 // PAGE) and captured[128].table_NB.shape == (3, 128 // PAGE)
    # two live requests and a padding one, as SGLang's buffers hold them
    steps.refresh(32, torch.tensor([3, 1, 0]), torch.tensor([17, 9, 1]))
    assert captured[32].table_NB.tolist()[:2] == [[7, 2, 9, 0], [6, 1, 0, 0]]
    assert captured[32].rows.lengths_N.tolist() == [17, 9, 1] and captured[32].tail_R.tolist() == [PAGE - 1, PAGE - 1, PAGE - 1]


FIELDS = SIZES["8b"].to_hf()


def arguments(**changed: Any) -> Any:
    """A stand-in of ServerArgs: SGLang's defaults for every field that the plugin looks at."""
    values: dict[str, Any] = {refusal.field: refusal.served[0] for refusal in options.REFUSALS}
    graphs = types.SimpleNamespace(prefill=types.SimpleNamespace(backend="disabled"), decode=types.SimpleNamespace(backend="full"))
    values |= {
        "attention_backend": "zoo", "model_path": "/nowhere", "revision": None, "sampling_backend": None, "page_size": None,
        "grammar_backend": None, "disable_cuda_graph": False, "disable_prefill_cuda_graph": False,
        "cuda_graph_backend_prefill": None, "prefill_attention_backend": None, "decode_attention_backend": None,
        "context_length": None, "cuda_graph_config": graphs, "chunked_prefill_size": None, "model_config_parser": "auto",
    }  # fmt: skip
    return types.SimpleNamespace(**(values | changed))


def test_stand_in_one_option_implies_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "read_config", lambda path, revision: FIELDS)
    called = []
    args = arguments()
    options.around_post_init(called.append, args)
    assert called == [args]
    assert (args.sampling_backend, args.page_size, args.cuda_graph_backend_prefill) == ("zoo", 128, "disabled")
    assert getattr(args, options.CHECKED)


def test_stand_in_other_backends_are_left_alone() -> None:
    args = arguments(attention_backend="fa3", tp_size=8, quantization="fp8")
    before = dict(vars(args))
    options.around_post_init(lambda a: None, args)
    assert vars(args) == before


@pytest.mark.parametrize("refusal", options.REFUSALS, ids=lambda r: r.field)
def test_stand_in_each_refused_option_ends_the_start_with_one_sentence(refusal: options.Refusal) -> None:
    args = arguments(sampling_backend="zoo", **{refusal.field: "something else"})
    with pytest.raises(ValueError) as caught:
        options.check(args)
    flag = "--" + refusal.field.replace("_", "-")
    assert flag in str(caught.value) and "'something else'" in str(caught.value) and "\n" not in str(caught.value)


def test_stand_in_unaligned_only_warns_where_bytes_alone_suffer() -> None:
    args = arguments(attention_backend="zoo_unaligned", sampling_backend="zoo", enable_mixed_chunk=True)
    options.check(args)
    with pytest.raises(ValueError, match="--tp-size 1, not 2"):
        options.check(arguments(attention_backend="zoo_unaligned", sampling_backend="zoo", tp_size=2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": 64}, "implies --page-size 128, not 64"),
        ({"sampling_backend": "pytorch"}, "implies --sampling-backend zoo, not pytorch"),
        ({"cuda_graph_backend_prefill": "breakable"}, "implies --cuda-graph-backend-prefill disabled, not breakable"),
        ({"decode_attention_backend": "fa3"}, "not --decode_attention_backend fa3"),
        ({"context_length": 50000}, "--context-length 50000 is longer than the model's position table of 40960"),
    ],
)
def test_stand_in_contradictions_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.imply(arguments(**changed), FIELDS)


def test_stand_in_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="serves qwen3, qwen3_moe.*, not model_type 'llama'"):
        options.imply(arguments(), {**FIELDS, "model_type": "llama"})
    with pytest.raises(ValueError, match="heads of 512 is not served"):
        options.page_size(512)
    assert (options.page_size(64), options.page_size(256)) == (128, 80)


def test_stand_in_graphs_that_the_plugin_does_not_capture_are_refused() -> None:
    graphs = types.SimpleNamespace(prefill=types.SimpleNamespace(backend="breakable"), decode=types.SimpleNamespace(backend="full"))
    with pytest.raises(ValueError, match="prefill without SGLang's CUDA graphs, not breakable"):
        options.check(arguments(sampling_backend="zoo", cuda_graph_config=graphs))


def test_half_a_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="share one backend"):
        options.around_post_init(lambda a: None, arguments(attention_backend="fa3", decode_attention_backend="zoo"))


@pytest.mark.parametrize("wrap", [dict, lambda **k: types.SimpleNamespace(**k)], ids=["client", "server"])
def test_sampling_parameters_are_the_zoos(wrap: Callable[..., Any]) -> None:
    def translate(**given: Any) -> SamplingParams:
        return requests.sampling_params(wrap(**given), "r1")

    seed = seed_of("r1")
    assert translate() == SamplingParams(seed=seed)
    # SGLang's two spellings of greedy
    assert translate(temperature=0.0) == translate(temperature=1.0, top_k=1) == SamplingParams(temperature=0.0, seed=seed)
    assert translate(temperature=0.7, top_k=1 << 30, top_p=0.9) == SamplingParams(temperature=0.7, top_p=0.9, seed=seed)
    assert translate(temperature=0.7, top_k=1) == SamplingParams(temperature=0.7, top_k=1, seed=seed)
    assert translate(min_p=0.1, sampling_seed=5) == SamplingParams(min_p=0.1, seed=5)
    for bad in (
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"3": 1.0}},
        {"regex": "a+"},
        {"min_new_tokens": 2},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* can't replay"):
            translate(**bad)
    with pytest.raises(ValueError, match="temperature must be 0 \\(greedy\\) or between"):
        translate(temperature=3e-6)


def test_seeds_come_from_the_answers_id() -> None:
    assert seed_of("a") != seed_of("b") and seed_of("a") == seed_of("a")
    assert all(0 <= seed_of(str(i)) < 1 << 63 for i in range(100))


def test_stand_in_requests_are_checked_before_they_run() -> None:
    def request(**fields: Any) -> Any:
        return types.SimpleNamespace(rid="x", sampling_params={}, lora_path=None, **fields)

    requests.check_request(request(return_hidden_states=False))
    with pytest.raises(ValueError, match="return_sampling_mask is not served"):
        requests.check_request(request(return_sampling_mask=True))
    with pytest.raises(ValueError, match="image_data is not served"):
        requests.check_request(request(image_data=["http://x"]))


def test_host_columns_keep_fp32() -> None:
    values = torch.tensor([-0.1, -1e-30, -87.33654, float(np.nextafter(np.float32(-1), np.float32(0)))], dtype=torch.float32)
    column = HostColumn(values)
    back = json.loads(json.dumps([column[i] for i in range(len(column))]))
    assert torch.equal(torch.tensor(back, dtype=torch.float64).float().view(torch.int32), values.view(torch.int32))


def test_joined_rows_are_the_rows_of_both() -> None:
    params = [
        SamplingParams(temperature=0.5, top_p=0.3, seed=1 << 63),
        SamplingParams(temperature=0.0),
        SamplingParams(min_p=0.2),
    ]
    whole = RowSampling.of(params, [4, 5, 6], "cpu")
    both = joined(RowSampling.of(params[:1], [4], "cpu"), RowSampling.of(params[1:], [5, 6], "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), both.tensors(), strict=True))
    assert (both.scales, both.filters) == (whole.scales, whole.filters)


def test_prompt_scores_are_the_trainers(serving: Qwen3ForServing, trainer: Qwen3ForRL) -> None:
    """Two prompts; of the first only tokens from row 2 on are wanted, as SGLang's logprob_start_len says."""
    counts, begins = [6, 5], [2, 0]
    ids = torch.randint(0, serving.config.vocabulary, (11,))
    cu = torch.tensor([0, 6, 11])
    pages = serving.make_memory(4, PAGE)
    hidden = serving.hidden_rows(ids, Rows.packed(cu), pages, torch.tensor([[1], [2]], dtype=torch.int32))
    index = scored_rows(counts, begins)
    assert index == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    targets = torch.roll(ids, -1)[index]
    found = prompt_scores(serving, hidden, targets, counts, begins, [2, 0], [None, [7, 8]])
    assert found is not None
    with torch.no_grad():
        wanted = trainer.score(ids, cu, torch.roll(ids, -1), top_k=2)
        seven = trainer.score(ids, cu, torch.full_like(ids, 7))
    assert torch.equal(found.input_token_logprobs, wanted.log_prob_R[index])
    assert found.input_top_logprobs_val == [wanted.top_log_prob_RK[2:6].tolist(), [[]] * 5]
    assert found.input_top_logprobs_idx == [wanted.top_ids_RK[2:6].tolist(), [[]] * 5]
    ids_of = found.input_token_ids_logprobs_val
    assert ids_of is not None and ids_of[0] == [] and [row[0] for row in ids_of[1]] == seven[6:].tolist()
    # control: the neighbouring row is another number
    assert not torch.equal(found.input_token_logprobs[:-1], wanted.log_prob_R[index][1:])
    assert prompt_scores(serving, hidden, targets[:0], counts, [6, 5], [0, 0], [None, None]) is None
    with pytest.raises(ValueError, match="8 prompt tokens for 9 scored rows"):
        prompt_scores(serving, hidden, targets[:-1], counts, begins, [0, 0], [None, None])


def answered(**changed: Any) -> dict[str, Any]:
    meta = {
        "id": "abc",
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [(-0.5, 9, None), (-0.25, 8, None)],
        FILTERED: [-0.125, 0.0],
        "input_token_logprobs": [(None, 1, None), (-3.0, 2, None), (-4.0, 3, None)],
    }
    return {"output_ids": [9, 8], "meta_info": meta | changed}


PRINTED = Fingerprint({"program": "aligned/1"}, "ffff", {}, {})


def test_record_of_an_answer() -> None:
    made = record(answered(), [1, 2, 3], {"temperature": 0.5}, PRINTED)
    assert made.output_ids == (9, 8) and made.log_probs == (-0.5, -0.25) and made.filtered_log_probs == (-0.125, 0.0)
    assert made.prompt_log_probs == (-3.0, -4.0) and made.finish_reason == "length"
    assert made.sampling == SamplingParams(temperature=0.5, seed=seed_of("abc")) and made.versions == ("ffff",) * 4
    assert record(answered(input_token_logprobs=[]), [1, 2, 3], {}, PRINTED).prompt_log_probs is None
    with pytest.raises(ValueError, match="1 filtered log-probabilities for 2 output tokens"):
        record(answered(**{FILTERED: [0.0]}), [1, 2, 3], {}, PRINTED)
    with pytest.raises(ValueError, match="ask for them with return_logprob"):
        record({"meta_info": {"id": "x"}}, [1], {}, PRINTED)


def test_stand_in_fingerprint_of_an_engine() -> None:
    def engine(*states: Any) -> Any:
        return types.SimpleNamespace(get_server_info=lambda: {"internal_states": [*states]})

    mine = {names.STATE: {"fingerprint": PRINTED.to_dict()}}
    assert fingerprint(engine(mine, mine)) == PRINTED
    with pytest.raises(ValueError, match="does not run the zoo's backend"):
        fingerprint(engine({"tp_size": 1}))
    with pytest.raises(ValueError, match="weights are released"):
        fingerprint(engine({names.STATE: {"fingerprint": None}}))
    other = {names.STATE: {"fingerprint": dataclasses.replace(PRINTED, weights="0000").to_dict()}}
    with pytest.raises(ValueError, match="weights: ffff against 0000"):
        client.fingerprint(engine(mine, other))


def sglang_is_there() -> bool:
    try:
        import sglang.srt.managers.scheduler  # noqa: F401
    except Exception:  # installed or not, it can't be imported here
        return False
    return True


def test_stand_in_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, Any, str]] = []
    registry = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = types.SimpleNamespace(register=lambda target, hook, kind: found.append((target, hook, kind)))  # type: ignore[attr-defined]
    registry.HookType = {"AROUND": "around", "AFTER": "after"}  # type: ignore[attr-defined]
    args = types.ModuleType("sglang.srt.server_args")
    args.ATTENTION_BACKEND_CHOICES, args.SAMPLING_BACKEND_CHOICES = ["fa3"], {"pytorch"}  # type: ignore[attr-defined]
    args.add_attention_backend_choices = args.ATTENTION_BACKEND_CHOICES.extend  # type: ignore[attr-defined]
    parsers = types.ModuleType("sglang.srt.configs.model_config_parser_registry")
    parsed: list[str] = []
    parsers.ModelConfigParserBase = object  # type: ignore[attr-defined]
    parsers.register_model_config_parser = lambda name: lambda cls: parsed.append(name)  # type: ignore[attr-defined]
    srt = types.ModuleType("sglang.srt")
    srt.server_args = args  # type: ignore[attr-defined]
    for name, module in (
        ("sglang", types.ModuleType("sglang")), ("sglang.srt", srt), ("sglang.srt.server_args", args),
        ("sglang.srt.plugins", types.ModuleType("sglang.srt.plugins")), (registry.__name__, registry),
        ("sglang.srt.configs", types.ModuleType("sglang.srt.configs")), (parsers.__name__, parsers),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    register()
    register()
    assert args.ATTENTION_BACKEND_CHOICES == ["fa3", "zoo", "zoo_unaligned"] and "zoo" in args.SAMPLING_BACKEND_CHOICES
    assert set(parsed) == {names.PARSER}
    assert len(found) == 2 * len(register.__globals__["hooks"]()) and all(target.startswith("sglang.srt.") for target, _, _ in found)


def test_stand_in_hooks_return_at_once_for_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    page = import_module("zoo.sglang_plugin.register")
    other = types.SimpleNamespace(attention_backend="fa3")
    runner = types.SimpleNamespace(server_args=other)
    assert page.around_initialize(lambda r: ("original", r), runner) == ("original", runner)
    assert page.after_graph_runner(dict, runner) is dict
    assert page.after_validate("kept", types.SimpleNamespace(server_args=other), None, []) == "kept"
    assert page.after_internal_state("kept", types.SimpleNamespace(server_args=other), None) == "kept"
    updater = types.SimpleNamespace(tp_worker=types.SimpleNamespace(model_runner=runner))
    assert page.after_release("kept", updater, None) == "kept"
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert page.after_sampling_info("kept", dict, None, 8) == "kept"


class DecodeRunner:
    """Stands for SGLang's runner of decode graphs with its full backend: a replay runs the captured function again."""

    def __init__(self, model: Any, backend: Any, args: Any) -> None:
        self.model_runner, self.attn_backend = types.SimpleNamespace(model=model, server_args=args), backend
        self.backend, self.kept, self.order = self, {}, []
        self._capture_one_stream()

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        self.order.append("decode")

    def _make_graph_key(self, size: int, stream_idx: int | None = None, variant_label: str | None = None) -> tuple[Any, ...]:
        return size, stream_idx, variant_label

    def capture_one(self, key: Any, run: Callable[[], Tensor]) -> None:
        self.order.append(key)
        self.kept[key] = run, run()

    def replay(self, key: Any, batch: Any) -> Tensor:
        run, out = self.kept[key]
        return out.copy_(run())


@pytest.fixture
def scheduler_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The plugin's pages that only a scheduler imports, over stand-ins of what they take from SGLang."""
    found = types.SimpleNamespace(backend=None, capturer=None)
    taken: dict[str, dict[str, Any]] = {
        "layers.attention.base_attn_backend": {"AttentionBackend": object},
        "layers.logits_processor": {"LogitsProcessorOutput": types.SimpleNamespace},
        "model_executor.forward_context": {"get_attn_backend": lambda: found.backend},
        "model_executor.runner.decode_cuda_graph_runner": {"DecodeCudaGraphRunner": DecodeRunner},
        "runtime_context": {"get_server_args": None},
        "state_capturer.routed_experts": {"get_global_experts_capturer": lambda: found.capturer},
    }
    for name, values in taken.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", types.SimpleNamespace(**values))  # type: ignore[arg-type]
    ours = [f"zoo.sglang_plugin.{name}" for name in ("backend", "served", "graphs")]
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    try:
        found.backend_page, found.served, found.graphs = (importlib.import_module(name) for name in ours)
        yield found
    finally:
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class Capturer:
    """Stands for SGLang's keeper of routed experts: [rows, layers, chosen] on the device."""

    def __init__(self, rows: int, layers: int, chosen: int) -> None:
        self.device_cache = types.SimpleNamespace(buffer=torch.full((rows, layers, chosen), -1, dtype=torch.int32))

    def capture(self, layer: int, ids: Tensor) -> None:
        self.device_cache.buffer[: ids.shape[0], layer] = ids


@pytest.mark.parametrize(
    ("changed", "rows", "captured"),
    [({}, 512, [256, 128, 64]), ({"chunked_prefill_size": -1}, 100, [64]), ({"chunked_prefill_size": 128}, 512, [128, 64]),
     ({"disable_prefill_cuda_graph": True}, 512, [])],
)  # fmt: skip
def test_stand_in_prefill_graphs_in_the_decode_runner(
    scheduler_pages: types.SimpleNamespace, changed: dict[str, Any], rows: int, captured: list[int]
) -> None:
    """Captured after decode's, the large first; a prefill that fits replays and its routed experts arrive; others run eagerly."""
    zoo = Qwen3ForServing.from_config(MOE_SIZES["tiny"], seed=3, device="cpu")
    c = zoo.config
    args = types.SimpleNamespace(**({"disable_prefill_cuda_graph": False, "chunked_prefill_size": 8192} | changed))
    model = scheduler_pages.served.Served.__new__(scheduler_pages.served.Served)
    torch.nn.Module.__init__(model)
    model.zoo, model._checked, model._returns_experts = zoo, True, True
    held = {3: list(range(40, 10, -2)), 1: list(range(41, 11, -2))}
    backend = scheduler_pages.backend_page.PagedBackend.__new__(scheduler_pages.backend_page.PagedBackend)
    backend.builder = memory.StepBuilder(request_table(held, 256), PAGE, 256, 256)
    backend.context, backend.device, backend.prefills, backend.pool = 256, "cpu", None, dirty_pool(zoo, 50)
    scheduler_pages.backend, scheduler_pages.capturer = backend, Capturer(rows, c.layers, c.experts_per_token)
    runner = scheduler_pages.graphs.BoundedGraphRunner(model, backend, args)
    assert runner.order == ["decode", *[(count, None, "prefill") for count in captured]]

    mode = types.SimpleNamespace(is_decode_or_idle=lambda: False)
    batch = types.SimpleNamespace(forward_mode=mode, return_logprob=False)
    before = {3: 0, 1: 0}
    replayed = []
    for counts in ({3: 60}, {3: 3, 1: 20}, {1: 70}):
        requests, contexts = list(counts), [before[r] for r in counts]
        before |= {r: before[r] + n for r, n in counts.items()}
        live = Rows.pushed(list(counts.values()), contexts, "cpu")
        slots = torch.tensor([s for r, b in zip(requests, contexts, strict=True) for s in slots_of(held[r], before[r])[b:]])
        ids = torch.randint(0, c.vocabulary, (live.count,))
        seen = []
        for eager in (True, False):
            backend.forward_metadata = backend.builder.extend(
                torch.tensor(requests), live.lengths_N, live.positions_R, slots, torch.tensor(list(counts.values())),
                torch.tensor(contexts), list(counts.values()), contexts,
            )  # fmt: skip
            scheduler_pages.capturer.device_cache.buffer.fill_(-1)
            kept, backend.prefills = backend.prefills, None if eager else backend.prefills
            logits = model.forward(ids, live.positions_R, batch).next_token_logits
            backend.prefills = kept
            seen.append((logits, scheduler_pages.capturer.device_cache.buffer[: live.count].clone()))
        assert seen[0][1].ge(0).all() and all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), counts
        replayed.append(scheduler_pages.capturer.device_cache.buffer[live.count :].ge(0).any())
    # padded rows leave their experts behind the live ones, where nobody reads
    assert replayed == [64 in captured, 64 in captured, 128 in captured]


@pytest.mark.slow
@pytest.mark.skipif(not sglang_is_there(), reason="sglang can't be imported here")
def test_registration_with_the_real_registries() -> None:
    from importlib import import_module

    from sglang.srt.plugins.hook_registry import HookRegistry

    page = import_module("zoo.sglang_plugin.register")
    HookRegistry.reset()
    register()
    HookRegistry.apply_hooks()
    assert HookRegistry._patched == {f"sglang.srt.{target}" for target, _, _ in page.hooks()}
    page.register_classes()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.registry import ModelRegistry

    assert ATTENTION_BACKENDS["zoo"].__module__ == "zoo.sglang_plugin.backend"
    for architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        assert ModelRegistry.models[architecture].__module__ == "zoo.sglang_plugin.models.qwen3"
    assert ModelRegistry.models[names.HYBRID_ARCHITECTURE].__module__ == "zoo.sglang_plugin.models.qwen3_5"


@pytest.mark.interpreted
@pytest.mark.parametrize("decode", [True, False])
def test_kernels_move_the_bytes_of_the_cpu_path(decode: bool) -> None:
    from zoo.sglang_plugin import kernels

    requests_N, lengths_N = torch.tensor([3, 5, 1]), torch.tensor([17, 3, 9])
    outputs = []
    for make in (kernels.page_table, memory._page_table):
        table, lengths, tails = (
            torch.full((3, 4), -1, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32),
        )
        make(request_table(HELD), requests_N, lengths_N, PAGE, table, lengths, tails if decode else None)
        outputs.append((table, lengths, tails))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    fused = torch.randn(3, 5 * 6).to(torch.bfloat16)
    k, v = fused[:, :12].view(3, 2, 6), fused[:, 12:24].view(3, 2, 6)
    slots, tails = torch.tensor([72, 34, 8]), torch.tensor([7, 0, 20], dtype=torch.int32)
    pools = []
    for write in (kernels.append, memory._append):
        pool = [torch.full((12 * PAGE, 2, 6), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
        write(k, v, *pool, slots, tails, decode)
        pools.append(pool)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(*pools, strict=True))
    assert torch.equal(pools[0][0][72], k[0]) and pools[0][1][73:80].eq(0).all() and pools[0][0][80].isnan().all()
