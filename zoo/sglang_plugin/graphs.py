"""Decode graphs, one per batch size and bound on the sequences' length, and prefill graphs. Imported in the scheduler only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from zoo.sglang_plugin.backend import PagedBackend
from zoo.sglang_plugin.memory import PrefillSteps
from zoo.sglang_plugin.options import resolved
from zoo.sglang_plugin.sampler import RowsBatchInfo
from zoo.sglang_plugin.served import Served

logger = logging.getLogger(__name__)

PREFILL = "prefill"  # keeps its graphs apart from decode's of as many rows


class BoundedGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner, with its graph variants (made for LoRA, which is refused) used for lengths.

    The bytes of a row don't depend on the bound: a sequence within one segment has one part, and one part merges into itself.
    They draw as well (`GraphDraws`), with the parameters of the batch that is loaded.
    Prefill graphs live in it too, so they are captured, released, resumed and captured again with decode's. SGLang still takes a
    prefill for an eager one; `Served.forward` replays.
    """

    attn_backend: PagedBackend

    def capture_one_shape(
        self, size: int, forward: Callable[..., Any], stream_idx: int | None = None, variant_label: str | None = None, *more: Any
    ) -> None:
        assert self.attn_backend.graphs is not None
        for length in self.attn_backend.graphs.lengths:
            with self.attn_backend.capturing(length):
                super().capture_one_shape(size, forward, stream_idx, str(length), *more)

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        super()._capture_one_stream(stream_idx)
        backend = self.attn_backend
        model = self.model_runner.model
        args = resolved(self.model_runner.server_args)
        assert isinstance(model, Served)
        most = 0 if args.disable_prefill_cuda_graph else model.most_rows(args.chunked_prefill_size)
        length = min(model.zoo.captured_length, backend.context)
        backend.prefills = prefills = PrefillSteps(backend.builder, length, most, backend.device)
        for count, step in sorted(prefills.steps.items(), reverse=True):  # as SGLang does: the small share the memory of the large
            key = self._make_graph_key(count, stream_idx, PREFILL)
            self.backend.capture_one(key, partial(model.hidden_rows, step.padded.ids_R, step.step, backend))
            prefills.replays[count] = partial(self.backend.replay, key, None)
        logger.info("zoo: prefill captured for %s rows, sequences of up to %d tokens", [*prefills.replays][::-1] or "no", length)

    def load_batch(self, forward_batch: Any, *more: Any, **named: Any) -> Any:
        loaded = super().load_batch(forward_batch, *more, **named)
        info = forward_batch.sampling_info
        draws = self.attn_backend.draws
        assert draws is not None
        draws.bind(info.rows if isinstance(info, RowsBatchInfo) else None)
        return loaded

    def _resolve_lora_variant(self, forward_batch: Any) -> str:
        return str(self.attn_backend.graph_length(forward_batch.seq_lens_cpu))
