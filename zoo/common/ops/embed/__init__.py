"""embed: a row of the embedding table per token.

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.4, without their factor sqrt(D); `torch.nn.Embedding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import INTEGERS, PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   ids_R, weight_VD
    backward  grad_RD, ids_R, vocabulary
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, int], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.embed import reference

    return Functions(reference.embed, reference.embed_backward)


def _gather() -> Functions:
    from zoo.common.ops.embed import kernels

    return Functions(kernels.embed, kernels.embed_backward)


CONTRACT = Contract(
    name="embed",
    version=1,
    shapes="ids_R (integers), weight_VD -> [R, D]",
    reads={"ids_R": INTEGERS, "weight_VD": PROGRAM},
    rounds="never",
    adds="nothing",
    laws=("row", "place", "repeat"),
    backward="rows of one token are added in batch order",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("gather", "copy", "cuda", _gather, defining=True),
    ),
)


class _Embed(OpFunction):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.vocabulary = weight.shape[0]
        ctx.functions = provider.functions
        return provider.functions.forward(ids, weight)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        (ids,) = ctx.saved_tensors
        return functions.backward(grad, ids, ctx.vocabulary), None, None


@observed(CONTRACT)
def embed(ids_R: Tensor, weight_VD: Tensor, *, program: Program) -> Tensor:
    """weight[ids]. Ids are checked where they enter a model, not here: a check would stop a CUDA graph."""
    return _Embed.run(weight_VD, ids_R, CONTRACT.provider(program))
