"""swiglu on CUDA. Divisions are IEEE, products are rounded one by one."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT


@triton.jit
def silu_times(gate, up, LIMIT: tl.constexpr):
    """The op on FP32 values, LIMIT None without a limit; a kernel that fuses it calls this and launches with `EXACT`."""
    if LIMIT is not None:
        gate, up = cut(gate, up, LIMIT)
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def cut(gate, up, LIMIT: tl.constexpr):
    """min(gate, LIMIT), and up cut to +-LIMIT; a NaN stays one."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit(do_not_specialize=["rows"])
def _swiglu(
    x_ptr,
    pair_ptr,
    y_ptr,
    row_stride,
    rows,
    intermediate,
    LIMIT: tl.constexpr,
    SOME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = silu(gate) up."""
    row, column, mask = _elements(pair_ptr, rows, intermediate, SOME, ROWS, BLOCK)
    if SOME:
        if tl.max(row, 0) < 0:
            return
    gate, up = _gate_up(x_ptr, row, column, mask, row_stride, intermediate)
    out = silu_times(gate, up, LIMIT)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * intermediate + column[None, :], out.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward(
    grad_ptr,
    x_ptr,
    pair_ptr,
    out_ptr,
    row_stride,
    rows,
    intermediate,
    LIMIT: tl.constexpr,
    SOME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d gate = d y up (s + gate s (1 - s)) and d up = d y gate s, s = sigmoid(gate); zero where LIMIT cut."""
    row, column, mask = _elements(pair_ptr, rows, intermediate, SOME, ROWS, BLOCK)
    if SOME:
        if tl.max(row, 0) < 0:
            return
    gate, up = _gate_up(x_ptr, row, column, mask, row_stride, intermediate)
    upstream = tl.load(grad_ptr + row.to(tl.int64)[:, None] * intermediate + column[None, :], mask=mask, other=0.0).to(tl.float32)
    whole_gate = gate
    whole_up = up
    if LIMIT is not None:
        gate, up = cut(gate, up, LIMIT)
    denominator = 1.0 + tl.exp(-gate)
    sigmoid = tl.div_rn(tl.full((ROWS, BLOCK), 1.0, tl.float32), denominator)
    silu = gate * sigmoid
    grad_gate = upstream * up * (sigmoid + silu * (1.0 - sigmoid))
    grad_up = upstream * silu
    if LIMIT is not None:
        grad_gate = tl.where(whole_gate > LIMIT, 0.0, grad_gate)
        grad_up = tl.where(tl.abs(whole_up) > LIMIT, 0.0, grad_up)
    out = out_ptr + row.to(tl.int64)[:, None] * (2 * intermediate) + column[None, :]
    tl.store(out, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + intermediate, grad_up.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _elements(pair_ptr, rows, intermediate, SOME: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's rows (-1: none), its columns, and which elements there are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    if SOME:
        live &= tl.load(pair_ptr + row, mask=live, other=-1) >= 0
    return tl.where(live, row, -1), column, live[:, None] & (column < intermediate)[None, :]


@triton.jit
def _gate_up(x_ptr, row, column, mask, row_stride, intermediate):
    """Those elements in FP32."""
    at = x_ptr + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + intermediate, mask=mask, other=0.0).to(tl.float32)


def swiglu(gate_up: Tensor, limit: float | None = None, pair_P: Tensor | None = None) -> Tensor:
    """silu(gate) * up of [..., 2F], contiguous [..., F]; rows may be strided. Rows whose pair is negative are left as memory was."""
    intermediate = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], intermediate)
    if y.numel():
        x = _rows(gate_up)
        grid, tile = _launch(x.shape[0], intermediate, pair_P)
        _swiglu[grid](x, x if pair_P is None else pair_P, y, x.stride(0), x.shape[0], intermediate, LIMIT=limit, **tile)
    return y


def swiglu_backward(grad: Tensor, gate_up: Tensor, limit: float | None = None, pair_P: Tensor | None = None) -> Tensor:
    """The gradient of gate and up together, [..., 2F]. Rows whose pair is negative are left as memory was."""
    intermediate = gate_up.shape[-1] // 2
    out = gate_up.new_empty(gate_up.shape)
    if out.numel():
        x = _rows(gate_up)
        grid, tile = _launch(x.shape[0], intermediate, pair_P)
        pair = x if pair_P is None else pair_P
        _swiglu_backward[grid](grad.contiguous(), x, pair, out, x.stride(0), x.shape[0], intermediate, LIMIT=limit, **tile)
    return out


def _launch(rows: int, intermediate: int, pair_P: Tensor | None) -> tuple[tuple[int, int], dict[str, Any]]:
    """Blocks of columns that divide the width where they can: a warp of columns beyond it costs as much as one within."""
    columns = next((c for c in (1024, 512) if intermediate % c == 0), 256)
    height = 1024 // columns
    grid = (triton.cdiv(rows, height), triton.cdiv(intermediate, columns))
    return grid, {"SOME": pair_P is not None, "ROWS": height, "BLOCK": columns, "num_warps": 4, **EXACT}


def _rows(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])
