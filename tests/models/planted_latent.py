"""Faults in a server's selection and in its attention over the selected rows, as functions of a provider."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from torch import Tensor

from tests.models.planted import OtherOp
from zoo.common import ops
from zoo.common.ops.contract import choices_changed
from zoo.common.ops.select import reference as select_reference
from zoo.common.ops.sparse_attention import reference as attention_reference
from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.glm5.model import Indexer, LatentAttention


def sparse_attention(
    q_RHC: Tensor, latent: Tensor, page_table_NB: Tensor | None, positions_RK: Tensor, rows: Rows, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Probabilities that are not rounded before the product with values."""
    wide = attention_reference.sparse_attention(q_RHC.double(), latent.double(), page_table_NB, positions_RK, rows, values, scale)
    return wide[0].to(q_RHC.dtype), wide[1].float()


def select(q_RHE: Tensor, weights_RH: Tensor, keys: Tensor, page_table_NB: Tensor | None, rows: Rows, top_k: int) -> Tensor:
    """A sort that turns equal scores around, in rows that are decoded."""
    if rows.max_rows > 1:
        return select_reference.select(q_RHE, weights_RH, keys, page_table_NB, rows, top_k)
    best = select_reference.best
    with mock.patch.object(select_reference, "best", lambda scores, k: (len(scores) - 1 - best(scores.flip(0), k)).flip(0)):
        return select_reference.select(q_RHE, weights_RH, keys, page_table_NB, rows, top_k)


@contextmanager
def planted(server: ForServing, op: str) -> Iterator[None]:
    """The server's `op` by the function above, inside the block."""
    contract = ops.CONTRACTS[op]
    functions = contract.providers[0].functions._replace(forward=globals()[op])
    fault = replace(contract.providers[0], name="planted", byte_class="planted", load=lambda: functions)
    replace(contract, providers=(*contract.providers, fault))
    choices_changed()
    callers = [m for m in server.modules() if isinstance(m, Indexer if op == "select" else LatentAttention)]
    plain = [m.program for m in callers]
    try:
        for caller in callers:
            caller.program = OtherOp(**vars(caller.program), other=op)
        yield
    finally:
        for caller, program in zip(callers, plain, strict=True):
            caller.program = program
        ops.CONTRACTS[op] = contract
        choices_changed()
