"""linear in plain torch. A matmul's bytes on a CPU depend on its shape, so only one shape is ever called."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.ops.trees import pair_tree

PANEL_ROWS = 16
PANEL_COLUMNS = 64


def linear(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """Operands upcast to FP32, padded to panels of 16 rows by 64 columns, each panel one matmul of one shape."""
    accumulate = torch.promote_types(x_RK.dtype, torch.float32)
    x = x_RK.to(accumulate)
    w = weight_NK.to(accumulate)
    if k_parts == 1:
        return panels(x, w).to(out_dtype)
    parts = [panels(a.contiguous(), b.contiguous()) for a, b in zip(x.chunk(k_parts, 1), w.chunk(k_parts, 1), strict=True)]
    return pair_tree(torch.stack(parts, dim=-1)).to(out_dtype)


def panels(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T by panels; each panel is padded with zeros to [16, K] x [K, 64]."""
    rows = x_RK.shape[0]
    columns = weight_NK.shape[0]
    depth = x_RK.shape[1]
    x = _padded(x_RK, PANEL_ROWS).view(-1, PANEL_ROWS, depth)
    w = _padded(weight_NK, PANEL_COLUMNS).view(-1, PANEL_COLUMNS, depth)
    out = x.new_empty(x.shape[0], PANEL_ROWS, w.shape[0], PANEL_COLUMNS)
    for i, x_panel in enumerate(x):
        for j, w_panel in enumerate(w):
            out[i, :, j] = x_panel @ w_panel.T
    return out.view(x.shape[0] * PANEL_ROWS, -1)[:rows, :columns].contiguous()


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[0] % multiple
    x = x if missing == 0 else torch.cat([x, x.new_zeros(missing, x.shape[1])])
    return x.contiguous()


def linear_backward(
    grad_y_RN: Tensor, x_RK: Tensor, weight_NK: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Closed form in FP32 (float64 for float64 operands)."""
    accumulate = torch.promote_types(x_RK.dtype, torch.float32)
    grad = grad_y_RN.to(accumulate)
    grad_x = (grad @ weight_NK.to(accumulate)).to(x_RK.dtype) if needs_x else None
    grad_weight = (grad.T @ x_RK.to(accumulate)).to(weight_NK.dtype) if needs_weight else None
    return grad_x, grad_weight
