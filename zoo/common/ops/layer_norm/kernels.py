"""layer_norm on CUDA: one program a row, sums by explicit trees."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width


@triton.jit
def _layer_norm(x_ptr, weight_ptr, bias_ptr, y_ptr, row_stride, inverse_width, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """y = (x - mean) / sqrt(mean (x - mean)^2 + eps) weight + bias of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    value = tl.load(x_ptr + row * row_stride + column, mask=live, other=0.0).to(tl.float32)
    centred = tl.where(live, value - pair_tree(value, BLOCK) * inverse_width, 0.0)
    scale = tl.rsqrt(pair_tree(centred * centred, BLOCK) * inverse_width + eps)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
    y = (centred * scale) * weight + bias
    tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=live)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    y = x.new_empty(x.shape)
    if y.numel():
        _layer_norm[(flat.shape[0],)](
            flat,
            weight,
            bias,
            y,
            flat.stride(0),
            1.0 / width,
            eps,
            WIDTH=width,
            BLOCK=padded_width(width),
            num_warps=1,
            **EXACT,
        )
    return y
