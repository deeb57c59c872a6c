"""hyper_post: a branch's output joins the residual streams, which mix among each other.

Sources: Hyper-Connections, Zhu et al. 2024 (arXiv 2409.19606), section 2; mHC, Xie et al. 2025 (arXiv 2512.24880), section 4.
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

    forward   branch_RD, streams_RSD, post_RS, comb_RSS
    backward  grad_RSD, branch_RD, streams_RSD, post_RS, comb_RSS
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def _reference() -> Functions:
    from zoo.common.ops.hyper_post import backward, reference

    return Functions(reference.hyper_post, backward.hyper_post_backward)


def _triton() -> Functions:
    from zoo.common.ops.hyper_post import backward, kernels

    return Functions(kernels.hyper_post, backward.hyper_post_backward)


CONTRACT = Contract(
    name="hyper_post",
    version=1,
    shapes="branch_RD, streams_RSD, post_RS and comb_RSS in FP32 -> streams_RSD",
    reads={"branch_RD": PROGRAM, "streams_RSD": PROGRAM, "post_RS": WIDE, "comb_RSS": WIDE},
    rounds="each stream once, from FP32, at the store",
    adds="stream k: the streams j times comb[j, k], products rounded, by the adjacent-pair tree over j; plus branch times post[k]",
    laws=("row", "column", "place", "repeat"),
    backward="closed form in FP32, rounded once to the dtypes of branch and streams",
    launch="the same everywhere",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "pair_tree", "cuda", _triton, defining=True),
    ),
    shape=_shape,
)


class _HyperPost(OpFunction):
    @staticmethod
    def forward(ctx: Any, branch: Tensor, streams: Tensor, post: Tensor, comb: Tensor, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(branch, streams, post, comb)
        ctx.functions = provider.functions
        return provider.functions.forward(branch, streams, post, comb)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        return *functions.backward(grad, *ctx.saved_tensors), None


@observed(CONTRACT)
def hyper_post(branch_RD: Tensor, streams_RSD: Tensor, post_RS: Tensor, comb_RSS: Tensor, *, program: Program) -> Tensor:
    """The next streams_RSD. ValueError if the shapes disagree."""
    rows, streams, width = streams_RSD.shape
    found = (tuple(branch_RD.shape), tuple(post_RS.shape), tuple(comb_RSS.shape))
    if found != ((rows, width), (rows, streams), (rows, streams, streams)):
        raise ValueError(f"hyper_post: {rows} rows of {streams} streams of {width} columns, branch, post and comb of shapes {found}")
    provider = CONTRACT.provider(program, _shape({"streams_RSD": streams_RSD}))
    return _HyperPost.run(branch_RD, streams_RSD, post_RS, comb_RSS, provider)
