"""packed_experts on CUDA: grouped products that dequantise a tile of weights before they multiply with it.

Weights are the left operand, out^T = W x^T: they come from registers, where they were dequantised, and few rows of x make a narrow tile.
The additions are those of the experts op: K ascending, in one FP32 accumulator. The layout of rows is that of the experts op too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.e2m1 import GROUP
from zoo.common.ops.experts.kernels import (
    PAIR,
    POSITION,
    ROW,
    Layout,
    Tile,
    add_slots,
    backward_tile,
    experts_triton,
    grouped_product,
    lay_out,
    source_row,
    through_deepgemm,
)
from zoo.common.ops.swiglu.kernels import silu_times, swiglu_backward
from zoo.common.ops.tree_kernels import EXACT

LOOKED_UP = 64  # rows of a tile up to which BF16 values of codes are looked up by `prmt`; no byte depends on it
DEQUANTISE_ROWS = 192  # mean rows per expert from which dequantising all weights first pays


def _tile(pairs: int, experts: int) -> Tile:
    """`columns` are those of the output, the rows of a tile's weights: at least 64, so that few rows multiply on wgmma too."""
    mean = pairs / experts
    if mean <= 8:
        return Tile(16, 64, 64, 4, 5) if mean < 1 else Tile(16, 128, 64, 4, 4)
    if mean <= 24:
        return Tile(32, 128, 64, 4, 3)
    return Tile(64, 128, 64, 4, 3) if mean <= 64 else Tile(128, 64, 64, 4, 3)


@triton.jit
def e2m1_values(codes, scale):
    """FP32 values of codes of four bits, times FP32 scales; exact, subnormal numbers too."""
    # a code as the last two bits of an FP32 exponent and the first of its mantissa is 2^126 too small, where it is subnormal too
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale  # 2^126


@triton.jit
def e8m0_values(byte):
    """FP32 values of exponents."""
    bits = byte.to(tl.int32)
    return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def looked_up(both, twice):
    """BF16 values of both codes of a byte, times a BF16 scale, as one number of 32 bits: the even column below the odd one.

    twice  the scale in both halves of 32 bits

    Four bytes at a time. Three bits of a code pick the upper and the lower byte of its BF16 number from eight by `prmt`; its fourth bit
    makes `prmt` repeat a sign bit, which is shifted to the number's.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 first, second, codes, upper, lower, sign;
        and.b32 codes, $4, 0x77777777;
        prmt.b32 upper, 0x3F3F3F00, 0x40404040, codes;
        prmt.b32 lower, 0xC0800000, 0xC0804000, codes;
        prmt.b32 sign, 0x80808080, 0x80808080, $4;
        shl.b32 sign, sign, 1;
        lop3.b32 upper, sign, 0x80808080, upper, 0xEA;
        prmt.b32 first, lower, upper, 0x5140;
        prmt.b32 second, lower, upper, 0x7362;
        mul.rn.bf16x2 $0, first, $5;
        mul.rn.bf16x2 $1, second, $6;
        shr.u32 codes, codes, 16;
        prmt.b32 upper, 0x3F3F3F00, 0x40404040, codes;
        prmt.b32 lower, 0xC0800000, 0xC0804000, codes;
        shr.u32 sign, $4, 16;
        prmt.b32 sign, 0x80808080, 0x80808080, sign;
        shl.b32 sign, sign, 1;
        lop3.b32 upper, sign, 0x80808080, upper, 0xEA;
        prmt.b32 first, lower, upper, 0x5140;
        prmt.b32 second, lower, upper, 0x7362;
        mul.rn.bf16x2 $2, first, $7;
        mul.rn.bf16x2 $3, second, $8;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [both, twice],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _weights(
    codes_ptr,
    scales_ptr,
    n,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    LOOKUP: tl.constexpr,
):
    """Values [BLOCK_N, BLOCK_K] in FP32, or with LOOKUP in BF16: the weight's rows n, columns from `start` on; zeros beyond its ends."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    HALF: tl.constexpr = GROUP // 2
    group = start // GROUP + tl.arange(0, GROUPS)
    byte = tl.arange(0, HALF)
    row = n.to(tl.int64)
    codes_at = codes_ptr + row[:, None, None] * (K // 2) + group[None, :, None] * HALF + byte[None, None, :]
    scales_at = scales_ptr + row[:, None] * (K // GROUP) + group[None, :]
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        both = tl.load(codes_at)
        scale = tl.load(scales_at)
    else:
        inside = (n < N)[:, None] & (group < K // GROUP)[None, :]
        both = tl.load(codes_at, mask=inside[:, :, None], other=0)
        scale = tl.load(scales_at, mask=inside, other=0)
    times = e8m0_values(scale)[:, :, None]
    if LOOKUP:
        once = times.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        pair = looked_up(both, tl.broadcast_to(once | (once << 16), (BLOCK_N, GROUPS, HALF)))
        even = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        wide = both.to(tl.int32)
        even = e2m1_values(wide, times)
        odd = e2m1_values(wide >> 4, times)
    return tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K))


@triton.jit(do_not_specialize=["tiles"])
def _packed_product_kernel(
    a_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    pair_ptr,
    expert_ptr,
    experts_ptr,
    tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BY: tl.constexpr,
    OUT_BY: tl.constexpr,
    LONE: tl.constexpr,
    SWIGLU: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    LOOKUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = a W_e^T by tiles, W [X, N, K] in codes and scales; SWIGLU: W [X, 2N, K], and the two halves meet in swiglu."""
    TOGETHER: tl.constexpr = 8  # tiles that share a block of weight columns while it is in cache
    columns = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (TOGETHER * columns)
    height = tl.minimum(tiles - group * TOGETHER, TOGETHER)
    tile = group * TOGETHER + (tl.program_id(0) % (TOGETHER * columns)) % height
    n = (tl.program_id(0) % (TOGETHER * columns)) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    position = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if LONE:
        expert = tl.load(experts_ptr + tile).to(tl.int64)
        pair = tl.where(tl.arange(0, BLOCK_M) == 0, tile, -1)
    else:
        expert = tl.load(expert_ptr + tile).to(tl.int64)
        pair = tl.load(pair_ptr + position)
    if expert < 0:
        return

    live = pair >= 0
    source = source_row(position, tl.maximum(pair, 0), BY, SLOTS)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + source[:, None] * K + k[None, :]
    HEIGHT: tl.constexpr = 2 * N if SWIGLU else N
    codes_at = codes_ptr + expert * (HEIGHT * (K // 2))
    scales_at = scales_ptr + expert * (HEIGHT * (K // GROUP))
    kind = a_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at, mask=live[:, None], other=0.0)
        else:
            a = tl.load(a_at, mask=live[:, None] & (start + k < K)[None, :], other=0.0)
        w = _weights(codes_at, scales_at, n, start, N, K, BLOCK_N, BLOCK_K, GROUP, LOOKUP)
        acc = tl.dot(w.to(kind), tl.trans(a), acc, input_precision="ieee")
        if SWIGLU:
            up_at = codes_at + N * (K // 2)
            up_scales_at = scales_at + N * (K // GROUP)
            up = _weights(up_at, up_scales_at, n, start, N, K, BLOCK_N, BLOCK_K, GROUP, LOOKUP)
            acc_up = tl.dot(up.to(kind), tl.trans(a), acc_up, input_precision="ieee")
        a_at += BLOCK_K

    kind_out = out_ptr.dtype.element_ty
    if SWIGLU:  # gate_up rounds before swiglu does
        acc = silu_times(acc.to(kind_out).to(tl.float32), acc_up.to(kind_out).to(tl.float32), LIMIT)
    target = source_row(position, pair, OUT_BY, SLOTS)
    at = out_ptr + target[:, None] * N + n[None, :]
    tl.store(at, tl.trans(acc.to(kind_out)), mask=live[:, None] & (n < N)[None, :])


def _packed_product(
    a: Tensor,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    layout: Layout | None,
    experts_RK: Tensor,
    by: tl.constexpr,
    out_by: tl.constexpr,
    tile: Tile,
    fused: bool = False,
    limit: float | None = None,
) -> Tensor:
    """Without a layout there is one row: each of its pairs is a tile of its own."""
    tiles = experts_RK.numel() if layout is None else layout.expert_B.numel()
    n = out.shape[-1]
    pair, expert = (experts_RK, experts_RK) if layout is None else (layout.pair_P, layout.expert_B)
    _packed_product_kernel[(tiles * triton.cdiv(n, tile.columns),)](
        a,
        codes.contiguous().view(torch.uint8),
        scales.contiguous().view(torch.uint8),
        out,
        pair,
        expert,
        experts_RK,
        tiles,
        N=n,
        K=a.shape[-1],
        SLOTS=experts_RK.shape[1],
        BY=by.value,
        OUT_BY=out_by.value,
        LONE=layout is None,
        SWIGLU=fused,
        LIMIT=limit,
        GROUP=GROUP,
        LOOKUP=tile.rows <= LOOKED_UP and a.dtype == torch.bfloat16,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return out


@triton.jit(do_not_specialize=["tiles"])
def _transposed_product_kernel(
    a_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    pair_ptr,
    expert_ptr,
    tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BY: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = a W_e by tiles, W [X, K, N] in codes and scales; rows of out by position. Many rows: the weights are the right operand."""
    TOGETHER: tl.constexpr = 8  # tiles that share a block of weight columns while it is in cache
    columns = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (TOGETHER * columns)
    height = tl.minimum(tiles - group * TOGETHER, TOGETHER)
    tile = group * TOGETHER + (tl.program_id(0) % (TOGETHER * columns)) % height
    first = (tl.program_id(0) % (TOGETHER * columns)) // height * BLOCK_N
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return

    position = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + position)
    live = pair >= 0
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + source_row(position, tl.maximum(pair, 0), BY, SLOTS)[:, None] * K + k[None, :]
    codes_at = codes_ptr + expert * (K * (N // 2))
    scales_at = scales_ptr + expert * (K * (N // GROUP))
    kind = a_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at, mask=live[:, None], other=0.0)
        else:
            a = tl.load(a_at, mask=live[:, None] & (start + k < K)[None, :], other=0.0)
        # not looked up: as a right operand those would keep shapes in shared memory that Triton 3.6 has no layout for
        w = _weights(codes_at, scales_at, start + k, first, K, N, BLOCK_K, BLOCK_N, GROUP, False)
        acc = tl.dot(a, w.to(kind), acc, input_precision="ieee")
        a_at += BLOCK_K
    n = first + tl.arange(0, BLOCK_N)
    at = out_ptr + position.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


def _transposed_product(
    a: Tensor,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    layout: Layout,
    by: tl.constexpr,
    tile: Tile,
) -> Tensor:
    """a W_e, as `grouped_product` with the transposed weights; all weights dequantised before it where the rows are many."""
    pairs = layout.place_RK.numel()
    if pairs >= DEQUANTISE_ROWS * codes.shape[0]:
        return grouped_product(a, dequantise(codes, scales, a.dtype), out, layout, layout.place_RK, by, POSITION, tile, transposed=True)
    tiles = layout.expert_B.numel()
    n = out.shape[-1]
    _transposed_product_kernel[(tiles * triton.cdiv(n, tile.columns),)](
        a,
        codes.contiguous().view(torch.uint8),
        scales.contiguous().view(torch.uint8),
        out,
        layout.pair_P,
        layout.expert_B,
        tiles,
        N=n,
        K=a.shape[-1],
        SLOTS=layout.slots,
        BY=by.value,
        GROUP=GROUP,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return out


def packed_experts_triton(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    limit: float | None = None,
) -> Tensor:
    """Gate and up with swiglu in one launch, down in another, which writes each slot row to its own place."""
    rows, slots = experts_RK.shape
    count, hidden, bytes_a_row = down_XDC.shape
    out = x_RD.new_empty(rows, slots, hidden)
    if out.numel() == 0:
        return out
    chosen = experts_RK.contiguous()
    tile = _tile(rows * slots, count)
    layout = None if rows == 1 else lay_out(chosen, count, tile.rows)
    positions = slots * tile.rows if layout is None else layout.pair_P.numel()
    hidden_PF = x_RD.new_empty(positions, 2 * bytes_a_row)
    x = x_RD.contiguous()
    _packed_product(x, gate_up_X2FC, gate_up_scales_X2FG, hidden_PF, layout, chosen, ROW, POSITION, tile, fused=True, limit=limit)
    return _packed_product(hidden_PF, down_XDC, down_scales_XDG, out, layout, chosen, POSITION, PAIR, tile)


@triton.jit
def _dequantise_kernel(codes_ptr, scales_ptr, out_ptr, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK scales and their codes a program."""
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    both = tl.load(codes_ptr + group[:, None] * HALF + tl.arange(0, HALF)[None, :], mask=inside[:, None], other=0).to(tl.int32)
    times = e8m0_values(tl.load(scales_ptr + group, mask=inside, other=0))[:, None]
    values = tl.reshape(tl.join(e2m1_values(both, times), e2m1_values(both >> 4, times)), (BLOCK, GROUP))
    at = out_ptr + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(at, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def dequantise(codes_XNC: Tensor, scales_XNG: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [X, N, K] in `dtype`."""
    out = torch.empty(*codes_XNC.shape[:-1], 2 * codes_XNC.shape[-1], dtype=dtype, device=codes_XNC.device)
    groups = scales_XNG.numel()
    if groups:
        block = 128
        codes = codes_XNC.contiguous().view(torch.uint8)
        scales = scales_XNG.contiguous().view(torch.uint8)
        _dequantise_kernel[(triton.cdiv(groups, block),)](codes, scales, out, groups, GROUP=GROUP, BLOCK=block, num_warps=4, **EXACT)
    return out


def packed_experts_deepgemm(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    limit: float | None = None,
) -> Tensor:
    """Many rows by dequantising all experts once, and DeepGEMM's grouped products. Fewer go to Triton, whose bytes are the same."""
    weights = (gate_up_X2FC, gate_up_scales_X2FG, down_XDC, down_scales_XDG)
    if experts_RK.numel() < DEQUANTISE_ROWS * down_XDC.shape[0]:
        return packed_experts_triton(x_RD, experts_RK, *weights, limit)
    return through_deepgemm(x_RD, experts_RK, *dequantised_weights(*weights, x_RD.dtype), limit)


def packed_experts_dequantised(
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    limit: float | None = None,
) -> Tensor:
    """All experts dequantised once, then the experts op's own product at any number of rows: what the others' bytes are held against."""
    weights = dequantised_weights(gate_up_X2FC, gate_up_scales_X2FG, down_XDC, down_scales_XDG, x_RD.dtype)
    return experts_triton(x_RD, experts_RK, *weights, limit)


def dequantised_weights(
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """gate_up_X2FD and down_XDF."""
    return dequantise(gate_up_X2FC, gate_up_scales_X2FG, dtype), dequantise(down_XDC, down_scales_XDG, dtype)


def packed_experts_backward(
    grad_RKD: Tensor,
    x_RD: Tensor,
    experts_RK: Tensor,
    gate_up_X2FC: Tensor,
    gate_up_scales_X2FG: Tensor,
    down_XDC: Tensor,
    down_scales_XDG: Tensor,
    limit: float | None = None,
) -> Tensor:
    """The gradient of x. The inner rows are made again."""
    rows, slots = experts_RK.shape
    count, hidden, bytes_a_row = down_XDC.shape
    intermediate = 2 * bytes_a_row
    if rows * slots == 0:
        return torch.zeros_like(x_RD)
    x_RD = x_RD.contiguous()
    chosen = experts_RK.contiguous()
    tile = backward_tile(rows * slots, count)
    layout = lay_out(chosen, count, tile.rows)
    positions = layout.pair_P.numel()

    gate_up_P2F = x_RD.new_empty(positions, 2 * intermediate)
    _packed_product(x_RD, gate_up_X2FC, gate_up_scales_X2FG, gate_up_P2F, layout, chosen, ROW, POSITION, tile)
    grad_hidden_PF = x_RD.new_empty(positions, intermediate)
    _transposed_product(grad_RKD.contiguous(), down_XDC, down_scales_XDG, grad_hidden_PF, layout, PAIR, tile)
    grad_gate_up_P2F = swiglu_backward(grad_hidden_PF, gate_up_P2F, limit, layout.pair_P)
    slots_PD = x_RD.new_empty(positions, hidden)
    _transposed_product(grad_gate_up_P2F, gate_up_X2FC, gate_up_scales_X2FG, slots_PD, layout, POSITION, tile)
    return add_slots(slots_PD, layout)
