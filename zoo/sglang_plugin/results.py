"""What SGLang loses when it reads a prefill's result and passes over a request in it: one that was retracted while the prefill ran.

The request itself is streamed with no token yet, and SGLang (0.5.17; mended in 0.5.23) then counts one log-probability as sent.
The requests behind it in the batch get prompt log-probabilities that begin with those of the one passed over (0.5.23 too).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.sglang_plugin.capturer import active


def around_prefill_result(original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> Any:
    """Hook around `SchedulerBatchResultProcessor.process_batch_result_prefill`: once per prefill, never in a decode step."""
    passed = [passed_over(req) for req in batch.reqs]
    if not any(passed) or not active():
        return original(processor, batch, result)
    if batch.return_logprob and result.logits_output.input_token_logprobs is not None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        result.logits_output.input_token_logprobs = _of_the_others(processor, batch, result, passed)
    done = original(processor, batch, result)
    for req in batch.reqs:
        # what was sent is at most what there is
        req.send_output_token_logprobs_offset = min(req.send_output_token_logprobs_offset, len(req.output_ids))
    return done


def passed_over(req: Any) -> bool:
    """SGLang's own condition."""
    return (req.finished() and req.inflight_middle_chunks <= 0) or req.is_retracted


def _of_the_others(processor: Any, batch: Any, result: Any, passed: list[bool]) -> torch.Tensor:
    """The batch's prompt log-probabilities [W] without those of the requests that are passed over."""
    column_W = result.logits_output.input_token_logprobs
    kept = []
    begin = 0
    lengths = zip(result.extend_input_len_per_req, result.extend_logprob_start_len_per_req, strict=True)
    for req, skip, (length, start) in zip(batch.reqs, passed, lengths, strict=True):
        end = begin + max(processor.logprob_result_processor.calculate_num_input_logprobs(req, length, start), 0)
        if not skip:
            kept.append(column_W[begin:end])
        begin = end
    assert begin == len(column_W), f"{len(column_W)} prompt log-probabilities, {begin} are counted"
    return torch.cat(kept) if kept else column_W[:0]
