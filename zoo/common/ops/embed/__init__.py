"""embed: a row of the embedding table per token.

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.4, without their factor sqrt(D); `torch.nn.Embedding`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.common.ops.contract import INTEGERS, PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program

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
        Provider("reference", "reference", "cpu", f"{__name__}.reference:embed", f"{__name__}.reference:embed_backward", defining=True),
        Provider("gather", "copy", "cuda", f"{__name__}.kernels:embed", f"{__name__}.kernels:embed_backward", defining=True),
    ),
)


class _Embed(OpFunction):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, provider: Provider) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.vocabulary = weight.shape[0]
        ctx.provider = provider
        return provider.function("forward")(ids, weight)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.provider.function("backward")(grad, *ctx.saved_tensors, ctx.vocabulary), None, None


@observed(CONTRACT)
def embed(ids_R: Tensor, weight_VD: Tensor, *, program: Program) -> Tensor:
    """weight[ids]. Ids are checked where they enter a model, not here: a check would stop a CUDA graph."""
    return _Embed.run(weight_VD, ids_R, CONTRACT.provider(program))
