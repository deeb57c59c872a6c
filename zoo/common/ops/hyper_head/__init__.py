"""hyper_head: the residual streams collapsed into one behind the last layer.

Sources: Hyper-Connections, Zhu et al. 2024 (arXiv 2409.19606), section 2; transformers' `DeepseekV4HyperHead`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import PROGRAM, WIDE, Arguments, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


def _shape(arguments: Arguments) -> tuple[int, ...]:
    return tuple(arguments["streams_RSD"].shape[1:])


class Functions(NamedTuple):
    """What a provider brings.

    forward   streams_RSD, fn_SK, base_S, scale_1, eps, floor
    backward  grad_RD, streams_RSD, fn_SK, base_S, scale_1, eps, floor
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.hyper_head import backward, reference

    return Functions(reference.hyper_head, backward.hyper_head_backward)


def _triton() -> Functions:
    from zoo.common.ops.hyper_head import backward, kernels

    return Functions(kernels.hyper_head, backward.hyper_head_backward)


CONTRACT = Contract(
    name="hyper_head",
    version=1,
    shapes="streams_RSD; fn [S, S D], base [S] and scale [1] in FP32 -> x_RD in the program's dtype",
    reads={"streams_RSD": PROGRAM, "fn_SK": WIDE, "base_S": WIDE, "scale_1": WIDE},
    rounds="once, from FP32, at the store",
    adds="hyper_pre's order: the mix, sigmoid(mix scale + base) + floor, and the streams' weighted sum",
    laws=("row", "place", "repeat"),
    backward="closed form in FP32, to the streams and to fn, base and scale",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
    shape=_shape,
)


class _HyperHead(OpFunction):
    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        eps: float,
        floor: float,
        provider: Provider[Functions],
    ) -> Tensor:
        ctx.save_for_backward(streams, fn, base, scale)
        ctx.eps = eps
        ctx.floor = floor
        ctx.functions = provider.functions
        return provider.functions.forward(streams, fn, base, scale, eps, floor)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        streams, fn, base, scale = ctx.saved_tensors
        return *functions.backward(grad, streams, fn, base, scale, ctx.eps, ctx.floor), None, None, None


@observed(CONTRACT)
def hyper_head(
    streams_RSD: Tensor, fn_SK: Tensor, base_S: Tensor, scale_1: Tensor, eps: float, floor: float, *, program: Program
) -> Tensor:
    """x_RD. ValueError if the parameters don't fit the streams."""
    _, streams, width = streams_RSD.shape
    found = (tuple(fn_SK.shape), tuple(base_S.shape), tuple(scale_1.shape))
    if found != ((streams, streams * width), (streams,), (1,)):
        raise ValueError(f"hyper_head: {streams} streams of {width} columns, fn, base and scale of shapes {found}")
    provider = CONTRACT.provider(program, _shape({"streams_RSD": streams_RSD}))
    return _HyperHead.run(streams_RSD, fn_SK, base_S, scale_1, eps, floor, provider)
