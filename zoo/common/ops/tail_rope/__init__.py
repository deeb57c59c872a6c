"""tail_rope: rotary positions on the last columns of each head, in pairs of neighbours that stay where they are; and back.

Source: RoFormer, Su et al. 2021 (arXiv 2104.09864), section 3.4.2; turned back behind attention as transformers' `DeepseekV4Attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import FLOAT32, INTEGERS, PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RHE, table_PC2, positions_R, inverse
    backward  x_RHE: the gradient; the others as in forward
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.tail_rope import reference

    return Functions(reference.tail_rope, reference.tail_rope)


def _triton() -> Functions:
    from zoo.common.ops.tail_rope import kernels

    return Functions(kernels.tail_rope, kernels.tail_rope)


CONTRACT = Contract(
    name="tail_rope",
    version=1,
    shapes="x_RHE, table_PC2 (FP32: cosine and sine of position times frequency, C = rotated width / 2), positions_R -> [R, H, E]; "
    "columns E - 2C + 2i and the next turn by angle i, the columns before them pass through",
    reads={"x_RHE": PROGRAM, "table_PC2": FLOAT32, "positions_R": INTEGERS},
    rounds="once, from FP32, at the store",
    adds="a cos - b sin and b cos + a sin, each product rounded to FP32 before the sum (no contraction); inverse: with -sin",
    laws=("row", "place", "fusion", "repeat"),
    backward="the same rotation the other way",
    launch="the same everywhere; the table comes from the CPU, its hash is part of the fingerprint",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "single_round", "cuda", _triton, defining=True),
    ),
)


class _TailRope(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, positions: Tensor, inverse: bool, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(table, positions)
        ctx.inverse = inverse
        ctx.functions = provider.functions
        return provider.functions.forward(x, table, positions, inverse)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        functions: Functions = ctx.functions
        table, positions = ctx.saved_tensors
        return functions.backward(grad, table, positions, not ctx.inverse), None, None, None, None


@observed(CONTRACT)
def tail_rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, *, program: Program, inverse: bool = False) -> Tensor:
    """Rotates the last 2C columns of each head; `inverse` turns them back. ValueError if the table is wider than a head."""
    if 2 * table_PC2.shape[1] > x_RHE.shape[-1]:
        raise ValueError(f"tail_rope: a table for {2 * table_PC2.shape[1]} columns, heads of {x_RHE.shape[-1]}")
    return _TailRope.run(x_RHE, table_PC2, positions_R, inverse, CONTRACT.provider(program))
