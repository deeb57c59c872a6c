"""Decode graphs, one per batch size and bound on the sequences' length. Imported in the scheduler only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from zoo.sglang_plugin.backend import PagedBackend


class BoundedGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner, with its graph variants (made for LoRA, which is refused) used for lengths.

    The bytes of a row don't depend on the bound: a sequence within one segment has one part, and one part merges into itself.
    """

    attn_backend: PagedBackend

    def capture_one_shape(
        self, size: int, forward: Callable[..., Any], stream_idx: int | None = None, variant_label: str | None = None, *more: Any
    ) -> None:
        assert self.attn_backend.graphs is not None
        for length in self.attn_backend.graphs.lengths:
            with self.attn_backend.capturing(length):
                super().capture_one_shape(size, forward, stream_idx, str(length), *more)

    def _resolve_lora_variant(self, forward_batch: Any) -> str:
        return str(self.attn_backend.graph_length(forward_batch.seq_lens_cpu))
