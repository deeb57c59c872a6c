"""attention in plain torch: panels of 16 query rows against tiles of 64 keys, ascending, on absolute grids."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zoo.common.ops.trees import pair_tree
from zoo.common.rows import Rows

PANEL_ROWS = 16
KEY_TILE = 64
WIDTH_TILE = 16


def attention(
    q_RHE: Tensor, k: Tensor, v: Tensor, page_table_NB: Tensor | None, rows: Rows, scale: float, segment: int | None
) -> tuple[Tensor, Tensor]:
    """(out_RHE, log-sum-exp_RH in FP32).

    A row's bytes depend on its query and on keys 0 .. its position, and on whether later values of its own sequence in the tile of
    64 keys that holds its position are finite: their weight is 0, and 0 times a non-finite value is NaN.
    """
    accumulate = torch.promote_types(q_RHE.dtype, torch.float32)
    out = q_RHE.new_empty(q_RHE.shape)
    lse = torch.empty(q_RHE.shape[:2], dtype=accumulate)
    starts = rows.starts_N1.tolist()
    lengths = rows.lengths_N.tolist()
    for n, length in enumerate(lengths):
        mine = slice(starts[n], starts[n + 1])
        if page_table_NB is None:
            keys = k[mine]
            values = v[mine]
        else:
            keys, values = (t[page_table_NB[n].long().clamp(min=0)].flatten(0, 1)[:length] for t in (k, v))
        out[mine], lse[mine] = _sequence(q_RHE[mine], keys, values, length - (starts[n + 1] - starts[n]), scale, segment, accumulate)
    return out, lse


def _sequence(
    q_THE: Tensor, k_LGE: Tensor, v_LGE: Tensor, context: int, scale: float, segment: int | None, accumulate: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, heads, width = q_THE.shape
    length = k_LGE.shape[0]
    groups = k_LGE.shape[1]
    # a matmul of 5 to 11 columns would see a row's place
    spare_keys = -length % KEY_TILE
    spare_width = -width % WIDTH_TILE
    # one batch entry per query head, tiles of one shape: the matmul never sees the batch
    k_HLE, v_HLE = (
        pad(t, (0, spare_width, 0, 0, 0, spare_keys)).to(accumulate).transpose(0, 1).repeat_interleave(heads // groups, 0)
        for t in (k_LGE, v_LGE)
    )
    out = q_THE.new_empty(q_THE.shape)
    lse = torch.empty(rows, heads, dtype=accumulate)
    for first in range(0, rows, PANEL_ROWS):
        count = min(PANEL_ROWS, rows - first)
        q = pad(q_THE[first : first + count].transpose(0, 1).to(accumulate), (0, spare_width, 0, PANEL_ROWS - count))
        position = torch.full((PANEL_ROWS,), context + first)
        position[:count] = torch.arange(context + first, context + first + count)
        merged, panel_lse = _panel(q, k_HLE, v_HLE, position, scale, segment, q_THE.dtype)
        out[first : first + count] = merged[:, :count, :width].transpose(0, 1).to(q_THE.dtype)
        lse[first : first + count] = panel_lse[:, :count].T
    return out, lse


def _panel(
    q_HPE: Tensor, k_HLE: Tensor, v_HLE: Tensor, position_P: Tensor, scale: float, segment: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One panel against all its keys: a streaming softmax in each segment, segments merged left to right."""
    last = int(position_P.max())
    span = segment or k_HLE.shape[1]
    assert span % KEY_TILE == 0, f"key segments of {span} are not whole tiles of {KEY_TILE}"
    total = None
    total_lse = None
    for begin in range(0, last + 1, span):
        part, part_lse = _segment(q_HPE, k_HLE, v_HLE, position_P, scale, begin, min(begin + span, last + 1), dtype)
        if total is None or total_lse is None:
            total = part
            total_lse = part_lse
        else:
            total, total_lse = merge(total, total_lse, part, part_lse)
    assert total is not None and total_lse is not None
    return total, total_lse


def _segment(
    q_HPE: Tensor, k_HLE: Tensor, v_HLE: Tensor, position_P: Tensor, scale: float, begin: int, end: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    heads, panel, width = q_HPE.shape
    peak = q_HPE.new_full((heads, panel), -torch.inf)
    mass = q_HPE.new_zeros(heads, panel)
    acc = q_HPE.new_zeros(heads, panel, width)
    for tile in range(begin, end, KEY_TILE):
        keys = k_HLE[:, tile : tile + KEY_TILE]
        values = v_HLE[:, tile : tile + KEY_TILE]
        visible = torch.arange(tile, tile + KEY_TILE) <= position_P[:, None]
        live = visible.any(1)[None]  # a wholly masked tile leaves the row's state untouched
        scores = torch.stack([a @ b.T for a, b in zip(q_HPE, keys, strict=True)]) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        top = torch.where(live, torch.maximum(peak, scores.amax(-1)), peak)
        weight = torch.where(visible, torch.exp(scores - top[..., None]), 0.0)
        keep = torch.where(live & (peak > -torch.inf), torch.exp(peak - top), (~live).to(peak.dtype))
        mass = torch.where(live, mass * keep + pair_tree(weight), mass)
        product = torch.stack([a @ b for a, b in zip(weight.to(dtype).to(acc.dtype), values, strict=True)])
        acc = torch.where(live[..., None], acc * keep[..., None] + product, acc)
        peak = top
    safe = torch.where(mass > 0, mass, 1.0)
    return (acc / safe[..., None]).to(dtype).to(acc.dtype), torch.where(mass > 0, peak + torch.log(safe), -torch.inf)


def merge(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one softmax; an empty right part changes nothing."""
    empty = right_lse == -torch.inf
    top = torch.maximum(left_lse, right_lse)
    a = torch.exp(left_lse - top)
    b = torch.exp(right_lse - top)
    mass = a + b
    out = (left * a[..., None] + right * b[..., None]) / mass[..., None]
    return torch.where(empty[..., None], left, out), torch.where(empty, left_lse, top + torch.log(mass))


def attention_backward(
    grad: Tensor, q_RHE: Tensor, k_RGE: Tensor, v_RGE: Tensor, out_RHE: Tensor, lse_RH: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Closed form per document from the saved log-sum-exp."""
    accumulate = torch.promote_types(q_RHE.dtype, torch.float32)
    grad_q = torch.empty_like(q_RHE)
    grad_k = torch.empty_like(k_RGE)
    grad_v = torch.empty_like(v_RGE)
    repeat = q_RHE.shape[1] // k_RGE.shape[1]
    starts = rows.starts_N1.tolist()
    for begin, end in zip(starts, starts[1:], strict=False):
        q, o, g = (t[begin:end].to(accumulate).transpose(0, 1) for t in (q_RHE, out_RHE, grad))
        k, v = (t[begin:end].to(accumulate).transpose(0, 1).repeat_interleave(repeat, 0) for t in (k_RGE, v_RGE))
        causal = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~causal, -torch.inf)
        p = torch.exp(scores - lse_RH[begin:end].T[..., None])
        d_scores = p * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
        grad_q[begin:end] = (d_scores @ k).transpose(0, 1).to(q_RHE.dtype)
        d_k = (d_scores.transpose(1, 2) @ q).unflatten(0, (-1, repeat)).sum(1)
        d_v = (p.transpose(1, 2) @ g).unflatten(0, (-1, repeat)).sum(1)
        grad_k[begin:end] = d_k.transpose(0, 1).to(k_RGE.dtype)
        grad_v[begin:end] = d_v.transpose(0, 1).to(v_RGE.dtype)
    return grad_q, grad_k, grad_v
