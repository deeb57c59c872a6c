"""The serving door: rows through paged memory, eager or by CUDA graph. It chooses rows and memory and makes no number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.memory import ServingMemory
from zoo.common.pretrained import Pretrained, own_dtypes
from zoo.common.rows import Rows


class ForServing(Pretrained, nn.Module):
    """Base of every architecture's serving model; a subclass writes the walk through its layers and names its memory."""

    model: nn.Module
    trainable = False

    def make_memory(self, pages: int, page_size: int | None = None, slots: int | None = None) -> ServingMemory:
        """Memory for this model on its device; page 0 is reserved for padding.

        slots: sequences that may run at once, where each holds state beside its pages; without such state it says nothing.
        """
        raise AssertionError("written by each architecture")

    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: Any, page_table_NB: Tensor) -> Tensor:
        """Token ids to final normed rows [R, D], writing memory: the subclass's loop."""
        raise AssertionError("written by each architecture")

    @own_dtypes
    @torch.no_grad()
    def prefill(self, ids_R: Tensor, rows: Rows, memory: ServingMemory, page_table_NB: Tensor, wanted_W: Tensor | None = None) -> Tensor:
        """Pushes rows (whole prompts or chunks of them) and returns the final rows [W, D] of `wanted_W` (all by default).

        page_table_NB int32: page b of sequence n. ValueError for a position beyond the table. Runs eagerly, also under torch.compile.
        """
        if rows.max_length > self.config.positions:
            raise ValueError(f"a sequence of {rows.max_length} tokens is longer than the position table of {self.config.positions}")
        if rows.max_length > memory.capacity(page_table_NB):
            raise ValueError(f"{rows.max_length} tokens do not fit a page table of {memory.capacity(page_table_NB)}")
        rows.launch.clear()  # static rows change in place between calls, and a captured graph must derive its own
        hidden_RD = self.hidden_rows(ids_R, rows, memory, page_table_NB)
        return hidden_RD if wanted_W is None else hidden_RD.index_select(0, wanted_W)

    @torch.no_grad()
    def decode(self, ids_N: Tensor, rows: Rows, memory: ServingMemory, page_table_NB: Tensor) -> Tensor:
        """One row of each sequence: FP32 logits [N, V]."""
        return self.logits(self.prefill(ids_N, rows, memory, page_table_NB))

    @own_dtypes
    def logits(self, hidden_RD: Tensor, inverse_temperature_R: Tensor | None = None) -> Tensor:
        """FP32 logits [R, V] of final rows."""
        return ops.logits(hidden_RD, self.model.head_weight_VD, program=self.program, inverse_temperature_R=inverse_temperature_R)

    @own_dtypes
    @torch.no_grad()
    def log_prob(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """FP32 log-probabilities [R] of `targets_R` after final rows."""
        return ops.log_prob(hidden_RD, self.model.head_weight_VD, targets_R, program=self.program).log_prob_R


class DecodeGraph:
    """One captured decode step: `batch` sequences of at most `blocks` pages. Static inputs are overwritten before each replay.

    Padding sequences point at the reserved page with one token; their outputs are never read.
    """

    def __init__(self, model: ForServing, memory: ServingMemory, batch: int, blocks: int, pool: Any = None) -> None:
        """`pool` (torch.cuda.graph_pool_handle()) is shared by graphs whose outputs are read before another of them replays."""
        device = next(model.parameters()).device
        self.batch, self.blocks = batch, blocks
        self.ids_N = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions_N = torch.zeros(batch, dtype=torch.int64, device=device)
        self.lengths_N = torch.ones(batch, dtype=torch.int32, device=device)
        self.page_table_NB = torch.zeros(batch, memory.columns(blocks), dtype=torch.int32, device=device)
        self.rows = Rows(  # kept: the graph reads these tensors on every replay
            self.positions_N,
            torch.arange(batch, device=device),
            torch.arange(batch + 1, dtype=torch.int32, device=device),
            self.lengths_N,
            max_rows=1,
            max_length=min(blocks * memory.page_size, model.config.positions),
        )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and libraries pick their workspaces before the capture
            for _ in range(2):
                model.decode(self.ids_N, self.rows, memory, self.page_table_NB)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits_NV = model.decode(self.ids_N, self.rows, memory, self.page_table_NB)

    def replay(self, ids_N: Tensor, positions_N: Tensor, page_table_NB: Tensor) -> Tensor:
        """Logits [n, V] of n <= batch sequences; valid until the next replay."""
        live, blocks = page_table_NB.shape
        self.ids_N[:live].copy_(ids_N)
        self.positions_N.zero_()[:live].copy_(positions_N)
        self.lengths_N.fill_(1)[:live].copy_(positions_N + 1)
        self.page_table_NB.zero_()[:live, :blocks].copy_(page_table_NB)
        self.graph.replay()
        return self.logits_NV[:live]
