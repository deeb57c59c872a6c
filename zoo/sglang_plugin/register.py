"""The entry point: choices, and hooks that return at once in a server with another backend.

Each hook (SGLang's HookRegistry), and why no registry does it. SGLang only logs a hook that it could not apply, so the main process
asserts before it resolves its options that every one is active, and the scheduler when its model is loaded. If SGLang does not call a
hooked method at all, who notices is said here.

- around ServerArgs.__post_init__ (resolve_once where SGLang has it): one option implies others before they are resolved. The scheduler
  asserts its mark.
- around ModelRunner.initialize: backend, sampler and models enter their registries only where they are used. Without it
  `--attention-backend zoo` is unknown to the scheduler.
- around PagedTokenToKVPoolAllocator.alloc_extend: SGLang's kernel takes pages of a power of two only; for others it is asked for
  the same slots here.
- around PagedTokenToKVPoolAllocator.alloc_decode: a decode step that starts no page needs none of SGLang's kernel.
- after ModelRunner._decode_cuda_graph_runner_cls: graphs per bound on the length. The backend refuses to be captured otherwise.
- after SamplingBatchInfo.from_schedule_batch: FP32 temperature and top_p are too coarse, seeds are dropped. The sampler refuses
  the batch.
- after TokenizerManager._validate_one_request: a request is answered by 400 before it runs. Sampling parameters that came another way
  would end the scheduler, so servers whose requests do are refused at start.
- before TokenizerManager._send_one_request and _send_batch_request: each sample gets a seed of its own. The sampler refuses a request
  without one, and the client's `record` an answer of another seed than were asked for.
- after Scheduler.get_internal_state: the fingerprint's route. The client's `fingerprint` says so.
- around RoutedExpertsCapturer.create: SGLang's own keeps experts without their weights. The model refuses to hand it routing.
- around SchedulerBatchResultProcessor._maybe_collect_routed_experts: what a finished answer is to (its prompt's digest and its seed) goes
  to the client, and the weights beside the experts. The client's `record` refuses an answer without the former.
- around SchedulerBatchResultProcessor.process_batch_result_prefill: a request that was retracted before its prefill's result is read
  keeps its first log-probability, and those behind it in the batch their own prompts'. The client's `record` refuses lists of other
  lengths than the answer's.
- around SchedulerWeightUpdaterManager.release_memory_occupation: memory comes back without the weights, which is a write: their
  content hash is forgotten, and no cached row is of them. Behind an answer it waits until its request no longer counts as running,
  where SGLang asserts.
- after SchedulerWeightUpdaterManager.resume_memory_occupation: what padding rows read (request 0, page 0, slot 0) is zero again,
  and decode graphs are given their rows' parameters anew.
- around SchedulerWeightUpdaterManager.update_weights_from_tensor, _disk, _distributed and _ipc: one that flushes the cache waits in the
  same way, or is refused while requests are paused, where SGLang writes and then asserts that it could flush.
- around Scheduler.process_input_requests: what waited is dispatched again, and from the first pass on compilations are counted. Without it
  such a call is not answered, and the count stays 0.
- around WeightUpdater.update_weights_from_tensor and update_weights_from_disk: a faulty update is answered, where SGLang would end
  the scheduler or write a part; one that would not pass the model's checks is refused.
- after Scheduler.flush_cache: from here on no row of earlier weights is read. Without it every later answer says that it is not exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zoo.common.compilations import keep, watch
from zoo.sglang_plugin.capturer import around_collect, around_create
from zoo.sglang_plugin.hooked import REGISTERED, SRT
from zoo.sglang_plugin.names import PROGRAMS, SAMPLER, STATE
from zoo.sglang_plugin.options import DUMMY, around_resolution
from zoo.sglang_plugin.parser import register_parser
from zoo.sglang_plugin.results import around_prefill_result
from zoo.sglang_plugin.seeds import SAMPLES, Samples, before_send, before_send_batch
from zoo.sglang_plugin.slots import around_alloc_decode, around_alloc_extend
from zoo.sglang_plugin.waiting import around_input, around_update, waits_for_release

logger = logging.getLogger(__name__)

# SGLang's tags of memory that is released and resumed: with its key-value pool, with the model
KV_MEMORY = "kv_cache"
WEIGHTS_MEMORY = "weights"
PAGES = "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
REQUESTS = "managers.tokenizer_manager.TokenizerManager"
RESULTS = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
MEMORY = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATER = "model_executor.model_runner_components.weight_updater.WeightUpdater"
UPDATE_FORMATS = (None, "flattened_bucket")  # of tensors: those that go through the model's load_weights


def register() -> None:
    """Called by SGLang in every process that loads plugins. It creates no CUDA context and loads no model."""
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args.add_attention_backend_choices([name for name in PROGRAMS if name not in server_args.ATTENTION_BACKEND_CHOICES])
    server_args.SAMPLING_BACKEND_CHOICES.add(SAMPLER)
    for target, hook, kind in hooks():
        HookRegistry.register(f"{SRT}.{target}", hook, HookType[kind])
        REGISTERED.append(target)
    register_parser()


def hooks() -> list[tuple[str, Callable[..., Any], str]]:
    """(target below sglang.srt, hook, kind) of every hook."""
    return [
        (f"server_args.ServerArgs.{resolver()}", around_resolution, "AROUND"),
        ("model_executor.model_runner.ModelRunner.initialize", around_initialize, "AROUND"),
        (PAGES + ".alloc_extend", around_alloc_extend, "AROUND"),
        (PAGES + ".alloc_decode", around_alloc_decode, "AROUND"),
        ("model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls", after_graph_runner, "AFTER"),
        ("sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", after_sampling_info, "AFTER"),
        (REQUESTS + "._validate_one_request", after_validate, "AFTER"),
        (REQUESTS + "._send_one_request", before_send, "BEFORE"),
        (REQUESTS + "._send_batch_request", before_send_batch, "BEFORE"),
        ("managers.scheduler.Scheduler.get_internal_state", after_internal_state, "AFTER"),
        ("state_capturer.routed_experts.RoutedExpertsCapturer.create", around_create, "AROUND"),
        (RESULTS + "._maybe_collect_routed_experts", around_collect, "AROUND"),
        (RESULTS + ".process_batch_result_prefill", around_prefill_result, "AROUND"),
        (MEMORY + ".release_memory_occupation", around_release, "AROUND"),
        (MEMORY + ".resume_memory_occupation", after_resume, "AFTER"),
        *((f"{MEMORY}.update_weights_from_{source}", around_update, "AROUND") for source in ("tensor", "disk", "distributed", "ipc")),
        ("managers.scheduler.Scheduler.process_input_requests", around_input, "AROUND"),
        (UPDATER + ".update_weights_from_tensor", around_update_from_tensor, "AROUND"),
        (UPDATER + ".update_weights_from_disk", around_update_from_disk, "AROUND"),
        ("managers.scheduler.Scheduler.flush_cache", after_flush, "AFTER"),
    ]


def resolver() -> str:
    """The method of ServerArgs that resolves the options: in SGLang 0.5.23 no longer their construction."""
    from sglang.srt.server_args import ServerArgs

    return "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"


def around_initialize(original: Callable[..., Any], runner: Any) -> Any:
    """Registers backend, sampler and models, lets the runner build them, then asserts that they are what runs."""
    args = runner.server_args
    if args.attention_backend not in PROGRAMS:
        return original(runner)
    keep()
    register_classes()
    result = original(runner)
    from zoo.common.fingerprint import products
    from zoo.sglang_plugin.check import assert_active
    from zoo.sglang_plugin.rehearsal import rehearse_model

    runner.model.start(dummy=args.load_format == DUMMY)
    # before SGLang measures what is left for its key-value pool
    with runner.memory_saver_adapter.region(KV_MEMORY):
        runner.model.reserve(args.max_running_requests)
    rehearse_model(runner)
    runner.sampler.program = runner.model.zoo.program
    runner.sampler.weights = runner.model.weights
    assert_active(runner)
    printed = runner.model.zoo.fingerprint()
    weights = printed.weights if runner.model.complete else "are not there yet: push all of them"
    lines = ", ".join(f"{k}={v}" for k, v in printed.program.items())
    logger.info("zoo: %s serves %s; weights %s; %s", args.attention_backend, type(runner.model.zoo).__name__, weights, lines)
    made = printed.realisation
    logger.info("zoo: %s", ", ".join(f"{k} by {v}" for k, v in products(made).items()))
    if PROGRAMS[args.attention_backend] == "aligned" and made["qualification"] != "qualified":
        logger.warning("zoo: not every faster provider is qualified on this GPU and toolchain: run `zoo qualify` once; bytes are the same")
    return result


def register_classes() -> None:
    """The scheduler's registries: attention backend, sampler, model classes."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.models.registry import ModelRegistry

    from zoo.sglang_plugin.backend import PagedBackend
    from zoo.sglang_plugin.sampler import RowSampler

    for name in PROGRAMS:
        if name not in ATTENTION_BACKENDS:
            register_attention_backend(name)(PagedBackend)
    register_sampler_backend(SAMPLER, RowSampler)
    ModelRegistry.register("zoo.sglang_plugin.models", overwrite=True, strict=True)


def after_graph_runner(result: type, runner: Any) -> type:
    if runner.server_args.attention_backend not in PROGRAMS:
        return result
    from zoo.sglang_plugin.graphs import BoundedGraphRunner

    return BoundedGraphRunner


def after_sampling_info(result: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    from sglang.srt.runtime_context import get_server_args

    if get_server_args().attention_backend not in PROGRAMS:
        return result
    from zoo.sglang_plugin.sampler import with_rows

    return with_rows(result, batch.reqs, batch.device)


def after_validate(result: Any, manager: Any, obj: Any, input_ids: list[int]) -> Any:
    if manager.server_args.attention_backend in PROGRAMS:
        from zoo.sglang_plugin.requests import check_request

        check_request(obj, input_ids, manager.model_config.vocab_size)
        setattr(obj, SAMPLES, Samples())
    return result


def after_internal_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
    if scheduler.server_args.attention_backend in PROGRAMS:
        from zoo.sglang_plugin.check import assert_unhooked

        released = WEIGHTS_MEMORY in scheduler.weight_updater.offload_tags
        runner = scheduler.tp_worker.model_runner
        draws = runner.attn_backend.draws
        prefills = runner.attn_backend.prefills
        printed = None
        if not released:
            assert_unhooked(runner.model)  # SGLang has options that register some after the model was loaded
            printed = runner.model.fingerprint()
        seen = watch()
        seen.look("serving")
        result.internal_state[STATE] = {
            "fingerprint": None if printed is None else printed.to_dict(),
            "prefill_graph_rows": 0 if prefills is None else prefills.pushed,
            "drawn_in_graphs": 0 if draws is None else draws.drawn,
            "compilations": seen.after_ready,
        }
    return result


def around_release(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """SGLang's answer, or None while the request waits for an idle scheduler."""
    runner = updater.tp_worker.model_runner
    if runner.server_args.attention_backend not in PROGRAMS:
        return original(updater, recv_req)
    if waits_for_release(updater, recv_req):
        return None
    result = original(updater, recv_req)
    # at every release while they are away: SGLang flushes when the pages follow, and that makes nothing exact
    if WEIGHTS_MEMORY in updater.offload_tags:
        runner.model.overwrite()
    return result


def after_resume(result: Any, updater: Any, recv_req: Any) -> Any:
    runner = updater.tp_worker.model_runner
    if runner.server_args.attention_backend in PROGRAMS:
        backend = runner.attn_backend
        if not recv_req.tags or KV_MEMORY in recv_req.tags:
            backend.clear_padding()
        if backend.draws is not None:
            backend.draws.bound = None  # a batch that was paused keeps its rows, the columns are whatever came back
    return result


def around_update_from_tensor(original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None) -> Any:
    """(success, message). ValueErrors and what SGLang raises are answered; the model checks all tensors before it writes one."""
    if not _of_zoo(updater):
        return original(updater, named_tensors, load_format)
    if load_format not in UPDATE_FORMATS:
        return False, f"load_format {load_format!r} writes past the checks of the zoo's backend: leave it out, or send flattened buckets"
    return _answered(lambda: original(updater, named_tensors, load_format))


def around_update_from_disk(
    original: Callable[..., Any],
    updater: Any,
    model_path: str,
    load_format: str,
    weight_name_filter: Callable[[str], bool] | None = None,
    recapture_cuda_graph: bool = False,
) -> Any:
    """(success, message). The files are read twice: once to check every tensor, and only then into the parameters."""
    if not _of_zoo(updater):
        return original(updater, model_path, load_format, weight_name_filter, recapture_cuda_graph)
    model = updater.get_model()
    before = updater.model_config.model_path
    model.checking = True
    try:
        found = _answered(lambda: original(updater, model_path, load_format, weight_name_filter, False))
    finally:
        model.checking = False
    if found[0]:
        found = _answered(lambda: original(updater, model_path, load_format, weight_name_filter, recapture_cuda_graph))
    if not found[0]:
        updater.model_config.model_path = before
    return found


def _of_zoo(updater: Any) -> bool:
    return updater.get_model_runner().server_args.attention_backend in PROGRAMS


def _answered(update: Callable[[], Any]) -> Any:
    """What an update answers; what it raises becomes an answer too, since SGLang's scheduler would end."""
    try:
        return update()
    except Exception as error:
        return False, f"the weights were not updated: {error or type(error).__name__}"


def after_flush(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if scheduler.server_args.attention_backend in PROGRAMS and result:
        model = scheduler.tp_worker.model_runner.model
        model.weights.flushed = model.complete
    return result
