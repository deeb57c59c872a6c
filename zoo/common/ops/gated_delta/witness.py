"""What a server must hold of a sequence between two calls of gated_delta, from the operands of training's call.

The state at a chunk's start is the op's own hand-over between ranks; the live chunk's rows are pushed at once into a fresh slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.ops.gated_delta.slots import CHUNK, begin_at, empty_state, live_bytes, slot_tensors
from zoo.common.program import Program
from zoo.common.rows import Rows

OPERANDS = ("q_RHK", "k_RHK", "v_RVE", "log_decay_RV", "beta_RV")
KEPT = 4  # chunks of a document kept at once: a decode step asks for the same ones over and over


@dataclass
class SlotWitness:
    """One document's operands. push, parts: the op, and the op that gives the state at a part's end."""

    operands: tuple[Tensor, ...]
    program: Program
    push: Callable[..., Tensor]
    parts: Callable[..., tuple[Tensor, Tensor]]
    _starts: dict[int, Tensor] = field(default_factory=dict)
    _chunks: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def after(self, length: int) -> dict[str, Tensor]:
        """A slot's live bytes: the live chunk's rows up to there, all of the chunk pushed once."""
        first = length // CHUNK * CHUNK
        if first not in self._chunks:
            if len(self._chunks) == KEPT:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[first] = self._chunk(first)
        return {f"delta_{name}": pool[0] for name, pool in live_bytes(self._chunks[first], 0, length).items()}

    def _chunk(self, first: int) -> dict[str, Tensor]:
        """Pools [1, 1, ...] of one slot that holds the document from a chunk's start on, short of the row that would close the chunk."""
        _, k_RHK, v_RVE, *_ = self.operands
        shapes = slot_tensors(k_RHK.shape[1], v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2], v_RVE.dtype)
        state = empty_state(1, shapes, v_RVE.device)
        pools = {name: getattr(state, name)[None] for name in shapes}
        begin_at(pools, 0, self._start(first)[None])
        count = min(CHUNK - 1, v_RVE.shape[0] - first)
        if count:
            self._call(self.push, first, first + count, state, Rows.pushed([count], [first], v_RVE.device))
        return pools

    def _start(self, first: int) -> Tensor:
        """[V, K, E] after `first` tokens, from the nearest one before that is known."""
        if first not in self._starts:
            _, k_RHK, v_RVE, *_ = self.operands
            known = max((at for at in self._starts if at < first), default=0)
            start = self._starts.get(known)
            if first:
                rows = Rows.packed(torch.tensor([0, first - known], device=v_RVE.device))
                start = self._call(self.parts, known, first, None if start is None else start[None], rows)[1][0]
            else:
                exact = torch.promote_types(v_RVE.dtype, torch.float32)
                start = v_RVE.new_zeros(v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2], dtype=exact)
            self._starts[first] = start
        return self._starts[first]

    @torch.no_grad()
    def _call(self, op: Callable[..., Any], begin: int, end: int, history: DeltaState | Tensor | None, rows: Rows) -> Any:
        return op(*(operand[begin:end] for operand in self.operands), history, rows, program=self.program)
