"""rope: rotary positions, half-split or of neighbouring pairs, from a whole FP32 table made once on the CPU.

Source: RoFormer, Su et al. 2021 (arXiv 2104.09864), section 3.4.2, whose pairs are neighbours; half-split as transformers' `rotate_half`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.common.ops.contract import FLOAT32, INTEGERS, PROGRAM, Contract, OpFunction, Provider, closed_form, observed
from zoo.common.program import Program


class Functions(NamedTuple):
    """What a provider brings.

    forward   x_RHE, table_PC2, positions_R, inverse, neighbours
    backward  x_RHE, table_PC2, positions_R, inverse, neighbours
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.rope import reference

    return Functions(reference.rope, reference.rope)


def _triton() -> Functions:
    from zoo.common.ops.rope import kernels

    return Functions(kernels.rope, kernels.rope)


CONTRACT = Contract(
    name="rope",
    version=2,
    shapes="x_RHE, table_PC2 (FP32: cosine and sine of position times frequency, C = rotated width / 2), positions_R -> [R, H, E]; "
    "column i turns with column i + C, or where neighbours are pairs column 2i with 2i + 1, which go to columns i and i + C; columns "
    "beyond the rotated width pass through",
    reads={"x_RHE": PROGRAM, "table_PC2": FLOAT32, "positions_R": INTEGERS},
    rounds="once, from FP32, at the store",
    adds="a cos - b sin and b cos + a sin, each product rounded to FP32 before the sum (no contraction)",
    laws=("row", "place", "fusion", "repeat"),
    backward="the same rotation with -sin",
    launch="the same everywhere; the table comes from the CPU, its hash is part of the fingerprint",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "single_round", "cuda", _triton, defining=True, version=2),
    ),
)


def table_hash(table: Tensor) -> str:
    """The table's provenance, for fingerprints."""
    return hashlib.sha256(table.cpu().numpy().tobytes()).hexdigest()[:16]


class _Rope(OpFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, positions: Tensor, neighbours: bool, provider: Provider[Functions]) -> Tensor:
        ctx.save_for_backward(table, positions)
        ctx.neighbours = neighbours
        ctx.functions = provider.functions
        return provider.functions.forward(x, table, positions, False, neighbours)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor) -> Any:
        table, positions = ctx.saved_tensors
        functions: Functions = ctx.functions
        return functions.backward(grad, table, positions, True, ctx.neighbours), None, None, None, None


@observed(CONTRACT)
def rope(x_RHE: Tensor, table_PC2: Tensor, positions_R: Tensor, *, program: Program, neighbours: bool = False) -> Tensor:
    """Rotates the first 2C columns of each head; of pairs of `neighbours` the first elements come first, as half-split has them.

    ValueError if the table is wider than a head.
    """
    if 2 * table_PC2.shape[1] > x_RHE.shape[-1]:
        raise ValueError(f"rope: a table for {2 * table_PC2.shape[1]} columns, heads of {x_RHE.shape[-1]}")
    return _Rope.run(x_RHE, table_PC2, positions_R, neighbours, CONTRACT.provider(program))
