"""hyper_head on CUDA: hyper_pre's product and collapse, around one program a row for the coefficients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.hyper_pre.kernels import collapse, inverse_root, products, sigmoid, warps
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.ops.trees import padded_width


@triton.jit
def _gates(
    x_ptr,
    dot_ptr,
    base_ptr,
    scale_ptr,
    out_ptr,
    eps,
    floor,
    inverse_width,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """sigmoid(mix scale + base) + floor of one row."""
    row = tl.program_id(0).to(tl.int64)
    root = inverse_root(x_ptr, row, eps, inverse_width, WIDTH, BLOCK)
    stream = tl.arange(0, BLOCK_S)
    live = stream < STREAMS
    mix = tl.load(dot_ptr + row * STREAMS + stream, mask=live, other=0.0) * root
    gate = sigmoid(mix * tl.load(scale_ptr) + tl.load(base_ptr + stream, mask=live, other=0.0), BLOCK_S) + floor
    tl.store(out_ptr + row * STREAMS + stream, gate, mask=live)


def hyper_head(streams_RSD: Tensor, fn_SK: Tensor, base_S: Tensor, scale_1: Tensor, eps: float, floor: float) -> Tensor:
    """x_RD."""
    rows, streams, width = streams_RSD.shape
    x = streams_RSD.contiguous()
    gates = torch.empty(rows, streams, dtype=torch.float32, device=x.device)
    if rows:
        block = padded_width(streams * width)
        _gates[(rows,)](
            x,
            products(x, fn_SK),
            base_S.contiguous(),
            scale_1.contiguous(),
            gates,
            eps,
            floor,
            1.0 / (streams * width),
            STREAMS=streams,
            WIDTH=streams * width,
            BLOCK=block,
            BLOCK_S=padded_width(streams),
            num_warps=warps(block),
            **EXACT,
        )
    return collapse(x, gates)
