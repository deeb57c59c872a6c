"""A request that needs an idle scheduler and comes right behind an answer, while the finished request still counts as running.

SGLang asserts that it is idle, and of an update only after the weights were written (0.5.17: that ends the server; 0.5.23 answers that
the cache was not flushed). Here the request waits, and the loop goes on: it is dispatched again with the next pass's requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from zoo.sglang_plugin.names import PROGRAMS
from zoo.sglang_plugin.rehearsal import begin

PAUSED = (
    "requests are paused and the cache can't be flushed: continue them first, or send flush_cache=False and call flush_cache "
    "after the last part"
)


def around_update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """SGLang's answer, or None while the request waits. Paused requests don't end: the model refuses, once a process group has received."""
    runner = manager.tp_worker.model_runner
    if runner.server_args.attention_backend not in PROGRAMS or not recv_req.flush_cache or flushable(manager):
        return original(manager, recv_req)
    if not manager.scheduler._engine_paused:
        return runner.model.waiting.append(recv_req)
    runner.model.refusal = PAUSED
    try:
        return original(manager, recv_req)
    finally:
        runner.model.refusal = None


def waits_for_release(manager: Any, recv_req: Any) -> bool:
    """Whether memory can't be handed back yet; then the request waits."""
    if flushable(manager) or manager.scheduler._engine_paused:
        return False
    manager.tp_worker.model_runner.model.waiting.append(recv_req)
    return True


def around_input(original: Callable[..., Any], scheduler: Any, recv_reqs: Any) -> Any:
    """Hook around `Scheduler.process_input_requests`, once per pass of its loop: those that waited come first."""
    if scheduler.server_args.attention_backend in PROGRAMS:
        begin(scheduler)
        model = scheduler.tp_worker.model_runner.model
        if model.waiting:
            waited = model.waiting
            model.waiting = []
            recv_reqs = [*waited, *recv_reqs]
    return original(scheduler, recv_reqs)


def flushable(manager: Any) -> bool:
    """What SGLang's flush asks: no request runs or waits, in 0.5.23 none but those that wait while paused."""
    idle = manager.is_fully_idle
    if "ignore_waiting" in inspect.signature(idle).parameters:
        return bool(idle(ignore_waiting=manager.scheduler._engine_paused))
    return bool(idle())
