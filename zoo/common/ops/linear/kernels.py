"""linear on CUDA: one ascending-K FP32 accumulator (Triton or DeepGEMM, equal bytes), and cuBLAS as the unaligned rival.

The row count picks a tile, never an order: every tile walks K in steps of 64 from 0 into one accumulator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree_first
from zoo.common.ops.trees import padded_width

BLOCK_K = 64
GROUP_M = 8


def _tile(rows: int, columns: int) -> dict[str, int]:
    """Tile and pipeline for a row count: decode reads weights with many small programs, prefill fills `wgmma` tiles."""
    if rows <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32 if columns <= 16384 else 64, "num_warps": 4, "num_stages": 8}
    if rows <= 32:
        return {"BLOCK_M": 32, "BLOCK_N": 32 if columns <= 8192 else 64, "num_warps": 4, "num_stages": 6}
    if rows <= 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64 if columns <= 8192 else 128, "num_warps": 4, "num_stages": 4}
    if rows <= 512:
        return {"BLOCK_M": 128, "BLOCK_N": 64 if columns <= 4096 else 128, "num_warps": 8, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128 if columns <= 2048 else 256, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr,
    w_ptr,
    y_ptr,
    rows,
    columns,
    x_stride,
    w_stride,
    part_stride,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WIDEN: tl.constexpr = False,
):
    """y[part] = x[:, part] w[:, part]^T for a tile; DEPTH is K of one part, grid axis 1 the part."""
    pid = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    # programs that share weight columns run near each other, for L2
    first = (pid // (GROUP_M * tiles_n)) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    tile_m = first + (pid % (GROUP_M * tiles_n)) % height
    tile_n = (pid % (GROUP_M * tiles_n)) // height
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns beyond the end repeat the last one and are not stored
    x_row = x_ptr + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + part * DEPTH
    w_row = w_ptr + tl.minimum(n, columns - 1).to(tl.int64) * w_stride + part * DEPTH
    x_tile = x_row[:, None] + k[None, :]
    w_tile = w_row[None, :] + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(x_tile)
            b = tl.load(w_tile)
        else:
            a = tl.load(x_tile, mask=k[None, :] < DEPTH - start, other=0.0)
            b = tl.load(w_tile, mask=k[:, None] < DEPTH - start, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    out = y_ptr + part * part_stride + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < columns))


@triton.jit
def _add_parts(parts_ptr, y_ptr, count, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    """y = the adjacent-pair tree over partial products, padded with +0."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK_P)
    mask = (part[:, None] < PARTS) & (place[None, :] < count)
    x = tl.load(parts_ptr + part.to(tl.int64)[:, None] * count + place[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + place, pair_tree_first(x, BLOCK_P, BLOCK).to(y_ptr.dtype.element_ty), mask=place < count)


def linear_triton(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """The defining provider. x may have any row stride; out_dtype is x's dtype or FP32."""
    return _by_tiles(x_RK, weight_NK, out_dtype, k_parts, _tile(x_RK.shape[0], weight_NK.shape[0]), widen=False)


def linear_fp32(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """Both operands widened as they are loaded: no FP32 copy of a vocabulary's weight is made."""
    return _by_tiles(x_RK, weight_NK, out_dtype, k_parts, _wide_tile(x_RK.shape[0]), widen=True)


def _wide_tile(rows: int) -> dict[str, int]:
    """FP32 FMAs run without tensor cores, so tiles are small."""
    return {"BLOCK_M": 16 if rows <= 16 else 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def _by_tiles(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int, tile: dict[str, int], widen: bool) -> Tensor:
    rows, depth = x_RK.shape
    columns = weight_NK.shape[0]
    y = x_RK.new_empty(rows, columns, dtype=out_dtype)
    if y.numel() == 0:
        return y
    x = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    w = weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous()
    out = y if k_parts == 1 else x.new_empty(k_parts, rows, columns, dtype=torch.float32)
    grid = (triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"]), k_parts)
    _linear[grid](
        x,
        w,
        out,
        rows,
        columns,
        x.stride(0),
        w.stride(0),
        rows * columns,
        DEPTH=depth // k_parts,
        BLOCK_K=BLOCK_K,
        GROUP_M=GROUP_M,
        WIDEN=widen,
        **tile,
    )
    if k_parts > 1:
        count = rows * columns
        _add_parts[(triton.cdiv(count, 256),)](out, y, count, PARTS=k_parts, BLOCK_P=padded_width(k_parts), BLOCK=256, **EXACT)
    return y


def linear_deepgemm(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """DeepGEMM's BF16 product: the same ascending K in one accumulator, stored as BF16 or FP32."""
    import deep_gemm

    assert k_parts == 1, "DeepGEMM has no parts; the contract sends such shapes to Triton"
    y = x_RK.new_empty(x_RK.shape[0], weight_NK.shape[0], dtype=out_dtype)
    if y.numel():
        deep_gemm.bf16_gemm_nt(x_RK.contiguous(), weight_NK.contiguous(), y)
    return y


def linear_cublas(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """What everyone else runs. `k_parts` is cuBLAS's own affair here."""
    if out_dtype == x_RK.dtype:
        return x_RK @ weight_NK.T
    return torch.mm(x_RK, weight_NK.T, out_dtype=out_dtype)


def linear_backward(
    grad_y_RN: Tensor, x_RK: Tensor, weight_NK: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Two cuBLAS products in the operands' dtype with FP32 accumulation: one shape gives the same bytes in every run."""
    grad = grad_y_RN.to(x_RK.dtype)
    grad_x = grad @ weight_NK if needs_x else None
    grad_weight = grad.T @ x_RK if needs_weight else None
    return grad_x, grad_weight
