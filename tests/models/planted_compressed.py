"""Faults in a server's compressed rows, in their selection and in its attention over them, as functions of a provider."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from tests.models.planted import OtherOp
from zoo.common import ops
from zoo.common.history import CompressedRows, OpenWindows, WholeWindows, WindowedRows
from zoo.common.ops.compress import reference as compress_reference
from zoo.common.ops.compress.windows import Window
from zoo.common.ops.compressed_attention import reference as attention_reference
from zoo.common.ops.compressed_select import reference as select_reference
from zoo.common.ops.contract import choices_changed
from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.deepseek_v4.model import Attend, Indexer, Pool

CALLERS = {"compress": Pool, "compressed_select": Indexer, "compressed_attention": Attend}


def compress(
    rows_RC: Tensor, ape_WP: Tensor, history: OpenWindows | WholeWindows, rows: Rows, window: Window, dtype: torch.dtype
) -> Tensor:
    """Gates that are rounded before the softmax."""
    values, gates = rows_RC.chunk(2, 1)
    return compress_reference.compress(torch.cat([values, gates.bfloat16().float()], 1), ape_WP, history, rows, window, dtype)


def compressed_select(q_RHE: Tensor, weights_RH: Tensor, keys: CompressedRows, rows: Rows, top_k: int) -> Tensor:
    """A sort that turns equal scores around, in rows that are decoded."""
    if rows.max_rows > 1:
        return select_reference.compressed_select(q_RHE, weights_RH, keys, rows, top_k)
    best = select_reference.best
    with mock.patch.object(select_reference, "best", lambda scores, k: (len(scores) - 1 - best(scores.flip(0), k)).flip(0)):
        return select_reference.compressed_select(q_RHE, weights_RH, keys, rows, top_k)


def compressed_attention(
    q_RHE: Tensor, history: WindowedRows, chosen_RK: Tensor | None, sinks_H: Tensor, rows: Rows, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Probabilities that are not rounded before the product with values."""
    wide = replace(history, window=history.window.double(), compressed=None if history.compressed is None else history.compressed.double())
    out, lse = attention_reference.compressed_attention(q_RHE.double(), wide, chosen_RK, sinks_H, rows, window, scale)
    return out.to(q_RHE.dtype), lse.float()


@contextmanager
def planted(server: ForServing, op: str) -> Iterator[None]:
    """The server's `op` by the function above, inside the block."""
    contract = ops.CONTRACTS[op]
    functions = contract.providers[0].functions._replace(forward=globals()[op])
    fault = replace(contract.providers[0], name="planted", byte_class="planted", load=lambda: functions)
    replace(contract, providers=(*contract.providers, fault))
    choices_changed()
    callers = [m for m in server.modules() if isinstance(m, CALLERS[op])]
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
