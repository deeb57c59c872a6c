"""compressed_attention in plain torch: panels of 16 heads of one row against tiles of 64 lanes of its list, ascending."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zoo.common.history import WindowedRows
from zoo.common.ops.sparse_attention.reference import LANES, PANEL_HEADS, WIDTH_TILE
from zoo.common.ops.trees import pair_tree
from zoo.common.rows import Rows


def compressed_attention(
    q_RHE: Tensor, history: WindowedRows, chosen_RK: Tensor | None, sinks_H: Tensor, rows: Rows, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_RHE, log-sum-exp_RH in FP32, the sink's part in it)."""
    accumulate = torch.promote_types(q_RHE.dtype, torch.float32)
    count, heads, width = q_RHE.shape
    out = torch.empty_like(q_RHE)
    lse = torch.empty(count, heads, dtype=accumulate)
    starts = rows.starts_N1.tolist()
    spare = -width % WIDTH_TILE  # a matmul of few columns would see a row's place
    for n, length in enumerate(rows.lengths_N.tolist()):
        begin, end = starts[n : n + 2]
        tokens = history.window_of(n, begin, end, length)
        pooled = history.compressed_of(n, begin, end, length)
        for r in range(begin, end):
            position = length - end + r
            if chosen_RK is None:
                listed = pooled[: (position + 1) // history.tokens] if history.tokens else pooled
            else:
                listed = pooled[chosen_RK[r][chosen_RK[r] >= 0].long()]
            parts = [listed, tokens[max(0, position + 1 - window) : position + 1]]
            lanes = torch.cat([pad(part, (0, spare, 0, -len(part) % LANES)) for part in parts]).to(accumulate)
            live = torch.cat([torch.arange(len(part) + -len(part) % LANES) < len(part) for part in parts])
            for first in range(0, heads, PANEL_HEADS):
                panel = q_RHE[r, first : first + PANEL_HEADS]
                missing = PANEL_HEADS - len(panel)
                q = pad(panel.to(accumulate), (0, spare, 0, missing))
                sinks = pad(sinks_H[first : first + PANEL_HEADS].to(accumulate), (0, missing))
                found, found_lse = _panel(q, lanes, live, sinks, scale, q_RHE.dtype)
                out[r, first : first + len(panel)] = found[: len(panel), :width].to(q_RHE.dtype)
                lse[r, first : first + len(panel)] = found_lse[: len(panel)]
    return out, lse


def _panel(q_HE: Tensor, rows_TE: Tensor, live_T: Tensor, sinks_H: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    peak = q_HE.new_full((PANEL_HEADS,), -torch.inf)
    mass = q_HE.new_zeros(PANEL_HEADS)
    acc = torch.zeros_like(q_HE)
    for tile in range(0, len(live_T), LANES):
        lanes = slice(tile, tile + LANES)
        scores = torch.where(live_T[lanes], (q_HE @ rows_TE[lanes].T) * scale, -torch.inf)
        top = torch.maximum(peak, scores.amax(-1))
        weight = torch.where(live_T[lanes], torch.exp(scores - top[:, None]), 0.0)
        keep = torch.exp(peak - top)
        mass = mass * keep + pair_tree(weight)
        acc = acc * keep[:, None] + weight.to(dtype).to(acc.dtype) @ rows_TE[lanes]
        peak = top
    top = torch.maximum(peak, sinks_H)
    keep = torch.exp(peak - top)
    mass = mass * keep + torch.exp(sinks_H - top)
    return acc * keep[:, None] / mass[:, None], top + torch.log(mass)
