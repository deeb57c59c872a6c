"""The SGLang plugin without a GPU: forward batches, memory views, options, requests, registration.

SGLang's objects are stand-ins with the fields that the plugin reads; such tests have it in their names. `test_sglang_versions` asks an
installed SGLang.
"""

from __future__ import annotations

import base64
import dataclasses
import gc
import importlib
import json
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from plugin_harness import SAMPLING, Output, arguments, over_stand_ins, served, stand_in_sglang
from torch import Tensor

from tests.memories import keys_memory
from zoo.common import ops
from zoo.common.rollouts import SamplingParams
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows
from zoo.qwen3 import MOE_SIZES, SIZES, Qwen3ForRL, Qwen3ForServing
from zoo.sglang_plugin import (
    FILTERED,
    REQUEST,
    ROUTING_WEIGHTS,
    WEIGHTS,
    memory,
    names,
    options,
    register,
    requests,
    routing,
    updating,
)
from zoo.sglang_plugin.capturer import RoutingCapturer, around_collect, around_create
from zoo.sglang_plugin.columns import HostColumn, SharedColumn, Uncut, WeightsColumn, WeightsState, joined
from zoo.sglang_plugin.results import around_prefill_result
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
    requests_N = torch.tensor([3, 5, 1])
    lengths_N = torch.tensor([17, 3, 9])
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
    counts = [9, 2, 1]
    contexts = [8, 0, 8]
    wanted = Rows.pushed(counts, contexts, "cpu")
    slots = torch.tensor([s for r, c, b in zip((3, 5, 1), counts, contexts, strict=True) for s in slots_of(HELD[r], b + c)[b:]])
    counts_N = torch.tensor(counts, dtype=torch.int32)
    contexts_N = torch.tensor(contexts, dtype=torch.int32)
    step = builder().extend(
        torch.tensor([3, 5, 1]), counts_N + contexts_N, wanted.positions_R, slots, counts_N, contexts_N, counts, contexts
    )
    for name in ("positions_R", "sequence_R", "starts_N1", "lengths_N", "max_rows", "max_length"):
        mine = getattr(step.rows, name)
        theirs = getattr(wanted, name)
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype if isinstance(mine, Tensor) else mine == theirs, name
    assert step.table_NB.tolist() == [[7, 2, 9], [4, 0, 0], [6, 1, 0]]
    tails = step.tail_R.tolist()
    # ends of the three pushes, in pages that these pushes started: 17 of 24, 2 of 8, 9 of 16 slots
    assert [tails[8], tails[10], tails[11]] == [7, 6, 7]
    assert sum(t > 0 for t in tails) == 3
    # a later chunk inside a page that an earlier push started leaves the rest as it is
    later = builder().extend(
        torch.tensor([5]),
        torch.tensor([5]),
        torch.tensor([2, 3, 4]),
        torch.tensor(slots_of([4], 5)[2:]),
        torch.tensor([3]),
        torch.tensor([2]),
        [3],
        [2],
    )
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
    own = keys_memory(c.layers, 12, PAGE, c.kv_heads, c.head_dim, torch.bfloat16, "cpu")
    own_table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    ids = torch.randint(0, c.vocabulary, (2, 20))
    before = [0, 0]
    for counts in ([13, 5], [4, 7], [1, 1]):
        wanted_rows = Rows.pushed(counts, before, "cpu")
        after = [b + n for b, n in zip(before, counts, strict=True)]
        tokens = torch.cat([ids[n, before[n] : after[n]] for n in range(2)])
        slots = torch.tensor([s for r, b, a in zip((3, 1), before, after, strict=True) for s in slots_of(HELD[r], a)[b:]])
        table_N = torch.tensor([3, 1])
        lengths = torch.tensor(after)
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
    plain = dirty_pool(serving, 50)
    padded = dirty_pool(serving, 50)
    prefills = memory.PrefillSteps(made, 256, 100, "cpu")
    assert list(prefills.steps) == [64]

    def run(ids: Tensor, step: memory.Step, pool: memory.KeyValuePool) -> Tensor:
        step.rows.launch.clear()
        return serving.hidden_rows(ids, step.rows, pool.during(step), step.table_NB)

    static = prefills.steps[64]
    prefills.replays = {64: lambda: run(static.padded.ids_R, static.step, padded)}
    before = {3: 0, 5: 0, 1: 0}
    for counts in ({3: 13, 1: 20}, {3: 51, 5: 2}, {1: 64}, {5: 15, 3: 1, 1: 3}, {3: 40, 1: 33}):
        requests = list(counts)
        contexts = [before[r] for r in counts]
        before |= {r: before[r] + n for r, n in counts.items()}
        rows = Rows.pushed(list(counts.values()), contexts, "cpu")
        slots = torch.tensor([s for r, b in zip(requests, contexts, strict=True) for s in slots_of(held[r], before[r])[b:]])
        step = made.extend(
            torch.tensor(requests),
            rows.lengths_N,
            rows.positions_R,
            slots,
            torch.tensor(list(counts.values())),
            torch.tensor(contexts),
            list(counts.values()),
            contexts,
        )
        ids = torch.randint(0, serving.config.vocabulary, (rows.count,))
        wanted = run(ids, step, plain)
        found = prefills.push(ids, step)
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


def test_places_of_a_larger_prefill_are_padding_again() -> None:
    """A smaller prefill behind a larger one: what the larger one left in each static tensor is nobody's."""
    made = builder()

    def extended(*places: int) -> memory.Step:
        counts = [2] * len(places)
        zeros = [0] * len(places)
        slots = [slot for place in places for slot in slots_of(HELD[place], 2)]
        return made.extend(
            torch.tensor(places),
            torch.tensor(counts),
            torch.tensor([0, 1] * len(places)),
            torch.tensor(slots),
            torch.tensor(counts),
            torch.tensor(zeros),
            counts,
            zeros,
        )

    padded = memory.PaddedStep(made, 64, 128, "cpu")
    for places in ((3, 5, 1), (5,), (1, 3)):
        live = 2 * len(places)
        padded.fill(torch.arange(live), extended(*places))
        step = padded.step
        assert step.request_N.tolist() == [*places, *[0] * (padded.padded.places - len(places))]
        assert not step.slot_R[live:].any() and step.tail_R[live:].tolist() == [0] * (63 - live) + [PAGE - 1]


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
    positions = torch.zeros(3, dtype=torch.int64)
    slots = torch.zeros(3, dtype=torch.int64)
    padded = torch.tensor([0, 0, 0])
    captured = {length: steps.step(length, padded, positions, slots) for length in steps.lengths}
    assert captured[32].table_NB.shape == (3, 32 // PAGE) and captured[128].table_NB.shape == (3, 128 // PAGE)
    # two live requests and a padding one, as SGLang's buffers hold them
    steps.refresh(32, torch.tensor([3, 1, 0]), torch.tensor([17, 9, 1]))
    assert captured[32].table_NB.tolist()[:2] == [[7, 2, 9, 0], [6, 1, 0, 0]]
    assert captured[32].rows.lengths_N.tolist() == [17, 9, 1] and captured[32].tail_R.tolist() == [PAGE - 1, PAGE - 1, PAGE - 1]


FIELDS = SIZES["8b"].to_hf()


def test_stand_in_one_option_implies_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_sglang(monkeypatch)
    monkeypatch.setattr(options, "read_config", lambda path, revision: FIELDS)
    called = []
    args = arguments()
    options.around_resolution(called.append, args)
    assert called == [args]
    assert (args.sampling_backend, args.page_size, args.cuda_graph_backend_prefill) == ("zoo", 128, "disabled")
    assert getattr(args, options.CHECKED)
    # a child process, where SGLang asks again: what arrives resolved is left alone
    before = dict(vars(args))
    monkeypatch.setattr(options, "check", None)
    options.around_resolution(called.append, args)
    assert called == [args, args] and vars(args) == before


def test_stand_in_what_resolution_decided_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.23 keeps the fields as they were given."""
    monkeypatch.setattr(options, "read_config", lambda path, revision: FIELDS)
    decided = arguments(sampling_backend="zoo", moe_a2a_backend="deepep")
    monkeypatch.setattr(options, "resolved", lambda args: decided)
    monkeypatch.setattr(options, "assert_hooked", lambda: None)
    args = arguments()
    with pytest.raises(ValueError, match="--moe-a2a-backend 'none' or None, not 'deepep'"):
        options.around_resolution(lambda a: None, args)
    assert not hasattr(args, options.CHECKED)


def test_stand_in_another_sglang_starts_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "read_config", lambda path, revision: FIELDS)
    for version, said in (("0.5.17", 0), ("0.5.23", 1)):
        stand_in_sglang(monkeypatch, version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options.around_resolution(lambda a: None, arguments())
        assert len(caught) == said and all("not with 0.5.23: prove them with `zoo verify" in str(w.message) for w in caught)


def test_stand_in_other_backends_are_left_alone() -> None:
    args = arguments(attention_backend="fa3", tp_size=8, quantization="fp8")
    before = dict(vars(args))
    options.around_resolution(lambda a: None, args)
    assert vars(args) == before


# every option that the plugin refuses, with the values that it serves: written here once more, so that none gets lost in the table
SERVED: dict[str, tuple[Any, ...]] = {
    "device": ("cuda",),
    "tp_size": (1,),
    "pp_size": (1,),
    "ep_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "moe_dp_size": (1,),
    "enable_dp_attention": (False,),
    "attn_dp_size": (1,),
    "dtype": ("auto", "bfloat16"),
    "quantization": (None,),
    "torchao_config": ("", None),
    "kv_cache_dtype": ("auto", "bfloat16", "bf16"),
    "enable_page_major_kv_layout": (False,),
    "enable_unified_memory": (False,),
    "enable_hisparse": (False,),
    "enable_hierarchical_cache": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_unified_cache_external_linker": (False,),
    "speculative_algorithm": (None,),
    "dllm_algorithm": (None,),
    "is_embedding": (False,),
    "enable_lora": (None, False),
    "lora_paths": (None, [], {}),
    "disaggregation_mode": ("null",),
    "enable_mixed_chunk": (False,),
    "enable_two_batch_overlap": (False,),
    "enable_single_batch_overlap": (False,),
    "enable_pdmux": (False,),
    "enable_torch_compile": (False,),
    "enable_tf32_matmul": (False, None),
    "enable_deterministic_inference": (False,),
    "rl_on_policy_target": (None,),
    "cpu_offload_gb": (0,),
    "offload_group_size": (-1,),
    "enable_paged_experts": (False,),
    "startup_weight_load_mode": ("serial",),
    "enable_nvidia_megakernel": (False,),
    "model_impl": ("auto", "sglang"),
    "json_model_override_args": ("{}", "", None),
    "decrypted_config_file": (None,),
    "enable_custom_logit_processor": (False,),
    "enable_watermark": (False,),
    "preferred_sampling_params": (None,),
    "enable_mis": (False,),
    "enable_return_hidden_states": (False, None),
    "return_hidden_states_mode": (None, "off", "none"),
    "enable_return_aux_hidden_states": (False,),
    "enable_return_indexer_topk": (False,),
    "prefill_only_disable_kv_cache": (False,),
    "elastic_ep_backend": (None,),
    "moe_a2a_backend": ("none", None),
    "enable_eplb": (False,),
    "tokenizer_worker_num": (1,),
    "grpc_mode": (False,),
    "smg_grpc_mode": (False,),
    "use_ray": (False,),
    "debug_cuda_graph": (False,),
    "load_format": ("auto", "safetensors", "dummy"),
    "weight_cache_mode": ("off",),
    "custom_weight_loader": (None, []),
    "enable_elastic_expert_backup": (False,),
    "remote_instance_weight_loader_start_seed_via_transfer_engine": (False,),
    "modelopt_quant": (None, ""),
    "rl_quant_profile": (None, ""),
    "quantization_param_path": (None, ""),
    "quantize_and_serve": (False,),
    "enable_fp32_lm_head": (False,),
    "kt_weight_path": (None,),
    "forward_hooks": (None, []),
    "debug_tensor_dump_output_folder": (None,),
    "debug_tensor_dump_input_file": (None,),
    "msprobe_dump_config": (None,),
    "enable_layerwise_nvtx_marker": (False,),
    "kv_canary": ("none",),
    "radix_cache_backend": (None,),
    "enable_session_radix_cache": (False,),
    "enable_streaming_session": (False,),
    "hicache_storage_backend": (None,),
    "nnodes": (1,),
    "dwdp_size": (1,),
    "enable_prefill_cp": (False,),
    "enable_prefill_context_parallel": (False,),
    "enable_dp_lm_head": (False,),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial", None),
    "encoder_only": (False,),
}


def test_every_option_that_is_refused_stands_here() -> None:
    assert {refusal.field: refusal.served for refusal in options.REFUSALS} == SERVED and len(options.REFUSALS) == len(SERVED)


@pytest.mark.parametrize("field", SERVED)
def test_stand_in_each_refused_option_ends_the_start_with_one_sentence(field: str) -> None:
    args = arguments(sampling_backend="zoo", **{field: "something else"})
    with pytest.raises(ValueError) as caught:
        options.check(args)
    flag = "--" + field.replace("_", "-")
    assert flag in str(caught.value) and "'something else'" in str(caught.value) and "\n" not in str(caught.value)
    for value in SERVED[field]:
        options.check(arguments(sampling_backend="zoo", **{field: value}))


def test_stand_in_a_sampling_backend_that_resolution_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_sglang(monkeypatch)
    monkeypatch.setattr(options, "read_config", lambda path, revision: FIELDS)

    def resolve(args: Any) -> None:
        assert args.sampling_backend == "zoo"
        args.sampling_backend = "pytorch"

    args = arguments()
    with pytest.raises(ValueError, match="another option changed --sampling-backend to pytorch, it must be zoo"):
        options.around_resolution(resolve, args)
    assert not hasattr(args, options.CHECKED)


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
        ({"enable_return_routed_experts": True}, "needs a mixture of experts, qwen3 is dense"),
        ({"model_config_parser": "zoo"}, "--model-config-parser zoo would show SGLang another model than qwen3"),
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
        options.around_resolution(lambda a: None, arguments(attention_backend="fa3", decode_attention_backend="zoo"))


@pytest.mark.parametrize("wrap", [dict, lambda **k: types.SimpleNamespace(**k)], ids=["client", "server"])
def test_sampling_parameters_are_the_zoos(wrap: Callable[..., Any]) -> None:
    def translate(**given: Any) -> SamplingParams:
        return requests.sampling_params(wrap(**given), seed)

    seed = 77
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
        {"watermark": {"enabled": True}},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* can't replay"):
            translate(**bad)
    with pytest.raises(ValueError, match="temperature must be 0 \\(greedy\\) or between"):
        translate(temperature=3e-6)
    with pytest.raises(ValueError, match="beam_width=4 is not sampling"):
        translate(beam_width=4)
    assert translate(beam_width=1) == translate()


def test_stand_in_requests_are_checked_before_they_run() -> None:
    def request(**fields: Any) -> Any:
        return types.SimpleNamespace(rid="x", sampling_params={}, lora_path=None, **fields)

    def check_request(input_ids: Any = (0, 7), **fields: Any) -> None:
        requests.check_request(request(**fields), input_ids, 8)

    check_request(return_hidden_states=False, top_logprobs_num=None)
    check_request(None)  # embeddings, refused by their own field
    check_request(top_logprobs_num=8)
    with pytest.raises(ValueError, match="return_sampling_mask is not served"):
        check_request(return_sampling_mask=True)
    for field, value in (("image_data", ["http://x"]), ("lora_id", "a"), ("return_entropy", True)):  # the last two do nothing in SGLang
        with pytest.raises(ValueError, match=f"{field} is not served"):
            check_request(**{field: value})
    # these would end SGLang's scheduler
    for odd in (8, -1):
        with pytest.raises(ValueError, match=f"token id {odd} of the prompt is outside the vocabulary of 8"):
            check_request([0, odd, 7])
    with pytest.raises(ValueError, match="top_logprobs_num 9 is more than the vocabulary of 8"):
        check_request(top_logprobs_num=9)
    for start in (None, -1, 0, 2):
        check_request(logprob_start_len=start)
    with pytest.raises(ValueError, match="logprob_start_len -2 is below -1"):
        check_request(logprob_start_len=-2)


def test_stand_in_the_request_hook_knows_prompt_and_vocabulary() -> None:
    page = importlib.import_module("zoo.sglang_plugin.register")
    manager = types.SimpleNamespace(server_args=arguments(), model_config=types.SimpleNamespace(vocab_size=8))
    obj = types.SimpleNamespace(rid="x", sampling_params={})
    assert page.after_validate(None, manager, obj, [1, 7]) is None
    with pytest.raises(ValueError, match="token id 8 of the prompt"):
        page.after_validate(None, manager, obj, [1, 8])


def test_host_columns_keep_fp32() -> None:
    values = torch.tensor([-0.1, -1e-30, -87.33654, float(np.nextafter(np.float32(-1), np.float32(0)))], dtype=torch.float32)
    column = HostColumn(values)
    back = json.loads(json.dumps([column[i] for i in range(len(column))]))
    assert torch.equal(torch.tensor(back, dtype=torch.float64).float().view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("processed", [Tensor.tolist, Tensor.clone])
def test_stand_in_unfiltered_log_probabilities_travel_once(processed: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`processed`: what SGLang's result processor makes of its own column, of a prefill or of a decode step."""
    page = over_stand_ins(monkeypatch, "sampler", SAMPLING)
    program = Qwen3ForServing.from_config(SIZES["tiny"], device="cpu").program
    sampler = page.RowSampler()
    sampler.program = program
    sampler.weights = WeightsState(str)
    logits_RV = torch.randn(3, 300, generator=torch.Generator().manual_seed(5)) * 3
    positions = torch.tensor([4, 9, 2])

    def drawn(returned: bool, **params: Any) -> tuple[Output, ops.Drawn]:
        rows = RowSampling.of([SamplingParams(seed=n, **params) for n in range(3)], [0] * 3, "cpu")
        output = Output(logits_RV)
        token = sampler.forward(output, page.RowsBatchInfo(rows=rows), returned, [0] * 3, [None] * 3, positions)
        wanted = ops.sample(logits_RV, rows.at(torch.arange(3), positions + 1), program)
        assert torch.equal(token, wanted.token_R) and (output.next_token_logprobs is not None) == returned
        return output, wanted

    def read(output: Output) -> list[float]:
        assert output.customized_info is not None
        if output.next_token_logprobs is not None:
            output.next_token_logprobs = processed(output.next_token_logprobs)
        column = output.customized_info[FILTERED]
        return [column[i] for i in range(3)]

    for returned, params, kind in (
        (True, {}, SharedColumn),
        (True, {"temperature": 0.7}, SharedColumn),
        (False, {}, HostColumn),
        (True, {"top_k": 4}, HostColumn),
    ):
        output, wanted = drawn(returned, **params)
        assert output.customized_info is not None and type(output.customized_info[FILTERED]) is kind
        assert read(output) == wanted.filtered_log_prob_R.tolist()
        # control: under a filter SGLang's column is another one
        assert torch.equal(wanted.log_prob_R, wanted.filtered_log_prob_R) == ("top_k" not in params)

    gc.disable()
    try:
        output, _ = drawn(True)
        assert output.customized_info is not None
        column = output.customized_info[FILTERED]
        gone = weakref.ref(output)
        del output
        assert gone() is None
        with pytest.raises(RuntimeError, match="let its output go"):
            column[0]
        # control: the cycle that a counting reference would be
        cycle = Output(logits_RV)
        cycle.customized_info = {FILTERED: cycle}
        gone = weakref.ref(cycle)
        del cycle
        assert gone() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_stand_in_prompts_scored_alone_get_the_ops_bytes(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang calls no sampler for a batch of max_new_tokens 0."""
    page = over_stand_ins(monkeypatch, "sampler", SAMPLING)
    program = Qwen3ForServing.from_config(SIZES["tiny"], device="cpu").program
    sampler = page.RowSampler()
    sampler.program = program
    sampler.weights = WeightsState(str)
    logits_RV = torch.randn(3, 300, generator=torch.Generator().manual_seed(5)) * 3
    seen: list[Any] = []

    def compute(every_RV: Tensor, *asked: Any) -> Any:
        seen.append((every_RV, asked[:2]))
        named = [[] if ids is None else every_RV[i, ids] for i, ids in enumerate(asked[1])]  # as SGLang's own leaves them
        more = types.SimpleNamespace(token_logprobs=every_RV[:, 0], token_ids_logprobs_val=named)
        more.write_output_to = lambda output: seen.append((output, more))
        return more

    sampler.output_logprob_processor = types.SimpleNamespace(compute_logprobs=compute)
    rows = RowSampling.of([SamplingParams(temperature=temperature)] * 3, [0] * 3, "cpu")
    output = Output(logits_RV)
    info = page.RowsBatchInfo(rows=rows)
    sampler.compute_logprobs_only(output, info, [0] * 3, [None] * 3)
    assert seen == [] and output.next_token_logprobs is None
    sampler.compute_logprobs_only(output, info, [0] * 3, [None, [5, 9], None])
    (every_RV, asked), (written, more) = seen
    assert asked == ([0] * 3, [None, [5, 9], None]) and written is output and output.next_token_logprobs is None
    # SGLang's scheduler calls tolist on each
    assert [v.tolist() for v in more.token_ids_logprobs_val] == [[], every_RV[1, [5, 9]].tolist(), []]
    scaled_RV = logits_RV * rows.inverse_temperature_R[:, None]
    wanted = [ops.log_prob_of_logits(scaled_RV, torch.full((3,), t), program=program).log_prob_R for t in range(300)]
    assert torch.equal(every_RV.view(torch.int32), torch.stack(wanted, 1).view(torch.int32))
    # control: SGLang's own arithmetic, and the other temperature
    assert not torch.equal(every_RV, torch.log_softmax(scaled_RV, -1))
    assert temperature == 1.0 or not torch.equal(every_RV, torch.log_softmax(logits_RV, -1))


def test_stand_in_the_longest_sequence_picks_the_graph(scheduler_pages: types.SimpleNamespace) -> None:
    backend = scheduler_pages.backend_page.PagedBackend.__new__(scheduler_pages.backend_page.PagedBackend)
    backend.context = 4096
    backend.graphs = types.SimpleNamespace(length_for=lambda longest: longest)
    many = torch.arange(80, dtype=torch.int32).roll(30)
    found = [backend.graph_length(lengths) for lengths in (torch.tensor([5, 900, 7]), many, many[-2:], None)]
    assert found == [900, 79, 49, 4096] and all(type(length) is int for length in found)


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
    counts = [6, 5]
    begins = [2, 0]
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
    # an empty list of ids beside another request's: an empty entry for each of its prompt's scored rows
    found = prompt_scores(serving, hidden, targets, counts, begins, [0, 0], [[], [7, 8]])
    assert found is not None and found.input_token_ids_logprobs_val == [[[]] * 4, ids_of[1]]
    assert found.input_token_ids_logprobs_idx == [[[]] * 4, [[7, 8]] * 5]
    assert prompt_scores(serving, hidden, targets[:0], counts, [6, 5], [0, 0], [None, None]) is None
    # a first wanted row behind the end of what ran, as of a chunk before it: of that sequence none is scored
    found = prompt_scores(serving, hidden, targets[4:], counts, [9, 0], [2, 1], [[7], [7, 8]])
    assert found is not None and torch.equal(found.input_token_logprobs, wanted.log_prob_R[6:])
    assert found.input_top_logprobs_val == [[], [row[:1] for row in wanted.top_log_prob_RK[6:].tolist()]]
    assert found.input_token_ids_logprobs_val == [[], ids_of[1]] and found.input_token_ids_logprobs_idx == [[], [[7, 8]] * 5]
    with pytest.raises(ValueError, match="8 prompt tokens for 9 scored rows"):
        prompt_scores(serving, hidden, targets[:-1], counts, begins, [0, 0], [None, None])


def test_weights_are_named_where_no_write_reached() -> None:
    asked: list[str] = []
    state = WeightsState(lambda: asked.append(f"weights{len(asked)}") or asked[-1])  # type: ignore[func-returns-value]
    before = WeightsColumn(state)
    assert asked == [] and before[0] == before[7] == "weights0"
    state.written()
    under = WeightsColumn(state)
    # a step that was launched before the write may still run when it comes
    assert before[0] is None and under[0] is None
    state.written()
    state.flushed = True
    # parts of an update ask for nothing
    assert asked == ["weights0"]
    assert WeightsColumn(state)[0] == "weights1" and under[0] is None
    later = WeightsColumn(state)
    state.written()
    assert later[0] is None and asked == ["weights0", "weights1"]


def test_routing_of_a_request_is_the_trainers() -> None:
    """Two requests of a mixture model through pages: one prefilled in two chunks and decoded, one from the other's first page."""
    serving, trainer = (cls.from_config(MOE_SIZES["tiny"], seed=3, device="cpu") for cls in (Qwen3ForServing, Qwen3ForRL))
    c = serving.config
    shape = (12 * PAGE, c.kv_heads, c.head_dim)
    buffers = [[torch.zeros(shape, dtype=torch.bfloat16) for _ in range(c.layers)] for _ in range(2)]
    pool = memory.KeyValuePool(*buffers, PAGE, torch.bfloat16)
    captured = RoutingCapturer(c.layers, c.experts_per_token, 16, 12 * PAGE, "cpu")
    ids = torch.randint(0, c.vocabulary, (20,)).tolist()
    table = request_table({3: [7, 2, 9], 1: [7, 4, 1]})
    made = memory.StepBuilder(table, PAGE, SEGMENT, 128)
    for place, context, count in ((3, 0, 10), (3, 10, 5), (3, 15, 1), (1, 8, 4)):
        place_N = torch.tensor([place])
        after = context + count
        slots = table[place, context:after].long()
        positions = torch.arange(context, after)
        if count == 1:
            step = made.decode(place_N, torch.tensor([after]), positions, slots, after)
        else:
            step = made.extend(
                place_N, torch.tensor([after]), positions, slots, torch.tensor([count]), torch.tensor([context]), [count], [context]
            )
        routed: list[tuple[Tensor, Tensor]] = []
        with ops.watch(lambda contract, seen, result, to=routed: contract.name == "route" and to.append(result)):  # type: ignore[misc]
            serving.hidden_rows(torch.tensor(ids[context:after]), step.rows, pool.during(step), step.table_NB)
        for layer, result in enumerate(routed):
            captured.write(layer, *result)
        taken = captured.on_forward_end(types.SimpleNamespace(out_cache_loc=slots), False, None, no_copy_to_cpu=True)
        captured.entry_RLC.fill_(-1)  # the next forward writes before SGLang has copied
        assert taken is not None
        taken.map_device_tensors(lambda tensor: tensor)
        taken.finalize()
    wanted: list[tuple[Tensor, Tensor]] = []
    with ops.watch(lambda contract, seen, result: contract.name == "route" and wanted.append(result)), torch.no_grad():
        trainer.score(torch.tensor(ids), torch.tensor([0, 20]))
    weights, experts = (torch.stack([layer[i] for layer in wanted], 1) for i in range(2))
    for place, length, start in ((3, 16, 0), (3, 16, 12), (1, 12, 0)):
        table_of = types.SimpleNamespace(req_to_token=table)
        found = captured.get_topk(req_pool_idx=place, seqlen=length + 1, req_to_token_pool=table_of, start_len=start)
        assert found.dtype == torch.int32 and torch.equal(found, experts[start:length].int())
        assert torch.equal(captured.weights().view(torch.int32), weights[start:length].view(torch.int32))
    # control: one bit of what was captured, of an expert and of a weight, is seen
    slot = int(table[3, 5])
    k = c.experts_per_token
    for column in (0, k):
        captured.host_SLC[slot, -1, column] ^= 1
        found = captured.get_topk(req_pool_idx=3, seqlen=17, req_to_token_pool=table_of)
        same = torch.equal(found, experts[:16].int()), torch.equal(captured.weights().view(torch.int32), weights[:16].view(torch.int32))
        assert same == (column == k, column == 0)
        captured.host_SLC[slot, -1, column] ^= 1
    # without overlap the rows are on the host at once
    captured.entry_RLC[:1] = 5
    assert captured.on_forward_end(types.SimpleNamespace(out_cache_loc=torch.tensor([40])), False, None) is None
    assert (captured.host_SLC[40] == 5).all() and not (captured.host_SLC[41] == 5).any()


def server_of(monkeypatch: pytest.MonkeyPatch, capturer: Any, **args: Any) -> None:
    """Stand-ins of SGLang's context of a process, and of its capturer."""
    given = types.SimpleNamespace(**({"attention_backend": "zoo", "enable_return_routed_experts": True} | args))
    context = types.ModuleType("sglang.srt.runtime_context")
    state = types.ModuleType("sglang.srt.state_capturer.routed_experts")
    context.get_server_args = lambda: given  # type: ignore[attr-defined]
    context.get_schedule = lambda: given  # type: ignore[attr-defined]
    state.get_global_experts_capturer = lambda: capturer  # type: ignore[attr-defined]
    for module in (context, state):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_stand_in_routing_reaches_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = RoutingCapturer(2, 3, 8, 32, "cpu")
    server_of(monkeypatch, captured)
    weights = torch.rand(5, 2, 3)
    captured.host_SLC[4:9, :, :3] = torch.arange(30, dtype=torch.int32).view(5, 2, 3)
    captured.host_SLC[4:9, :, 3:] = weights.view(torch.int32)
    table = types.SimpleNamespace(req_to_token=torch.arange(4, 12, dtype=torch.int32)[None])

    def collect(processor: Any, req: Any) -> None:
        req.routed_experts = captured.get_topk(req_pool_idx=0, seqlen=6, req_to_token_pool=table) if req.asks else None

    def request(asks: bool) -> Any:
        return types.SimpleNamespace(
            asks=asks,
            customized_info=None,
            output_ids_through_stop=[1, 2, 3],
            origin_input_ids=[5, 6, 7],
            sampling_params=types.SimpleNamespace(sampling_seed=9),
        )

    finished = request(True)
    silent = request(False)
    scored = request(True)
    scored.output_ids_through_stop = []  # max_new_tokens 0
    for each in (finished, silent, scored):
        around_collect(collect, None, each)
    # SGLang appends what the request's only step says, and cuts every list to its output tokens: none
    scored.customized_info[WEIGHTS].append("ffff0123")
    cut = pickle.loads(pickle.dumps({name: values[0:0] for name, values in scored.customized_info.items()}))
    assert cut[WEIGHTS] == ["ffff0123"] and type(cut[WEIGHTS]) is list
    counts = {"prompt_tokens": 6, "completion_tokens": 0}
    back = routing({"meta_info": {"routed_experts": base64.b64encode(scored.routed_experts.numpy().tobytes()), **cut, **counts}}, 2, 3)[1]
    assert torch.equal(back.view(torch.int32), weights.view(torch.int32)) and type(scored.customized_info[WEIGHTS]) is Uncut
    # control: a plain list loses it
    assert [*scored.customized_info[WEIGHTS]][0:0] == []
    assert set(silent.customized_info) == {REQUEST} and len(finished.customized_info[ROUTING_WEIGHTS]) == 3
    said = {"prompt": requests.prompt_digest([5, 6, 7]), "seed": 9}
    assert silent.customized_info[REQUEST] == [None, None, said] and cut[REQUEST] == [said]
    text = base64.b64encode(finished.routed_experts.numpy().tobytes()).decode()
    meta = json.loads(json.dumps(finished.customized_info)) | {"routed_experts": text, "prompt_tokens": 3, "completion_tokens": 3}
    experts, back = routing({"meta_info": meta}, layers=2, top_k=3)
    assert experts.flatten().tolist() == list(range(30)) and torch.equal(back.view(torch.int32), weights.view(torch.int32))
    with pytest.raises(ValueError, match="120 bytes of experts and 120 of weights are not whole tokens of 2 x 4 x 4"):
        routing({"meta_info": meta}, layers=2, top_k=4)
    with pytest.raises(ValueError, match="ask with return_routed_experts=True"):
        routing({"meta_info": {"id": "x"}}, layers=2, top_k=3)
    server_of(monkeypatch, object())
    with pytest.raises(RuntimeError, match="captured by object: the hook on RoutedExpertsCapturer.create is not active"):
        around_collect(collect, None, finished)


@pytest.mark.parametrize(("chunk", "rows"), [(512, 512), (8, 64), (-1, 900 + 1000)])
def test_stand_in_capturer_holds_the_largest_forward(monkeypatch: pytest.MonkeyPatch, chunk: int, rows: int) -> None:
    server_of(monkeypatch, None, chunked_prefill_size=chunk, max_prefill_tokens=900)
    config = types.SimpleNamespace(layers=2, experts_per_token=3)
    given = {"model": types.SimpleNamespace(zoo=types.SimpleNamespace(config=config)), "num_tokens": 32, "max_running_requests": 64}
    made = around_create(dict, model_config=types.SimpleNamespace(context_len=1000), device="cpu", **given)
    assert made.entry_RLC.shape == (rows, 2, 6) and made.host_SLC.shape == (32, 2, 6)
    server_of(monkeypatch, None, enable_return_routed_experts=False)
    assert around_create(dict, **given) is None


class Row:
    """Stands for a request of SGLang whose prefill is over."""

    def __init__(self, rid: str, tokens: int = 0, retracted: bool = False, finished: bool = False, chunks: int = 0) -> None:
        self.rid = rid
        self.output_ids = [7] * tokens
        self.is_retracted = retracted
        self.inflight_middle_chunks = chunks
        self.done = finished
        self.scores = None
        self.sent = 0
        self.send_output_token_logprobs_offset = tokens

    def finished(self) -> bool:
        return self.done


def read_prefill(processor: Any, batch: Any, result: Any) -> str:
    """As SGLang reads a prefill's result: those passed over move no pointer, and all are streamed."""
    pointer = 0
    for row, length, start in zip(batch.reqs, result.extend_input_len_per_req, result.extend_logprob_start_len_per_req, strict=True):
        if (row.done and row.inflight_middle_chunks <= 0) or row.is_retracted:
            continue
        if row.inflight_middle_chunks <= 0:
            row.output_ids.append(7)
        row.scores = result.logits_output.input_token_logprobs[pointer : pointer + length - start].tolist()
        pointer += length - start
    for row in batch.reqs:
        row.send_output_token_logprobs_offset = max(len(row.output_ids), 1)
    return "read"


def test_stand_in_a_request_retracted_before_its_result_is_read_costs_no_log_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = types.SimpleNamespace(calculate_num_input_logprobs=lambda row, length, start: length - start)
    processor = types.SimpleNamespace(logprob_result_processor=counts)
    lengths = [3, 4, 2, 5, 2]
    starts = [0, 1, 0, 0, 2]
    column = torch.arange(13.0)

    def read(hooked: bool, backend: str = "zoo", retracted: bool = True) -> tuple[list[Row], list[str]]:
        server_of(monkeypatch, None, attention_backend=backend)
        rows = [Row("a"), Row("b", retracted=retracted), Row("c", tokens=4, finished=retracted), Row("d"), Row("e", chunks=1)]
        copied: list[str] = []
        result = types.SimpleNamespace(
            logits_output=types.SimpleNamespace(input_token_logprobs=column),
            extend_input_len_per_req=lengths,
            extend_logprob_start_len_per_req=starts,
            copy_done=types.SimpleNamespace(synchronize=lambda: copied.append("waited")),
        )
        batch = types.SimpleNamespace(reqs=rows, return_logprob=True)
        said = around_prefill_result(read_prefill, processor, batch, result) if hooked else read_prefill(processor, batch, result)
        assert said == "read"
        return rows, copied

    rows, copied = read(True)
    assert copied == ["waited"] and [row.scores for row in rows] == [[0.0, 1.0, 2.0], None, None, [8.0, 9.0, 10.0, 11.0, 12.0], []]
    # one more is sent than there is, but for those passed over and the piece of a prompt
    assert [(row.send_output_token_logprobs_offset, len(row.output_ids)) for row in rows] == [(1, 1), (0, 0), (4, 4), (1, 1), (0, 0)]
    # controls: without the hook, and in another server, the numbers are a neighbour's and an entry is lost
    for rows, copied in (read(False), read(True, backend="fa3")):
        assert copied == [] and rows[3].scores == [3.0, 4.0, 5.0, 6.0, 7.0] and rows[1].send_output_token_logprobs_offset == 1
    # nobody is passed over: SGLang's own
    rows, copied = read(True, retracted=False)
    assert copied == [] and [row.scores for row in rows[1:4]] == [[3.0, 4.0, 5.0], [6.0, 7.0], [8.0, 9.0, 10.0, 11.0, 12.0]]


def test_padding_is_clean_after_memory_comes_back() -> None:
    from importlib import import_module

    buffers = [[torch.full((4 * PAGE, 2, 4), torch.nan, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)]
    memory.KeyValuePool(*buffers, PAGE, torch.bfloat16).clear_padding()
    for buffer in (*buffers[0], *buffers[1]):
        assert buffer[:PAGE].eq(0).all() and buffer[PAGE:].isnan().all()
    page = import_module("zoo.sglang_plugin.register")
    cleared = []
    runner = types.SimpleNamespace(
        server_args=types.SimpleNamespace(attention_backend="zoo"),
        attn_backend=types.SimpleNamespace(clear_padding=lambda: cleared.append(1), draws=None),
    )
    updater = types.SimpleNamespace(tp_worker=types.SimpleNamespace(model_runner=runner))
    for tags, count in ((["weights"], 0), (["kv_cache"], 1), (None, 2), ([], 3)):
        page.after_resume(None, updater, types.SimpleNamespace(tags=tags))
        assert len(cleared) == count


def test_stand_in_a_server_adds_experts_in_its_familys_contributors(
    serving: Qwen3ForServing, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served(monkeypatch, serving, tmp_path / "usual")[1].zoo.program.contributors == 8
    monkeypatch.setattr(Qwen3ForServing, "family", dataclasses.replace(Qwen3ForServing.family, contributors=16))
    assert served(monkeypatch, serving, tmp_path / "other")[1].zoo.program.contributors == 16


def test_stand_in_every_write_is_inexact_until_a_flush(serving: Qwen3ForServing, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model and hooks; SGLang's scheduler, updater and runner are stand-ins."""
    from importlib import import_module

    hooks = import_module("zoo.sglang_plugin.register")
    args, model = served(monkeypatch, serving, tmp_path / "weights")
    published = [(name, tensor.clone()) for name, tensor in serving.published_tensors()]
    worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(server_args=args, model=model))
    updater = types.SimpleNamespace(tp_worker=worker, offload_tags=set(), is_fully_idle=lambda: True)
    scheduler = types.SimpleNamespace(server_args=args, tp_worker=worker)

    def exact() -> bool:
        said = WeightsColumn(model.weights)[0]
        assert said is None or said == model.fingerprint().weights[: names.WEIGHTS_DIGITS]
        return said is not None

    def release(*tags: str) -> None:
        updater.offload_tags |= set(tags)
        hooks.around_release(lambda *given: None, updater, types.SimpleNamespace(tags=list(tags)))

    model.load_weights(published)
    model.start(dummy=False)
    assert exact() and model.fingerprint().weights == serving.fingerprint().weights
    writes: dict[str, Callable[[], None]] = {
        "load": lambda: model.load_weights(published[:2]),
        "others": model.overwrite,
        "release": lambda: release("weights"),
    }
    for name, write in writes.items():
        launched = WeightsColumn(model.weights)
        before = model.fingerprint().weights
        parameter = next(model.parameters())
        write()
        assert not exact() and not launched[0], name
        # through .data, as what a write leaves behind torch's back: its hash was forgotten
        parameter.data.view(torch.int16)[0, 0] ^= 1
        assert model.fingerprint().weights != before, name
        assert hooks.after_flush(False, scheduler) is False and not exact(), name
        assert hooks.after_flush(True, scheduler) is True and exact() and not launched[0], name
    # the pages follow the weights, and SGLang flushes: nothing is exact by that
    release("kv_cache")
    assert not exact()
    # control: pages alone are no write
    updater.offload_tags.clear()
    hooks.after_flush(True, scheduler)
    release("kv_cache")
    assert exact()


def test_stand_in_session_of_updates() -> None:
    calls: list[str] = []

    def engine(opens: bool) -> Any:
        def call(name: str, done: bool) -> Callable[[], tuple[bool, str]]:
            return lambda: (calls.append(name) or done, "one is open already")  # type: ignore[func-returns-value]

        return types.SimpleNamespace(begin_weight_update=call("begin", opens), end_weight_update=call("end", True))

    with pytest.raises(KeyError), updating(engine(True)):
        raise KeyError  # an update that fails leaves no open session behind
    assert calls == ["begin", "end"]
    with pytest.raises(ValueError, match="session of weight updates: one is open already"), updating(engine(False)):
        calls.append("never")
    assert calls == ["begin", "end", "begin"]
    with updating(object()):
        calls.append("0.5.17 has none")
    assert calls[-1] == "0.5.17 has none"


@pytest.mark.parametrize("resolver", ["__post_init__", "resolve_once"])
def test_stand_in_registration(resolver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, Any, str]] = []
    registry = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = types.SimpleNamespace(register=lambda target, hook, kind: found.append((target, hook, kind)))  # type: ignore[attr-defined]
    registry.HookType = {"AROUND": "around", "AFTER": "after", "BEFORE": "before"}  # type: ignore[attr-defined]
    args = types.ModuleType("sglang.srt.server_args")
    # type: ignore[attr-defined]
    args.ATTENTION_BACKEND_CHOICES = ["fa3"]
    args.SAMPLING_BACKEND_CHOICES = {"pytorch"}
    args.add_attention_backend_choices = args.ATTENTION_BACKEND_CHOICES.extend  # type: ignore[attr-defined]
    args.ServerArgs = type("ServerArgs", (), {resolver: None})  # type: ignore[attr-defined]
    parsers = types.ModuleType("sglang.srt.configs.model_config_parser_registry")
    parsed: list[str] = []
    parsers.ModelConfigParserBase = object  # type: ignore[attr-defined]
    parsers.register_model_config_parser = lambda name: lambda cls: parsed.append(name)  # type: ignore[attr-defined]
    srt = types.ModuleType("sglang.srt")
    srt.server_args = args  # type: ignore[attr-defined]
    for name, module in (
        ("sglang", types.ModuleType("sglang")),
        ("sglang.srt", srt),
        ("sglang.srt.server_args", args),
        ("sglang.srt.plugins", types.ModuleType("sglang.srt.plugins")),
        (registry.__name__, registry),
        ("sglang.srt.configs", types.ModuleType("sglang.srt.configs")),
        (parsers.__name__, parsers),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    register()
    register()
    assert args.ATTENTION_BACKEND_CHOICES == ["fa3", "zoo", "zoo_unaligned"] and "zoo" in args.SAMPLING_BACKEND_CHOICES
    assert set(parsed) == {names.PARSER}
    assert len(found) == 2 * len(register.__globals__["hooks"]()) and all(target.startswith("sglang.srt.") for target, _, _ in found)
    assert found[0][:2] == (f"sglang.srt.server_args.ServerArgs.{resolver}", options.around_resolution)


def test_stand_in_hooks_return_at_once_for_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    page = import_module("zoo.sglang_plugin.register")
    other = types.SimpleNamespace(attention_backend="fa3")
    runner = types.SimpleNamespace(server_args=other)
    assert page.around_initialize(lambda r: ("original", r), runner) == ("original", runner)
    assert page.after_graph_runner(dict, runner) is dict
    assert page.after_validate("kept", types.SimpleNamespace(server_args=other), None, []) == "kept"
    assert page.after_internal_state("kept", types.SimpleNamespace(server_args=other), None) == "kept"
    tokenized = types.SimpleNamespace(sampling_params="kept")
    page.before_send(types.SimpleNamespace(server_args=other), tokenized)
    page.before_send_batch(types.SimpleNamespace(server_args=other), [tokenized])
    assert tokenized.sampling_params == "kept"
    updater = types.SimpleNamespace(tp_worker=types.SimpleNamespace(model_runner=runner))
    assert page.around_release(lambda *given: given, updater, "request") == (updater, "request")
    assert page.around_update(lambda *given: given, updater, "request") == (updater, "request")
    scheduler = types.SimpleNamespace(server_args=other)
    assert page.around_input(lambda *given: given, scheduler, "requests") == (scheduler, "requests")
    assert page.after_resume("kept", updater, None) == "kept"
    weights = types.SimpleNamespace(get_model_runner=lambda: runner)
    assert page.around_update_from_tensor(lambda *given: given, weights, [], "direct") == (weights, [], "direct")
    assert page.around_update_from_disk(lambda *given: given, weights, "path", "auto") == (weights, "path", "auto", None, False)
    assert page.after_flush("kept", types.SimpleNamespace(server_args=other)) == "kept"
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: other  # type: ignore[attr-defined]
    context.get_schedule = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert around_create(lambda **given: ("original", given), device="cuda") == ("original", {"device": "cuda"})
    assert around_collect(lambda p, req: "kept", None, types.SimpleNamespace(routed_experts=1, customized_info=None)) == "kept"
    assert page.after_sampling_info("kept", dict, None, 8) == "kept"


class DecodeRunner:
    """Stands for SGLang's runner of decode graphs with its full backend: a replay runs the captured function again."""

    def __init__(self, model: Any, backend: Any, args: Any) -> None:
        self.model_runner = types.SimpleNamespace(model=model, server_args=args)
        self.attn_backend = backend
        self.backend = self
        self.kept = {}
        self.order = []
        self._capture_one_stream()

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        self.order.append("decode")

    def _make_graph_key(self, size: int, stream_idx: int | None = None, variant_label: str | None = None) -> tuple[Any, ...]:
        return size, stream_idx, variant_label

    def load_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> str:
        self.order.append("loaded")
        return "as SGLang says"

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
        "arg_groups.overrides": {"resolved_view": lambda args: args},
        "layers.attention.base_attn_backend": {"AttentionBackend": object},
        **SAMPLING,
        "model_executor.forward_context": {"get_attn_backend": lambda: found.backend},
        "model_executor.runner.decode_cuda_graph_runner": {"DecodeCudaGraphRunner": DecodeRunner},
        "runtime_context": {"get_server_args": None},
        "state_capturer.routed_experts": {"get_global_experts_capturer": lambda: found.capturer},
    }
    for name, values in taken.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", types.SimpleNamespace(**values))  # type: ignore[arg-type]
    ours = [f"zoo.sglang_plugin.{name}" for name in ("backend", "sampler", "served", "graphs")]
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    try:
        found.backend_page, found.sampler, found.served, found.graphs = (importlib.import_module(name) for name in ours)
        yield found
    finally:
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@pytest.mark.parametrize(
    ("changed", "rows", "captured"),
    [
        ({}, 512, [512, 256, 128, 64]),
        ({"chunked_prefill_size": -1}, 100, [64]),
        ({"chunked_prefill_size": 128}, 512, [128, 64]),
        ({"disable_prefill_cuda_graph": True}, 512, []),
    ],
)
def test_stand_in_prefill_graphs_in_the_decode_runner(
    scheduler_pages: types.SimpleNamespace, changed: dict[str, Any], rows: int, captured: list[int]
) -> None:
    """Captured after decode's, the large first; a prefill that fits replays and its routing arrives; others run eagerly."""
    zoo = Qwen3ForServing.from_config(MOE_SIZES["tiny"], seed=3, device="cpu")
    c = zoo.config
    args = types.SimpleNamespace(**({"disable_prefill_cuda_graph": False, "chunked_prefill_size": 8192} | changed))
    model = scheduler_pages.served.Served.__new__(scheduler_pages.served.Served)
    torch.nn.Module.__init__(model)
    model.zoo = zoo
    model._checked = True
    model._returns_routing = True
    held = {3: list(range(40, 10, -2)), 1: list(range(41, 11, -2))}
    backend = scheduler_pages.backend_page.PagedBackend.__new__(scheduler_pages.backend_page.PagedBackend)
    backend.builder = memory.StepBuilder(request_table(held, 256), PAGE, 256, 256)
    backend.context = 256
    backend.device = "cpu"
    backend.prefills = None
    backend.pool = dirty_pool(zoo, 50)
    capturer = RoutingCapturer(c.layers, c.experts_per_token, rows, 50 * PAGE, "cpu")
    scheduler_pages.backend = backend
    scheduler_pages.capturer = capturer
    runner = scheduler_pages.graphs.BoundedGraphRunner(model, backend, args)
    assert runner.order == ["decode", *[(count, None, "prefill") for count in captured]]

    mode = types.SimpleNamespace(is_decode_or_idle=lambda: False)
    batch = types.SimpleNamespace(forward_mode=mode, return_logprob=False)
    model.weights = WeightsState(lambda: "ffff0123")
    before = {3: 0, 1: 0}
    replayed = []
    for counts in ({3: 60}, {3: 3, 1: 20}, {1: 70}):
        requests = list(counts)
        contexts = [before[r] for r in counts]
        before |= {r: before[r] + n for r, n in counts.items()}
        live = Rows.pushed(list(counts.values()), contexts, "cpu")
        slots = torch.tensor([s for r, b in zip(requests, contexts, strict=True) for s in slots_of(held[r], before[r])[b:]])
        ids = torch.randint(0, c.vocabulary, (live.count,))
        seen = []
        for eager, routing_on in ((True, True), (False, True), (False, False)):
            backend.forward_metadata = backend.builder.extend(
                torch.tensor(requests),
                live.lengths_N,
                live.positions_R,
                slots,
                torch.tensor(list(counts.values())),
                torch.tensor(contexts),
                list(counts.values()),
                contexts,
            )
            capturer.entry_RLC.fill_(-1)
            capturer.host_SLC.fill_(-1)
            kept = backend.prefills
            backend.prefills = None if eager else backend.prefills
            model._returns_routing = routing_on
            # where every request has max_new_tokens 0, no sampler names the weights
            batch.is_prefill_only = eager
            output = model.forward(ids, live.positions_R, batch)
            logits = output.next_token_logits
            said = output.customized_info
            assert said[WEIGHTS][0] == "ffff0123" if eager else said is None
            backend.prefills = kept
            capturer.on_forward_end(types.SimpleNamespace(out_cache_loc=slots), False, None)
            host = capturer.host_SLC.clone()
            seen.append((logits, host[slots]))
            host[slots] = -1
            assert host.eq(-1).all()  # no other token's entry is touched
            if not eager and routing_on:
                replayed.append(capturer.entry_RLC[live.count :].ge(0).any())
        eagerly, by_graph, unheard = seen
        assert eagerly[1].ge(0).all() and all(torch.equal(a, b) for a, b in zip(eagerly, by_graph, strict=True)), counts
        # control: a replay that does not write into the capturer is seen
        assert torch.equal(eagerly[0], unheard[0]) and not torch.equal(eagerly[1], unheard[1])
    # padded rows leave their routing behind the live ones, where nobody reads
    assert replayed == [64 in captured, 64 in captured, 128 in captured]


def test_stand_in_decode_graphs_draw_for_the_loaded_batch(scheduler_pages: types.SimpleNamespace) -> None:
    """Model, backend, runner and sampler are the plugin's; a replay runs the captured forward again over the batch that is loaded."""
    zoo = Qwen3ForServing.from_config(SIZES["tiny"], seed=3, device="cpu")
    model = scheduler_pages.served.Served.__new__(scheduler_pages.served.Served)
    torch.nn.Module.__init__(model)
    model.zoo = zoo
    model._checked = True
    model._returns_routing = False
    backend = scheduler_pages.backend_page.PagedBackend.__new__(scheduler_pages.backend_page.PagedBackend)
    backend.runner = types.SimpleNamespace(model=model)
    backend.builder = builder()
    backend.context = 128
    backend.device = "cpu"
    backend.pool = dirty_pool(zoo, 12)
    backend._capturing = None
    for pages in (*backend.pool.k_pages, *backend.pool.v_pages):
        pages.normal_(generator=torch.Generator().manual_seed(1))  # stands for a history
    backend.clear_padding()
    backend.init_cuda_graph_state(4, 4)
    scheduler_pages.backend = backend
    runner = scheduler_pages.graphs.BoundedGraphRunner.__new__(scheduler_pages.graphs.BoundedGraphRunner)
    runner.attn_backend = backend
    runner.order = []
    sampler = scheduler_pages.sampler.RowSampler()
    sampler.program = zoo.program
    sampler.weights = WeightsState(str)
    static = types.SimpleNamespace(
        forward_mode=types.SimpleNamespace(is_decode_or_idle=lambda: True),
        req_pool_indices=torch.zeros(4, dtype=torch.int64),
        seq_lens=torch.ones(4, dtype=torch.int64),
        positions=torch.zeros(4, dtype=torch.int64),
        seq_lens_cpu=torch.tensor([17, 9]),
        out_cache_loc=torch.zeros(4, dtype=torch.int64),
    )
    ids = torch.zeros(4, dtype=torch.int64)
    forward = partial(model.forward, ids, static.positions, static)
    with backend.capturing(SEGMENT):
        backend.init_forward_metadata_out_graph(static, in_capture=True)
        captured = forward()
    assert set(captured.customized_info) == {names.DRAWN} and not backend.captures
    assert forward().customized_info is None  # control: an eager step, which leaves the draw to the sampler

    rows = RowSampling.of([SamplingParams(seed=5), SamplingParams(temperature=0.7, seed=6)], [0, 0], "cpu")
    for asked, by_graph in ((rows, True), (rows, True), (dataclasses.replace(rows, filters=True), False), (None, False)):
        step = backend.draws.drawn
        ids[:2] = torch.tensor([4 + step, 9])
        static.req_pool_indices[:2] = torch.tensor([3, 1])
        static.seq_lens[:2] = torch.tensor([17 + step, 9])
        static.positions[:2] = static.seq_lens[:2] - 1
        static.out_cache_loc[:2] = torch.tensor([slots_of(HELD[3], 17 + step)[-1], slots_of(HELD[1], 9)[-1]])
        info = object() if asked is None else scheduler_pages.sampler.RowsBatchInfo(rows=asked)
        assert runner.load_batch(types.SimpleNamespace(sampling_info=info), None) == "as SGLang says"
        backend.init_forward_metadata_out_graph(static)
        with backend.capturing(SEGMENT):  # the replay
            again = forward()
        packed = captured.customized_info[names.DRAWN].packed.copy_(again.customized_info[names.DRAWN].packed)
        output = Output(again.next_token_logits[:2])
        output.customized_info = captured.customized_info
        if asked is None:
            continue
        token = sampler.forward(output, info, True, [0, 0], [None, None], static.positions[:2])
        wanted = ops.sample(output.next_token_logits, rows.at(torch.arange(2), static.positions[:2] + 1), zoo.program)
        assert torch.equal(token, wanted.token_R) and torch.equal(output.next_token_logprobs, wanted.log_prob_R)
        assert backend.draws.drawn - step == (2 if by_graph else 0)
        # the graph drew in any case: with filters nobody takes it
        assert torch.equal(packed[:4].view(torch.int64), wanted.token_R)
    assert runner.order == ["loaded"] * 4 and backend.draws.bound is rows


@pytest.mark.interpreted
@pytest.mark.parametrize("decode", [True, False])
def test_kernels_move_the_bytes_of_the_cpu_path(decode: bool) -> None:
    from zoo.sglang_plugin import kernels

    requests_N = torch.tensor([3, 5, 1])
    lengths_N = torch.tensor([17, 3, 9])
    outputs = []
    for make in (kernels.page_table, memory._page_table):
        table = torch.full((3, 4), -1, dtype=torch.int32)
        lengths = torch.zeros(3, dtype=torch.int32)
        tails = torch.zeros(3, dtype=torch.int32)
        make(request_table(HELD), requests_N, lengths_N, PAGE, table, lengths, tails if decode else None)
        outputs.append((table, lengths, tails))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    fused = torch.randn(3, 5 * 6).to(torch.bfloat16)
    k = fused[:, :12].view(3, 2, 6)
    v = fused[:, 12:24].view(3, 2, 6)
    slots = torch.tensor([72, 34, 8])
    tails = torch.tensor([7, 0, 20], dtype=torch.int32)
    pools = []
    for write in (kernels.append, memory._append):
        pool = [torch.full((12 * PAGE, 2, 6), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
        write(k, v, *pool, slots, tails, decode)
        pools.append(pool)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(*pools, strict=True))
    assert torch.equal(pools[0][0][72], k[0]) and pools[0][1][73:80].eq(0).all() and pools[0][0][80].isnan().all()
