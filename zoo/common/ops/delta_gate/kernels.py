"""delta_gate on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT
from zoo.common.ops.trees import padded_width


@triton.jit
def _log1p(x):
    """log(1 + x) for 0 <= x <= 1: the rounding of 1 + x is divided out again."""
    total = 1.0 + x
    return tl.where(total == 1.0, x, tl.log(total) * tl.div_rn(x, total - 1.0))


@triton.jit
def _delta_gate(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, decay_ptr, beta_ptr, a_stride, b_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """log_decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    mask = head < HEADS
    x = tl.load(a_ptr + row * a_stride + head, mask=mask, other=0.0).to(tl.float32)
    x = x + tl.load(dt_bias_ptr + head, mask=mask, other=0.0).to(tl.float32)
    softplus = tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x)))
    rate = tl.exp(tl.load(a_log_ptr + head, mask=mask, other=0.0).to(tl.float32))
    tl.store(decay_ptr + row * HEADS + head, -rate * softplus, mask=mask)
    b = tl.load(b_ptr + row * b_stride + head, mask=mask, other=0.0).to(tl.float32)
    tl.store(beta_ptr + row * HEADS + head, tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), 1.0 + tl.exp(-b)), mask=mask)


def delta_gate(a_RV: Tensor, b_RV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 (log_decay, beta), contiguous; a and b may be strided by row."""
    rows, heads = a_RV.shape
    decay, beta = (torch.empty(rows, heads, dtype=torch.float32, device=a_RV.device) for _ in range(2))
    if rows:
        _delta_gate[(rows,)](
            a_RV,
            b_RV,
            a_log_V,
            dt_bias_V,
            decay,
            beta,
            a_RV.stride(0),
            b_RV.stride(0),
            HEADS=heads,
            BLOCK=padded_width(heads),
            num_warps=1,
            **EXACT,
        )
    return decay, beta
