"""sparse_attention's gradient: the closed form in plain torch, on any device. No atomics: blocks of query rows, one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.rows import Rows

QUERY_ROWS = 64


def sparse_attention_backward(
    grad_RHV: Tensor, q_RHC: Tensor, latent_RC: Tensor, positions_RK: Tensor, out_RHV: Tensor, lse_RH: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    """(d queries, d latent rows). A latent row's part as a key and its part as a value are added before the one rounding."""
    accumulate = torch.promote_types(q_RHC.dtype, torch.float32)
    grad_q = torch.empty_like(q_RHC)
    grad_latent = torch.empty_like(latent_RC)
    values = out_RHV.shape[2]
    starts = rows.starts_N1.tolist()
    for begin, end in zip(starts, starts[1:], strict=False):
        latent = latent_RC[begin:end].to(accumulate)
        total = torch.zeros_like(latent)
        for first in range(begin, end, QUERY_ROWS):
            block = slice(first, min(first + QUERY_ROWS, end))
            seen = block.stop - begin
            q, o, g = (t[block].to(accumulate).flatten(0, 1) for t in (q_RHC, out_RHV, grad_RHV))
            places = positions_RK[block].long()
            listed = torch.zeros(len(places), seen + 1, dtype=torch.bool, device=q.device)
            listed.scatter_(1, torch.where(places < 0, seen, places), True)
            mask = listed[:, None, :seen].expand(-1, q_RHC.shape[1], -1).flatten(0, 1)
            scores = (q @ latent[:seen].T) * scale
            p = torch.where(mask, torch.exp(scores - lse_RH[block].reshape(-1, 1)), 0.0)
            d_scores = p * (g @ latent[:seen, :values].T - (g * o).sum(-1, keepdim=True)) * scale
            grad_q[block] = (d_scores @ latent[:seen]).view(-1, *q_RHC.shape[1:]).to(q_RHC.dtype)
            total[:seen] += d_scores.T @ q
            total[:seen, :values] += p.T @ g
        grad_latent[begin:end] = total.to(latent_RC.dtype)
    return grad_q, grad_latent
