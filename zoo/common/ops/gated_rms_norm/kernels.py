"""gated_rms_norm on CUDA: several heads a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width


@triton.jit
def _gated_rms_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    heads,
    gate_row,
    gate_head,
    inverse_width,
    eps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = x / sqrt(mean x^2 + eps) weight silu(gate), a head's columns by one tree, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    mask = (head[:, None] < heads) & (column[None, :] < WIDTH)
    place = (row * heads + head[:, None]) * WIDTH + column[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + head[:, None] * gate_head + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(pair_tree(x * x, BLOCK) * inverse_width + eps)[:, None]
    y = ((x * scale) * weight[None, :]) * tl.div_rn(gate, 1.0 + tl.exp(-gate))
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm(x_RVE: Tensor, gate_RVE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Contiguous output; the gate may be a strided view with unit column stride."""
    rows, heads, width = x_RVE.shape
    x = x_RVE.contiguous()
    y = x.new_empty(x.shape)
    if y.numel():
        block = padded_width(width)
        tile = max(1, 1024 // block)
        _gated_rms_norm[(rows, triton.cdiv(heads, tile))](
            x,
            gate_RVE,
            weight_E,
            y,
            heads,
            gate_RVE.stride(0),
            gate_RVE.stride(1),
            1.0 / width,
            eps,
            WIDTH=width,
            TILE=tile,
            BLOCK=block,
            num_warps=4,
            **EXACT,
        )
    return y
