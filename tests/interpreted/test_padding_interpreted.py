"""The kernels that know sequences, in Triton's interpreter: a captured prefill's padding and its empty sequences change nobody's bytes."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from zoo.common.memory import CarrySlots, DeltaSlots
from zoo.common.memory.kernels import write_rows
from zoo.common.ops.causal_conv import kernels as conv
from zoo.common.ops.gated_delta import kernels as delta
from zoo.common.rows import Rows
from zoo.common.serving import PREFILL_SEQUENCES, PaddedRows

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

SLOTS = [5, 2, 4]
# (count of the static rows, rows and contexts of the sequences): chunks cut and closed, padding of two chunks, none
PUSHES = [(140, [5, 63, 1], [0, 0, 0]), (64, [60, 3, 1], [5, 63, 1])]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def static(count: int, rows: Rows, table_NB: Tensor) -> PaddedRows:
    padded = PaddedRows(count, 256, table_NB.shape[1], "cpu")
    padded.fill(torch.zeros(rows.count, dtype=torch.int64), rows, table_NB)
    return padded


def behind(live: Tensor, count: int) -> Tensor:
    """`live` rows and random ones behind them."""
    return torch.cat([live, torch.randn(count - live.shape[0], *live.shape[1:])])


def states() -> tuple[DeltaSlots, CarrySlots]:
    parts = DeltaSlots(1, 7, 1, 2, 16, 16, torch.float32, "cpu"), CarrySlots(1, 7, 8, torch.float32, "cpu")
    for part in parts:
        for pool in part.pools.values():
            pool.fill_(torch.nan)
        part.clear([0, *SLOTS])
    return parts


def pools_of(parts: tuple[DeltaSlots, CarrySlots]) -> list[Tensor]:
    return [pool for part in parts for pool in part.pools.values()]


@pytest.mark.parametrize("live_slot", [False, True])
def test_states_and_outputs(live_slot: bool) -> None:
    """Gated delta and convolution. The control: padding that has the slot of a sequence."""
    plain = states()
    padded = states()
    found = []
    weight = torch.randn(8, 4)
    slot_N = torch.tensor(SLOTS)
    slots_of_all = torch.cat([slot_N, torch.zeros(PREFILL_SEQUENCES[0] + 1 - 3, dtype=torch.int64)])
    if live_slot:
        slots_of_all[3] = SLOTS[1]
    for count, counts, contexts in PUSHES[:1] if live_slot else PUSHES:
        rows = Rows.pushed(counts, contexts, "cpu")
        more = static(count, rows, torch.zeros(3, 1, dtype=torch.int32)).rows
        q, k, v = (torch.randn(rows.count, heads, 16) for heads in (1, 1, 2))
        log_decay = -torch.rand(rows.count, 2)
        beta = torch.rand(rows.count, 2)
        x = torch.randn(rows.count, 8)
        outs = []
        for memory, slots, mine, operands in (
            (plain, slot_N, rows, (q, k / k.norm(dim=-1, keepdim=True), v, log_decay, beta, x)),
            (padded, slots_of_all, more, None),
        ):
            if operands is None:
                given = (q, k / k.norm(dim=-1, keepdim=True), v, log_decay, beta, x)
                operands = tuple(-behind(t, count).abs() if n == 3 else behind(t, count) for n, t in enumerate(given))
            state, carry = (part.layer(0, slots) for part in memory)
            out = delta.serve(*operands[:5], state, mine)
            y = conv.causal_conv(operands[5], weight, carry.rows_SWC, slots, mine)
            conv.advance(operands[5], carry.rows_SWC, slots, mine)
            outs.append((out[: rows.count], y[: rows.count]))
        found += [same(a, b) for a, b in zip(*outs, strict=True)]
        found += [same(a[:, 1:], b[:, 1:]) for a, b in zip(pools_of(plain), pools_of(padded), strict=True)]
    assert all(found) != live_slot
    assert all(out.isfinite().all() for out in outs[0])


@pytest.mark.parametrize("live_page", [False, True])
def test_pages(live_page: bool) -> None:
    table = torch.tensor([[3, 1], [4, 6], [2, 0]], dtype=torch.int32)
    rows = Rows.pushed([20, 30, 3], [0, 2, 9], "cpu")
    padded = static(64, rows, table)
    if live_page:
        padded.table_NB[3] = 3
    k = torch.randn(rows.count, 2, 8)
    v = torch.randn(rows.count, 2, 8)
    pools = [[torch.full((8, 16, 2, 8), torch.nan) for _ in range(2)] for _ in range(2)]
    write_rows(k, v, *pools[0], table, rows)
    write_rows(behind(k, 64), behind(v, 64), *pools[1], padded.table_NB, padded.rows)
    assert all(same(a[1:], b[1:]) for a, b in zip(*pools, strict=True)) != live_page
    assert live_page or (pools[1][0][0, :11].isfinite().all() and pools[1][0][0, 11:].isnan().all())
