"""hyper_pre: several residual streams collapsed into a branch's input, and the coefficients that mix them behind the branch.

Sources: Hyper-Connections, Zhu et al. 2024 (arXiv 2409.19606), section 2; doubly stochastic mixing by Sinkhorn and Knopp's iteration,
mHC, Xie et al. 2025 (arXiv 2512.24880), section 4; transformers' `DeepseekV4HyperConnection`.
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

    forward   streams_RSD, fn_MK, base_M, scale_3, how
    backward  grad_x_RD, grad_post_RS, grad_comb_RSS, streams_RSD, fn_MK, base_M, scale_3, how
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Sinkhorn], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sinkhorn], tuple[Tensor, Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.hyper_pre import backward, reference

    return Functions(reference.hyper_pre, backward.hyper_pre_backward)


def _triton() -> Functions:
    from zoo.common.ops.hyper_pre import backward, kernels

    return Functions(kernels.hyper_pre, backward.hyper_pre_backward)


CONTRACT = Contract(
    name="hyper_pre",
    version=1,
    shapes="streams_RSD; fn [(2 + S) S, S D], base [(2 + S) S] and scale [3] in FP32 -> x_RD in the program's dtype, post_RS and "
    "comb_RSS in FP32",
    reads={"streams_RSD": PROGRAM, "fn_MK": WIDE, "base_M": WIDE, "scale_3": WIDE},
    rounds="x once, from FP32; nothing else is rounded",
    adds="streams side by side times fn in FP32, K ascending in k_parts of its shape, added by the adjacent-pair tree; times one rsqrt of "
    "the mean square (adjacent-pair tree) plus eps; pre = sigmoid(mix scale + base) + floor, post = 2 sigmoid; comb = softmax of rows "
    "plus floor, columns divided by their sum plus floor, then rows and columns in turn, so often as asked; x = streams times pre, "
    "products rounded, by the adjacent-pair tree",
    laws=("row", "place", "repeat"),
    backward="closed form in FP32 through every division, to the streams and to fn, base and scale; parameters' gradients add rows in "
    "one product",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
    shape=_shape,
)


class Sinkhorn(NamedTuple):
    """eps of the norm, floor under coefficients and sums, and how often columns are divided by their sums."""

    eps: float
    floor: float
    rounds: int


class _HyperPre(OpFunction):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, how: Sinkhorn, provider: Provider[Functions]) -> Any:
        ctx.save_for_backward(streams, fn, base, scale)
        ctx.how = how
        ctx.functions = provider.functions
        return provider.functions.forward(streams, fn, base, scale, how)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad_x: Tensor, grad_post: Tensor, grad_comb: Tensor) -> Any:
        functions: Functions = ctx.functions
        streams, fn, base, scale = ctx.saved_tensors
        return *functions.backward(grad_x, grad_post, grad_comb, streams, fn, base, scale, ctx.how), None, None


@observed(CONTRACT)
def hyper_pre(
    streams_RSD: Tensor, fn_MK: Tensor, base_M: Tensor, scale_3: Tensor, how: Sinkhorn, *, program: Program
) -> tuple[Tensor, Tensor, Tensor]:
    """(x_RD, post_RS, comb_RSS). ValueError if the parameters don't fit the streams."""
    _, streams, width = streams_RSD.shape
    mixed = (2 + streams) * streams
    found = (tuple(fn_MK.shape), tuple(base_M.shape), tuple(scale_3.shape))
    if found != ((mixed, streams * width), (mixed,), (3,)):
        raise ValueError(f"hyper_pre: {streams} streams of {width} columns, fn, base and scale of shapes {found}")
    provider = CONTRACT.provider(program, _shape({"streams_RSD": streams_RSD}))
    found_x, post, comb = _HyperPre.run(streams_RSD, fn_MK, base_M, scale_3, how, provider)
    return found_x, post, comb
