"""Kernels are compiled while a server starts, and what is compiled once it takes requests is counted."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from zoo.common.compilations import watch
from zoo.common.rehearsal import rehearse

logger = logging.getLogger(__name__)

TOLD = "zoo: kernels were not all compiled at start, and will be when they are first met: %s"
REQUESTS = 256  # at once, where SGLang decides on their number only after it has measured the memory


def rehearse_model(runner: Any) -> None:
    """Pushes rows of every count that the options allow through a loaded model, before SGLang measures what memory is left.

    Left out with --skip-server-warmup, for those who want a server soon: kernels compile when they are first met.
    """
    args = runner.server_args
    if args.skip_server_warmup:
        return
    begin = time.monotonic()
    model = runner.model
    if not model.complete:  # weights that are to be pushed: what lies there may be no numbers
        with torch.no_grad():
            for parameter in model.zoo.parameters():
                parameter.zero_()
    try:
        found = rehearse(
            model.zoo,
            chunk_rows=args.chunked_prefill_size if args.chunked_prefill_size > 0 else args.max_prefill_tokens,
            max_batch=args.max_running_requests or REQUESTS,
            page_size=args.page_size,
        )
    except Exception as error:  # nothing but time depends on it
        logger.warning(TOLD, error or type(error).__name__)
    else:
        logger.info("zoo: %d kernel variants were compiled or found on disk in %.0f s", found, time.monotonic() - begin)
    if model.zoo.device.type == "cuda":
        torch.cuda.empty_cache()


def begin(scheduler: Any) -> None:
    """At the first pass of the scheduler's loop, when graphs are captured: what is compiled from here on makes somebody wait."""
    model = scheduler.tp_worker.model_runner.model
    if model.takes_requests:
        return
    model.takes_requests = True
    if not scheduler.server_args.skip_server_warmup:
        try:
            rehearse_batches(scheduler)
        except Exception as error:  # nothing but time depends on it
            logger.warning(TOLD, error or type(error).__name__)
    watch().ready()


def rehearse_batches(scheduler: Any) -> None:
    """SGLang's kernels around a batch, which compile by its number of requests: slots, its request table, positions. It keeps no slot."""
    from sglang.srt.mem_cache.allocation import write_cache_indices
    from sglang.srt.model_executor.forward_batch_info import compute_position

    allocator = scheduler.token_to_kv_pool_allocator
    backend = scheduler.tp_worker.model_runner.attn_backend
    device = backend.device
    free = allocator.free_pages
    for batch in batches(min(scheduler.max_running_requests, len(free))):
        none = torch.zeros(batch, dtype=torch.int64)
        one = torch.ones(batch, dtype=torch.int64)
        lengths = one.to(device)
        last = torch.full((batch,), -1, device=device)
        allocator.alloc_extend(none.to(device), none, lengths, one, last, batch)
        allocator.free_pages = free
        allocator.alloc_decode(lengths, one, last.int())  # as SGLang reads it from its request table
        allocator.free_pages = free
    none = none.to(device)
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    host = none.cpu()
    write_cache_indices(
        out_cache_loc=nobody,
        req_pool_indices_tensor=none,
        req_pool_indices_cpu=host,
        prefix_lens_tensor=none,
        prefix_lens_cpu=host,
        seq_lens_tensor=none,
        seq_lens_cpu=host,
        extend_lens_tensor=none,
        extend_lens_cpu=host,
        prefix_tensors=[nobody] * batch,
        req_to_token_pool=scheduler.req_to_token_pool,
    )
    counts = lengths.int()
    positions, _ = compute_position(scheduler.server_args.attention_backend, none.int(), counts, batch)
    backend.builder.extend(none, lengths, positions, none, counts, none.int(), [1] * batch, [0] * batch)
    backend.builder.decode(none, lengths, none, none, 1)


def batches(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`: what SGLang's kernels round a number of requests to."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]
