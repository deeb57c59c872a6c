"""output_gate on CUDA."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT

BLOCK = 1024


@triton.jit
def _output_gate(x_ptr, gate_ptr, y_ptr, columns, width, row_stride, head_stride, column_stride, BLOCK: tl.constexpr):
    """y = x sigmoid(gate) of a block of one row's columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    place = (column // width) * head_stride + (column % width) * column_stride
    gate = tl.load(gate_ptr + row * row_stride + place, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), 1.0 + tl.exp(-gate))
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x is made contiguous; the gate may be a strided view, or one column that every column of its row reads."""
    x = x.contiguous()
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    columns = x[0].numel()
    whole = gate.shape == x.shape
    width = x.shape[-1]
    head_stride = gate.stride(1) if whole and gate.dim() == 3 else 0
    _output_gate[(x.shape[0], triton.cdiv(columns, BLOCK))](
        x, gate, y, columns, width, gate.stride(0), head_stride, gate.stride(-1) if whole else 0, BLOCK=BLOCK, num_warps=4, **EXACT
    )
    return y
