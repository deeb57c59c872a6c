"""compress in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.history import OpenWindows, WholeWindows
from zoo.common.ops.compress.windows import Window
from zoo.common.ops.trees import pair_tree
from zoo.common.rows import Rows


def compress(
    rows_RC: Tensor, ape_WP: Tensor, history: OpenWindows | WholeWindows, rows: Rows, window: Window, dtype: torch.dtype
) -> Tensor:
    width = ape_WP.shape[1] // (2 if window.overlaps else 1)
    parts = [rows_RC.new_zeros(0, width)]
    places = []
    starts = rows.starts_N1.tolist()
    for n, length in enumerate(rows.lengths_N.tolist()):
        mine = rows_RC[starts[n] : starts[n + 1]]
        before = length - len(mine)
        first = window.first(before)
        if isinstance(history, OpenWindows):
            mine = torch.cat([history.rows_SWC[history.slot_N[n]][window.live(before)], mine])
        complete = length // window.tokens - before // window.tokens
        if complete:
            parts.append(pool(mine[: (length // window.tokens) * window.tokens - first], ape_WP, window)[-complete:])
            last = starts[n] + (before // window.tokens + 1) * window.tokens - 1 - before
            places += [last + w * window.tokens for w in range(complete)]
    out = rows_RC.new_zeros(rows_RC.shape[0], width)
    # index_put, so that autograd may walk the reference
    return out.index_put((torch.tensor(places, dtype=torch.int64),), torch.cat(parts)).to(dtype)


def pool(rows_TC: Tensor, ape_WP: Tensor, window: Window) -> Tensor:
    """[windows, width] of whole windows; where windows overlap, what comes before the first is left out."""
    values, gates = rows_TC.unflatten(0, (-1, window.tokens)).chunk(2, -1)
    gates = gates + ape_WP
    there = torch.ones(values.shape[:2], dtype=torch.bool)
    if window.overlaps:
        values, gates = (_with_before(x) for x in (values, gates))
        there = torch.cat([(torch.arange(len(there)) > 0)[:, None].expand(-1, window.tokens), there], 1)
    live = there[:, None]
    gate = torch.where(live, gates.transpose(1, 2), -torch.inf)
    weight = torch.where(live, torch.exp(gate - gate.amax(-1, keepdim=True)), 0.0)
    return pair_tree(weight * torch.where(live, values.transpose(1, 2), 0.0)) / pair_tree(weight)


def _with_before(x_NWP: Tensor) -> Tensor:
    """First halves of the window before, zeros before the first, then second halves of the window itself."""
    first, second = x_NWP.chunk(2, -1)
    return torch.cat([torch.cat([torch.zeros_like(first[:1]), first[:-1]]), second], 1)


def advance(rows_RC: Tensor, history: OpenWindows, rows: Rows, window: Window) -> None:
    """The newest rows of each sequence go into its slot."""
    starts = rows.starts_N1.tolist()
    slots = history.slot_N.tolist()
    for n, length in enumerate(rows.lengths_N.tolist()):
        mine = rows_RC[starts[n] : starts[n + 1]][-window.held :]
        places = [p % window.held for p in range(length - len(mine), length)]
        history.rows_SWC[slots[n], places] = mine
