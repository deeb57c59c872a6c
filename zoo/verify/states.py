"""What a server must hold of a sequence's recurrent layers after any number of tokens, from the operands of training's ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.memory import DeltaSlots
from zoo.common.ops.causal_conv import CARRY
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.rows import Rows
from zoo.verify.calls import Call

KEPT = 4  # chunks of a document kept at once: a decode step asks for the same ones over and over
OPERANDS = ("q_RHK", "k_RHK", "v_RVE", "log_decay_RV", "beta_RV")


@dataclass
class TrainedStates:
    """One document's rows of each recurrent layer, in training. The state at a chunk's start is the op's own hand-over between
    ranks; the live chunk's rows are pushed at once into a fresh slot."""

    convolutions: list[Tensor]
    deltas: list[tuple[Tensor, ...]]
    program: Any
    _starts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _chunks: dict[int, list[DeltaSlots]] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: list[Call], mine: slice) -> TrainedStates | None:
        """From training's calls in order, a document's rows of them; None for a model without recurrent layers."""
        deltas = [c for c in calls if c.contract.name == "gated_delta"]
        if not deltas:
            return None
        rows = [c.arguments["x_RC"].detach()[mine] for c in calls if c.contract.name == "causal_conv"]
        each = [tuple(c.arguments[name].detach()[mine] for name in OPERANDS) for c in deltas]
        return cls(rows, each, deltas[0].program)

    def after(self, length: int) -> dict[str, Tensor]:
        """A slot's live bytes, by name and layer: the live chunk's rows up to there, all of the chunk pushed once."""
        first = length // CHUNK * CHUNK
        if first not in self._chunks:
            if len(self._chunks) == KEPT:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[first] = [self._chunk(layer, first) for layer in range(len(self.deltas))]
        out: dict[str, Tensor] = {}
        for layer, (x_RC, states) in enumerate(zip(self.convolutions, self._chunks[first], strict=True)):
            before = x_RC[max(0, length - CARRY) : length]
            out |= {f"{name}.{layer}": t[0] for name, t in states.written(1, length).items()}
            out[f"delta_carry.{layer}"] = torch.cat([x_RC.new_zeros(CARRY - len(before), x_RC.shape[1]), before])
        return out

    def _chunk(self, layer: int, first: int) -> DeltaSlots:
        """Slot 1 holds the document from a chunk's start on, short of the row that would close the chunk."""
        operands = self.deltas[layer]
        _, k_RHK, v_RVE, *_ = operands
        shape = (k_RHK.shape[1], v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2])
        states = DeltaSlots(1, 2, *shape, v_RVE.dtype, v_RVE.device)
        states.restore(1, {"start_SVKE": self._start(layer, first)[None]})
        if count := min(CHUNK - 1, v_RVE.shape[0] - first):
            rows = Rows.pushed([count], [first], v_RVE.device)
            state = states.layer(0, torch.tensor([1], device=v_RVE.device))
            ops.gated_delta(*(t[first : first + count] for t in operands), state, rows, program=self.program)
        return states

    def _start(self, layer: int, first: int) -> Tensor:
        """[V, K, E] after `first` tokens, from the nearest one before that is known."""
        if (layer, first) not in self._starts:
            _, k_RHK, v_RVE, *_ = operands = self.deltas[layer]
            known = max((at for number, at in self._starts if number == layer and at < first), default=0)
            start = self._starts.get((layer, known))
            if first:
                initial = None if start is None else start[None]
                rows = Rows.packed(torch.tensor([0, first - known], device=v_RVE.device))
                with torch.no_grad():
                    q, k, v, log_decay, beta = (t[known:first] for t in operands)
                    start = ops.gated_delta_states(q, k, v, log_decay, beta, initial, rows, program=self.program)[1][0]
            else:
                exact = torch.promote_types(v_RVE.dtype, torch.float32)
                start = v_RVE.new_zeros(v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2], dtype=exact)
            assert start is not None
            self._starts[layer, first] = start
        return self._starts[layer, first]
