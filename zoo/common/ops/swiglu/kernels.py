"""swiglu on CUDA. Divisions are IEEE, products are rounded one by one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT

BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """The op on FP32 values; a kernel that fuses it calls this and launches with `EXACT`."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu(x_ptr, y_ptr, row_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(x_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * row_stride + inner + column, mask=mask, other=0.0).to(tl.float32)
    out = silu_times(gate, up)
    tl.store(y_ptr + row * inner + column, out.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(grad_ptr, x_ptr, out_ptr, row_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(x_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * row_stride + inner + column, mask=mask, other=0.0).to(tl.float32)
    upstream = tl.load(grad_ptr + row * inner + column, mask=mask, other=0.0).to(tl.float32)
    denominator = 1.0 + tl.exp(-gate)
    sigmoid = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), denominator)
    silu = gate * sigmoid
    grad_gate = upstream * up * (sigmoid + silu * (1.0 - sigmoid))
    out = out_ptr + row * (2 * inner) + column
    tl.store(out, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + inner, (upstream * silu).to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2F], contiguous [..., F]; rows may be strided."""
    inner = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], inner)
    if y.numel():
        x = _rows(gate_up)
        _swiglu[(x.shape[0], triton.cdiv(inner, BLOCK))](x, y, x.stride(0), inner, BLOCK=BLOCK, num_warps=4, **EXACT)
    return y


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate and up together, [..., 2F]."""
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(gate_up.shape)
    if out.numel():
        x = _rows(gate_up)
        grid = (x.shape[0], triton.cdiv(inner, BLOCK))
        _swiglu_backward[grid](grad.contiguous(), x, out, x.stride(0), inner, BLOCK=BLOCK, num_warps=4, **EXACT)
    return out


def _rows(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])
