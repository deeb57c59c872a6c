"""The attention backend: SGLang's pools as pages, a step per batch. Imported in the scheduler only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from zoo.common.serving import ForServing
from zoo.sglang_plugin.draws import GraphDraws
from zoo.sglang_plugin.memory import GraphSteps, KeyValuePool, PrefillSteps, Step, StepBuilder

SHORT = 32  # up to so many lengths Python's max is faster than the tensor's, and a decode step asks three times


def longest(seq_lens_cpu: Tensor) -> int:
    return max(seq_lens_cpu.tolist()) if seq_lens_cpu.numel() <= SHORT else int(seq_lens_cpu.max())


class PagedBackend(AttentionBackend):
    """Owns no number: it says which rows a forward has and where their history lies. The model calls `step` and `pool` itself."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.device = runner.device
        self.forward_metadata: Step | None = None
        model: ForServing = runner.model.zoo
        config = model.config
        program = model.program
        pool = self.token_to_kv_pool
        if pool.kv_cache_layout != "nhd":
            raise ValueError(f"the key-value pool's layout is {pool.kv_cache_layout}, the zoo's pages need nhd")
        if runner.model_config.context_len > config.positions:
            raise ValueError(f"a context of {runner.model_config.context_len} is longer than the position table of {config.positions}")
        pages = KeyValuePool(pool.k_buffer, pool.v_buffer, runner.page_size, program.torch_dtype)
        self.pool = runner.model.pool(pages, self.req_to_token_pool.req_to_token.shape[0])
        self.context = runner.model_config.context_len
        self.builder = StepBuilder(
            self.req_to_token_pool.req_to_token, runner.page_size, program.key_segment(config.head_dim), config.positions
        )
        self.graphs: GraphSteps | None = None
        self.draws: GraphDraws | None = None  # with graphs
        self.prefills: PrefillSteps | None = None  # of the graph runner; none where graphs are disabled
        self._capturing: int | None = None

    @property
    def step(self) -> Step:
        """The step of the forward now running."""
        assert self.forward_metadata is not None, "a forward without metadata"
        return self.forward_metadata

    def clear_padding(self) -> None:
        """Zeroes what padding rows of a graph read: SGLang's memory may come back with anybody's bytes."""
        self.builder.request_to_slot[0].zero_()
        self.pool.clear_padding()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager batches."""
        b = forward_batch
        if b.forward_mode.is_decode_or_idle():
            most = longest(b.seq_lens_cpu) if b.batch_size else 1
            self.forward_metadata = self.builder.decode(b.req_pool_indices, b.seq_lens, b.positions, b.out_cache_loc, most)
        else:
            self.forward_metadata = self.builder.extend(
                b.req_pool_indices,
                b.seq_lens,
                b.positions,
                b.out_cache_loc,
                b.extend_seq_lens,
                b.extend_prefix_lens,
                b.extend_seq_lens_cpu,
                b.extend_prefix_lens_cpu,
            )
            self.pool.begin(b.rids, b.req_pool_indices, b.extend_prefix_lens, b.extend_seq_lens_cpu, b.extend_prefix_lens_cpu)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graphs = GraphSteps(self.builder, max_bs, self.context, self.device)
        self.draws = GraphDraws(max_bs, self.runner.model.zoo.program, self.device)
        self.prefills = None  # a runner that captures again lets the old ones go first

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def graph_length(self, seq_lens_cpu: Tensor | None) -> int:
        """Which captured bound serves these lengths."""
        assert self.graphs is not None
        return self.graphs.length_for(self.context if seq_lens_cpu is None else longest(seq_lens_cpu))

    @property
    def captures(self) -> bool:
        """Whether the forward now running is captured, or warms that up."""
        return self._capturing is not None

    @contextmanager
    def capturing(self, length: int) -> Iterator[None]:
        """Captures inside it have launch shapes for sequences of up to `length` tokens."""
        self._capturing = length
        try:
            yield
        finally:
            self._capturing = None

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        b = forward_batch
        assert self.graphs is not None
        if not in_capture:
            self.graphs.refresh(self.graph_length(b.seq_lens_cpu), b.req_pool_indices, b.seq_lens)
            return
        if self._capturing is None:
            raise RuntimeError("a decode graph is captured by another runner than the zoo's: its hook is not active")
        self.graphs.refresh(self._capturing, b.req_pool_indices, b.seq_lens)
        self.forward_metadata = self.graphs.step(self._capturing, b.req_pool_indices, b.positions, b.out_cache_loc)
