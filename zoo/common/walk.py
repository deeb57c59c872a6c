"""One walk over a model's layers, for every family, in training and in serving.

A model has `enter` (token ids to what its first layer takes), `layers`, each of which takes and returns the model's carry, and
`leave` (the last carry to final normed rows). The carry is a NamedTuple of tensors, so that checkpointing, sharding and, later,
pipeline stages may treat every family alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.common.layers import Embedding, RMSNorm
from zoo.common.masters import computed
from zoo.common.rows import Rows


class Branched(NamedTuple):
    """The residual stream and the last branch, which the next norm adds to it; before the first layer there is none."""

    residual_RD: Tensor
    branch_RD: Tensor | None


class CausalModel(nn.Module):
    """Base of every family's model: the embedding, the layers, the last norm, and the head, which is an op's argument and no layer."""

    embed: Embedding
    layers: nn.ModuleList
    norm: RMSNorm
    rotary: nn.Module  # a RotaryTable, or several
    head: Embedding  # absent where it is tied to the embedding

    def enter(self, ids_R: Tensor) -> Any:
        """What the first layer takes."""
        return Branched(self.embed(ids_R), None)

    def leave(self, carry: Any) -> Tensor:
        """Final normed rows [R, D] of what the last layer gives."""
        return self.norm(carry.residual_RD, carry.branch_RD)[0]

    @property
    def vocabulary_head(self) -> Embedding:
        """The embedding, where the two are tied."""
        return self.embed if "head" not in self._modules else self.head

    @property
    def head_weight_VD(self) -> Tensor:
        """What the vocabulary head computes with."""
        return computed(self.vocabulary_head)


def walk(model: CausalModel, ids_R: Tensor, rows: Rows, views: Sequence[Any], *, recompute: bool = False) -> Tensor:
    """Token ids to final normed rows [R, D] through one view of memory a layer. `recompute`: layers run again in the backward pass."""
    carry = model.enter(ids_R)
    for layer, view in zip(model.layers, views, strict=True):
        if recompute:
            carry = checkpoint(layer, carry, rows, view, model.rotary, use_reentrant=False)
        else:
            carry = layer(carry, rows, view, model.rotary)
    return model.leave(carry)
