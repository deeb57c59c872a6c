"""Is it on? Read back what a scheduler really runs."""

from __future__ import annotations

from typing import Any

from zoo.sglang_plugin.names import PROGRAMS
from zoo.sglang_plugin.options import CHECKED
from zoo.sglang_plugin.slots import power_of_two


def assert_active(runner: Any) -> None:
    """RuntimeError naming the first part of a model runner that is not the zoo's."""
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from zoo.sglang_plugin.sampler import RowSampler
    from zoo.sglang_plugin.served import Served

    args = runner.server_args
    if args.attention_backend not in PROGRAMS:
        raise RuntimeError(f"the server's attention backend is {args.attention_backend}")
    if not getattr(args, CHECKED, False):
        raise RuntimeError("the server's options were not checked: the hook on ServerArgs is not active")
    if not isinstance(runner.model, Served):
        raise RuntimeError(f"the model is {type(runner.model).__module__}.{type(runner.model).__name__}, not the zoo's")
    if not isinstance(runner.sampler, RowSampler):
        raise RuntimeError(f"the sampler is {type(runner.sampler).__name__}, not the zoo's")
    if not power_of_two(args.page_size) and not hasattr(PagedTokenToKVPoolAllocator.alloc_extend, "__wrapped__"):
        raise RuntimeError(f"pages of {args.page_size} can't be handed out: the hook on alloc_extend is not active")
    if not hasattr(PagedTokenToKVPoolAllocator.alloc_decode, "__wrapped__"):
        raise RuntimeError("every decode step would launch SGLang's kernel for its slots: the hook on alloc_decode is not active")
    if args.enable_return_routed_experts and not hasattr(SchedulerBatchResultProcessor._maybe_collect_routed_experts, "__wrapped__"):
        raise RuntimeError("routing weights would not be returned: the hook on _maybe_collect_routed_experts is not active")
    wanted = PROGRAMS[args.attention_backend]
    if runner.model.zoo.program.name != wanted or runner.sampler.program != runner.model.zoo.program:
        raise RuntimeError(f"the model runs program {runner.model.zoo.program.name}, not {wanted}")
