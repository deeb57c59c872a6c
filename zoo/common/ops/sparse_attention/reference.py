"""sparse_attention in plain torch: panels of 16 heads of one row against tiles of 64 lanes of its list, ascending."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zoo.common.history import TokenRows
from zoo.common.ops.trees import pair_tree
from zoo.common.rows import Rows

PANEL_HEADS = 16
LANES = 64
WIDTH_TILE = 16


def sparse_attention(
    q_RHC: Tensor, latent: Tensor, page_table_NB: Tensor | None, positions_RK: Tensor, rows: Rows, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_RHV, log-sum-exp_RH in FP32)."""
    accumulate = torch.promote_types(q_RHC.dtype, torch.float32)
    count, heads, width = q_RHC.shape
    out = q_RHC.new_empty(count, heads, values)
    lse = torch.empty(count, heads, dtype=accumulate)
    history = TokenRows(latent, page_table_NB)
    starts = rows.starts_N1.tolist()
    spare = (-width % WIDTH_TILE, -values % WIDTH_TILE)  # a matmul of few columns would see a row's place
    for n, length in enumerate(rows.lengths_N.tolist()):
        mine = history.of(n, starts[n], starts[n + 1], length)
        for r in range(starts[n], starts[n + 1]):
            place = positions_RK[r][positions_RK[r] >= 0].long()
            chosen = pad(mine[place].to(accumulate), (0, 0, 0, -len(place) % LANES))
            keys = pad(chosen, (0, spare[0]))
            vectors = pad(chosen[:, :values], (0, spare[1]))
            for first in range(0, heads, PANEL_HEADS):
                panel = q_RHC[r, first : first + PANEL_HEADS]
                q = pad(panel.to(accumulate), (0, spare[0], 0, PANEL_HEADS - len(panel)))
                found, panel_lse = _panel(q, keys, vectors, len(place), scale, q_RHC.dtype)
                out[r, first : first + len(panel)] = found[: len(panel), :values].to(q_RHC.dtype)
                lse[r, first : first + len(panel)] = panel_lse[: len(panel)]
    return out, lse


def _panel(q_HC: Tensor, keys_TC: Tensor, values_TV: Tensor, count: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    peak = q_HC.new_full((PANEL_HEADS,), -torch.inf)
    mass = q_HC.new_zeros(PANEL_HEADS)
    acc = q_HC.new_zeros(PANEL_HEADS, values_TV.shape[1])
    for tile in range(0, count, LANES):
        live = torch.arange(tile, tile + LANES) < count
        scores = ((q_HC @ keys_TC[tile : tile + LANES].T) * scale).masked_fill(~live, -torch.inf)
        top = torch.maximum(peak, scores.amax(-1))
        weight = torch.where(live, torch.exp(scores - top[:, None]), 0.0)
        keep = torch.exp(peak - top)
        mass = mass * keep + pair_tree(weight)
        acc = acc * keep[:, None] + weight.to(dtype).to(acc.dtype) @ values_TV[tile : tile + LANES]
        peak = top
    safe = torch.where(mass > 0, mass, 1.0)
    return acc / safe[:, None], torch.where(mass > 0, peak + torch.log(safe), -torch.inf)
