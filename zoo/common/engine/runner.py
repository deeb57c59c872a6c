"""From the scheduler's choice to tensors: pushes rows through the model, replays graphs, and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.engine.request import Request
from zoo.common.memory import ServingMemory
from zoo.common.ops.sample import Drawn, sample
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows
from zoo.common.serving import PREFILL_ROWS, DecodeGraph, ForServing, PrefillGraph, prefill_bucket

Tops = dict[int, tuple[tuple[int, ...], tuple[float, ...]]]  # by row: the most likely tokens, and their log-probabilities
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


class Runner:
    """One model over one memory. Graphs are captured when first needed.

    Decode has one per bucket of batch and pages, prefill one per bucket of rows, for sequences within one key segment.

    chunk_rows  prompt rows of one push at most
    replayed    prompt rows that the last push gave to a graph
    """

    def __init__(self, model: ForServing, memory: ServingMemory, graphs: bool, chunk_rows: int) -> None:
        self.model = model
        self.memory = memory
        self.graphs = graphs
        self.most_rows = max(chunk_rows, PREFILL_ROWS[-1])  # a push of a small chunk is padded to one of these, captured when first met
        self.device = next(model.parameters()).device
        self.replayed = 0
        self._captured: dict[tuple[int, int], DecodeGraph] = {}
        self._prefills: dict[int, PrefillGraph] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if graphs else None
        self._pushed: list[Rows] = []  # whose flags are still to be looked at
        self._batch: tuple[list[Request], RowSampling] | None = None

    def push(self, single: list[Request], chunks: list[tuple[Request, int]]) -> list[tuple[list[Request], Drawn, Tops]]:
        """Pushes the last row of each of `single` and the next rows of `chunks`; draws for those that reached their end.

        ValueError for what an op found in the numbers and set a flag for.
        """
        drawn = []
        self.replayed = 0
        self._pushed.clear()
        if single:
            drawn.append((single, *self._draw(single, self._decode(single), self._decode_sampling(single))))
        if chunks:
            drawn += self._prefill(chunks)
        for rows in self._pushed:
            rows.check_flags()  # the engine is about to wait for the tokens
        return drawn

    def _draw(self, requests: list[Request], logits_RV: Tensor, sampling: RowSampling) -> tuple[Drawn, Tops]:
        """One token of each row, and the most likely ones of the rows whose requests want them."""
        tops: Tops = {}
        for most in {request.top for request in requests} - {0}:
            rows = [i for i, request in enumerate(requests) if request.top == most]
            chosen = torch.tensor(rows).to(logits_RV.device)
            inverse = sampling[chosen].inverse_temperature_or_none()
            ids, values = ops.top_of_logits(logits_RV.index_select(0, chosen), inverse, most, program=self.model.program)
            tops |= {i: (tuple(a), tuple(b)) for i, a, b in zip(rows, ids.tolist(), values.tolist(), strict=True)}
        return sample(logits_RV, sampling, self.model.program), tops

    def _table(self, requests: Sequence[Request], blocks: int) -> Tensor:
        return self.memory.table([r.pages for r in requests], [r.slot for r in requests], blocks)

    def _decode(self, requests: list[Request]) -> Tensor:
        """FP32 logits [n, V]: the last token of each request, one row each."""
        ids_N = torch.tensor([r.tokens[-1] for r in requests])
        blocks = max(len(r.pages) for r in requests)
        if not self.graphs:
            rows = Rows.pushed([1] * len(requests), [r.computed for r in requests], self.device)
            self._pushed.append(rows)
            return self.model.decode(ids_N.to(self.device), rows, self.memory, self._table(requests, blocks))
        key = batch_bucket(len(requests)), 1 << (blocks - 1).bit_length()
        if key not in self._captured:
            self._captured[key] = DecodeGraph(self.model, self.memory, *key, pool=self._pool)
        positions_N = torch.tensor([r.computed for r in requests])
        self._pushed.append(self._captured[key].rows)
        return self._captured[key].replay(ids_N, positions_N, self._table(requests, blocks))

    def _hidden(self, ids_R: Tensor, rows: Rows, table_NB: Tensor, wanted_W: Tensor) -> Tensor:
        """The final rows [W, D] of `wanted_W` of a prefill."""
        count = prefill_bucket(rows, self.model.captured_length, self.most_rows) if self.graphs else None
        if count is None:
            self._pushed.append(rows)
            return self.model.prefill(ids_R, rows, self.memory, table_NB, wanted_W)
        if count not in self._prefills:
            self._prefills[count] = PrefillGraph(self.model, self.memory, count, pool=self._pool)
        self.replayed = rows.count
        self._pushed.append(self._prefills[count].padded.rows)
        return self._prefills[count].replay(ids_R, rows, table_NB).index_select(0, wanted_W)

    def _decode_sampling(self, requests: list[Request]) -> RowSampling:
        """The batch's sampling rows; while its members stay, only positions are sent again."""
        positions = [len(r.tokens) for r in requests]
        if self._batch is None or self._batch[0] != requests:
            self._batch = requests, RowSampling.of([r.params for r in requests], positions, self.device)
            return self._batch[1]
        return replace(self._batch[1], position_R=torch.tensor(positions).to(self.device))

    def _prefill(self, chunks: list[tuple[Request, int]]) -> list[tuple[list[Request], Drawn, Tops]]:
        """Pushes chunks; draws for those that reach their end, scores prompt rows where asked."""
        requests = [request for request, _ in chunks]
        draws: list[Request] = []
        scored: list[tuple[Request, int]] = []
        ids: list[int] = []
        draw_rows: list[int] = []
        score_rows: list[int] = []
        for request, count in chunks:
            first = request.computed
            end = request.computed + count
            if request.scores_prompt:
                targets = range(first + 1, min(end + 1, request.prompt_length))
                scored += [(request, r) for r in targets]
                score_rows += [len(ids) + r - 1 - first for r in targets]
            ids += request.tokens[first:end]
            if end == len(request.tokens):
                draws.append(request)
                draw_rows.append(len(ids) - 1)
        rows = Rows.pushed([count for _, count in chunks], [r.computed for r in requests], self.device)
        table_NB = self._table(requests, max(len(r.pages) for r in requests))
        wanted_W = torch.tensor(draw_rows + score_rows, dtype=torch.int64).to(self.device)
        hidden_WD = self._hidden(torch.tensor(ids).to(self.device), rows, table_NB, wanted_W)
        if scored:
            targets_W = torch.tensor([r.tokens[position] for r, position in scored])
            values = self.model.log_prob(hidden_WD[len(draws) :], targets_W).tolist()
            for (request, position), value in zip(scored, values, strict=True):
                request.prompt_log_probs[position - 1 : position] = [value]
        if not draws:
            return []
        sampling = RowSampling.of([r.params for r in draws], [len(r.tokens) for r in draws], self.device)
        return [(draws, *self._draw(draws, self.model.logits(hidden_WD[: len(draws)]), sampling))]


def batch_bucket(count: int) -> int:
    """The captured batch that serves `count` sequences: a bucket, or a multiple of the widest."""
    widest = BATCH_BUCKETS[-1]
    return next((b for b in BATCH_BUCKETS if b >= count), -(-count // widest) * widest)
