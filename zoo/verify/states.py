"""What a server must hold of a sequence's recurrent layers after any number of tokens, from the operands of training's ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.delta_memory import CARRY, CHUNK, DeltaMemory, DeltaSnapshot
from zoo.common.rows import Rows
from zoo.verify.calls import Call

OPERANDS = ("q_RHK", "k_RHK", "v_RVE", "log_decay_RV", "beta_RV")


@dataclass
class TrainedStates:
    """One document's rows of each recurrent layer, in training. The state at a chunk's start is the op's own hand-over between
    ranks; the live chunk's rows are pushed at once into a fresh slot."""

    convolutions: list[Tensor]
    deltas: list[tuple[Tensor, ...]]
    program: Any
    _starts: dict[tuple[int, int], Tensor] = field(default_factory=dict)

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
        """A slot's live bytes, by name and layer."""
        first = length // CHUNK * CHUNK
        out: dict[str, Tensor] = {}
        for layer, (x_RC, operands) in enumerate(zip(self.convolutions, self.deltas, strict=True)):
            _, k_RHK, v_RVE, *_ = operands
            shape = (k_RHK.shape[1], v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2])
            memory = DeltaMemory(1, 2, *shape, x_RC.shape[1], v_RVE.dtype, v_RVE.device)
            carry = torch.cat([torch.zeros_like(x_RC[:1]).expand(CARRY, -1), x_RC[:length]])[-CARRY:]
            memory.restore(1, DeltaSnapshot(first, self._start(layer, first)[None], carry[None]))
            if length > first:
                rows = Rows.pushed([length - first], [first], v_RVE.device)
                state = memory.view(torch.tensor([1], device=v_RVE.device))[0].state
                ops.gated_delta(*(t[first:length] for t in operands), state, rows, program=self.program)
            out |= {f"delta_{name}.{layer}": t[0] for name, t in memory.written(1, length).items()}
        return out

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
