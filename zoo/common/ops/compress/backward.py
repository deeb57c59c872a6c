"""compress's gradient: the closed form in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.compress.windows import Window
from zoo.common.rows import Rows


def compress_backward(grad_RE: Tensor, rows_RC: Tensor, ape_WP: Tensor, rows: Rows, window: Window) -> tuple[Tensor, Tensor]:
    """(d rows, d ape) of whole documents. Tokens of a window that never closed have no gradient."""
    d_rows = torch.zeros_like(rows_RC)
    d_ape = torch.zeros_like(ape_WP)
    width = grad_RE.shape[1]
    starts = rows.starts_N1.tolist()
    for begin, end in zip(starts, starts[1:], strict=False):
        count = (end - begin) // window.tokens
        if not count:
            continue
        mine = slice(begin, begin + count * window.tokens)
        values, gates = rows_RC[mine].unflatten(0, (count, window.tokens)).chunk(2, -1)
        gates = gates + ape_WP
        grad = grad_RE[mine][window.tokens - 1 :: window.tokens].to(rows_RC.dtype)[:, None]
        own = slice(width, 2 * width) if window.overlaps else slice(0, width)
        slots = [(values[..., own], gates[..., own])]
        if window.overlaps:
            nothing = values.new_zeros(1, window.tokens, width)
            before = torch.cat([nothing, values[:-1, :, :width]])
            slots.insert(0, (before, torch.cat([nothing - torch.inf, gates[:-1, :, :width]])))
        value, gate = (torch.cat(each, 1) for each in zip(*slots, strict=True))
        weight = torch.softmax(gate, 1)
        pooled = (weight * value).sum(1, keepdim=True)
        d_value = weight * grad
        d_gate = d_value * (value - pooled)
        d_values = torch.zeros_like(values)
        d_gates = torch.zeros_like(gates)
        for into, found in ((d_values, d_value), (d_gates, d_gate)):
            into[..., own] += found[:, -window.tokens :]
            if window.overlaps:
                into[:-1, :, :width] += found[1:, : window.tokens]
        d_rows[mine] = torch.cat([d_values, d_gates], -1).flatten(0, 1)
        d_ape += d_gates.sum(0)
    return d_rows, d_ape
