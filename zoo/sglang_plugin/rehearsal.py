"""Kernels are compiled while a server starts, and what is compiled once it takes requests is counted."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from zoo.common.compilations import watch
from zoo.common.rehearsal import rehearse

logger = logging.getLogger(__name__)

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
    found = rehearse(
        model.zoo,
        chunk_rows=args.chunked_prefill_size if args.chunked_prefill_size > 0 else args.max_prefill_tokens,
        max_batch=args.max_running_requests or REQUESTS,
        page_size=args.page_size,
    )
    if model.zoo.device.type == "cuda":
        torch.cuda.empty_cache()
    logger.info("zoo: %d kernel variants were compiled or found on disk in %.0f s", found, time.monotonic() - begin)


def mark_ready(model: Any) -> None:
    """At the first pass of the scheduler's loop, when graphs are captured: what is compiled from here on makes somebody wait."""
    if not model.takes_requests:
        model.takes_requests = True
        watch().ready()
