"""Routed experts with their weights, kept per token slot. It stands where SGLang's own capturer does, which keeps experts alone.

A token's entry is what `route` gave at its row, [layers, 2 K] int32: K experts in slot order, then the bits of their K FP32 weights.
It lies on the host by the token's slot, like its keys and values, so a prefix from the cache has it too.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.sglang_plugin.columns import Uncut
from zoo.sglang_plugin.names import PROGRAMS, REQUEST, ROUTING_WEIGHTS, WEIGHTS
from zoo.sglang_plugin.requests import prompt_digest


@dataclass
class Taken:
    """A forward's entries on their way to the host: SGLang maps its tensors to copies, and finishes once these are there."""

    slot_R: Tensor
    entry_RLC: Tensor
    host_SLC: Tensor

    def map_device_tensors(self, copy: Callable[[Tensor], Tensor]) -> None:
        self.slot_R = copy(self.slot_R)
        self.entry_RLC = copy(self.entry_RLC)

    def finalize(self) -> None:
        self.host_SLC[self.slot_R] = self.entry_RLC


class RoutingCapturer:
    """What SGLang calls after each forward, and for each finished request that asked for routed experts.

    rows   most rows of one forward; their tensor is never replaced, since CUDA graphs write into it
    slots  token slots of the key-value pool
    """

    def __init__(self, layers: int, top_k: int, rows: int, slots: int, device: torch.device | str) -> None:
        self.rows = rows
        self.top_k = top_k
        self.entry_RLC = torch.zeros(rows, layers, 2 * top_k, dtype=torch.int32, device=device)
        self.host_SLC = torch.zeros(slots, layers, 2 * top_k, dtype=torch.int32)
        self._weights: Tensor | None = None

    def write(self, layer: int, weights_RK: Tensor, experts_RK: Tensor) -> None:
        """One layer's routing of the forward now running, or of each replay of the graph now captured: padding's rows come last."""
        assert weights_RK.dtype == torch.float32
        rows_RC = self.entry_RLC[: len(experts_RK), layer]
        rows_RC[:, : self.top_k] = experts_RK
        rows_RC[:, self.top_k :] = weights_RK.view(torch.int32)

    def on_forward_end(self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: Any, no_copy_to_cpu: bool = False) -> Taken | None:
        """The rows just written, or None if they went to the host at once.

        A copy of them: SGLang brings it to the host on another stream, while the next forward writes already.
        """
        slot_R = forward_batch.out_cache_loc
        taken = Taken(slot_R, self.entry_RLC[: len(slot_R)].clone(), self.host_SLC)
        if no_copy_to_cpu:
            return taken
        taken.map_device_tensors(lambda tensor: tensor.cpu())
        taken.finalize()
        return None

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Tensor:
        """int32 [tokens, layers, K]: experts of tokens `start_len` to `seqlen - 2` of a request. `weights` has the rest."""
        slots = req_to_token_pool.req_to_token[req_pool_idx, min(start_len, seqlen - 1) : seqlen - 1].cpu()
        entry_RLC = self.host_SLC[slots]
        self._weights = entry_RLC[..., self.top_k :].contiguous().view(torch.float32)
        return entry_RLC[..., : self.top_k].contiguous()

    def destroy(self) -> None:
        """SGLang 0.5.23 calls it at its end."""

    def weights(self) -> Tensor:
        """FP32 [tokens, layers, K], beside the experts that `get_topk` gave last."""
        weights = self._weights
        self._weights = None
        assert weights is not None
        return weights


def around_create(original: Callable[..., Any], **given: Any) -> Any:
    """Hook around `RoutedExpertsCapturer.create`, which gives None unless the server returns routed experts."""
    from sglang.srt.runtime_context import get_schedule, get_server_args

    args = get_server_args()
    if args.attention_backend not in PROGRAMS:
        return original(**given)
    if not args.enable_return_routed_experts:
        return None
    config = given["model"].zoo.config
    running = given["max_running_requests"]
    chunk = get_schedule().chunked_prefill_size
    # without chunks a prefill takes whole prompts until it has enough
    most = chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens + given["model_config"].context_len
    return RoutingCapturer(config.layers, config.experts_per_token, max(most, running), given["num_tokens"], given["device"])


def around_collect(original: Callable[..., Any], processor: Any, req: Any) -> Any:
    """Hook around `SchedulerBatchResultProcessor._maybe_collect_routed_experts`, which a request meets once, when it ends.

    SGLang returns a list with an entry per output token under each name of `customized_info`; the last one says what is of the whole
    request. Of a request without output tokens it would return none: what its only step says comes after this, into an uncut list.
    """
    result = original(processor, req)
    if not active():
        return result
    silent = not req.output_ids_through_stop
    if silent:
        req.customized_info = {WEIGHTS: Uncut()}
    if req.customized_info is None:
        req.customized_info = {}

    def say_last(name: str, value: Any) -> None:
        entries = [None] * (len(req.output_ids_through_stop) - 1) + [value]
        req.customized_info[name] = Uncut(entries) if silent else entries

    say_last(REQUEST, {"prompt": prompt_digest(req.origin_input_ids), "seed": req.sampling_params.sampling_seed})
    if req.routed_experts is not None:
        say_last(ROUTING_WEIGHTS, base64.b64encode(capturer().weights().numpy().tobytes()).decode())
    return result


def active() -> bool:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args().attention_backend in PROGRAMS


def capturer() -> RoutingCapturer:
    """This process's. RuntimeError if it is SGLang's own."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    found = get_global_experts_capturer()
    if not isinstance(found, RoutingCapturer):
        raise RuntimeError(f"routed experts are captured by {type(found).__name__}: the hook on RoutedExpertsCapturer.create is not active")
    return found
