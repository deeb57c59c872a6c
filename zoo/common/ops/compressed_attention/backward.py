"""compressed_attention's gradient: the closed form in plain torch, on any device. No atomics: blocks of query rows, one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.rows import Rows

QUERY_ROWS = 64


def compressed_attention_backward(
    grad_RHE: Tensor,
    q_RHE: Tensor,
    window_RE: Tensor,
    compressed_RE: Tensor | None,
    sinks_H: Tensor,
    chosen_RK: Tensor | None,
    out_RHE: Tensor,
    lse_RH: Tensor,
    tokens: int,
    rows: Rows,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(d queries, d window rows, d compressed rows, d sinks)."""
    accumulate = torch.promote_types(q_RHE.dtype, torch.float32)
    device = q_RHE.device
    heads = q_RHE.shape[1]
    grad_q = torch.empty_like(q_RHE)
    grad_window = torch.empty_like(window_RE)
    grad_compressed = None if compressed_RE is None else torch.zeros_like(compressed_RE)
    grad_sinks = torch.zeros_like(lse_RH[0])
    starts = rows.starts_N1.tolist()
    for begin, end in zip(starts, starts[1:], strict=False):
        near = window_RE[begin:end].to(accumulate)
        far = near[:0] if compressed_RE is None else compressed_RE[begin:end][tokens - 1 :: tokens].to(accumulate)
        d_near = torch.zeros_like(near)
        d_far = torch.zeros_like(far)
        for first in range(0, end - begin, QUERY_ROWS):
            last = min(first + QUERY_ROWS, end - begin)
            block = slice(begin + first, begin + last)
            oldest = max(0, first + 1 - window)
            seen = last // tokens if tokens else 0
            position = torch.arange(first, last, device=device)[:, None]
            place = torch.arange(oldest, last, device=device)[None]
            mask_near = (place <= position) & (place > position - window)
            if chosen_RK is None:
                mask_far = torch.arange(seen, device=device)[None] < ((position + 1) // tokens if tokens else 0)
            else:
                places = chosen_RK[block].long()
                listed = torch.zeros(len(places), seen + 1, dtype=torch.bool, device=device)
                mask_far = listed.scatter_(1, torch.where(places < 0, seen, places), True)[:, :seen]
            mask = torch.cat([mask_far.expand(last - first, seen), mask_near], 1)[:, None].expand(-1, heads, -1).flatten(0, 1)
            keys = torch.cat([far[:seen], near[oldest:last]])
            q, o, g = (t[block].to(accumulate).flatten(0, 1) for t in (q_RHE, out_RHE, grad_RHE))
            lse = lse_RH[block].reshape(-1, 1)
            p = torch.where(mask, torch.exp((q @ keys.T) * scale - lse), 0.0)
            upstream = (g * o).sum(-1, keepdim=True)
            d_scores = p * (g @ keys.T - upstream) * scale
            grad_q[block] = (d_scores @ keys).view(-1, *q_RHE.shape[1:]).to(q_RHE.dtype)
            d_keys = d_scores.T @ q + p.T @ g
            d_far[:seen] += d_keys[:seen]
            d_near[oldest:last] += d_keys[seen:]
            d_sink = -torch.exp(sinks_H.to(accumulate) - lse_RH[block]) * upstream.view(-1, heads)
            grad_sinks += d_sink.sum(0)
        grad_window[begin:end] = d_near.to(window_RE.dtype)
        if grad_compressed is not None:
            grad_compressed[begin:end][tokens - 1 :: tokens] = d_far.to(grad_compressed.dtype)
    return grad_q, grad_window, grad_compressed, grad_sinks.to(sinks_H.dtype)
