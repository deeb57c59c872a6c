"""experts on CUDA: (row, slot) pairs sorted by expert on the device, then grouped products in the linear contract's order.

A *pair* is `row * K + slot`. The layout gives each expert whole tiles of `tile` positions; positions without a pair hold -1. Its
sizes are upper bounds that depend on shapes alone, so nothing waits for the host and every call can be captured in a CUDA graph.
Positions name the rows of intermediate tensors, e.g. hidden_PF.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.swiglu.kernels import silu_times, swiglu, swiglu_backward
from zoo.common.ops.tree_kernels import EXACT

POSITION, PAIR, ROW = (tl.constexpr(i) for i in range(3))  # how a product finds the row that belongs to a position
DEEPGEMM_ROWS = 128  # mean rows per expert from which padding each expert to DeepGEMM's tile pays
BLOCK_R = 64  # rows that a weight gradient adds at a time
CHUNK = 256  # pairs that one program places, where there are many
ONE_LAUNCH = 1 << 20  # pairs times experts from which two launches sort faster than every expert counting all pairs


@dataclass(frozen=True)
class Layout:
    """Where each pair lies. `first_X1[e]` is expert e's first position; a tile past the last one used has expert -1."""

    tile: int
    slots: int
    pair_P: Tensor
    expert_B: Tensor
    place_RK: Tensor
    first_X1: Tensor


@dataclass(frozen=True)
class Tile:
    """Launch shape of a product; the bytes don't depend on it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def _tile(pairs: int, experts: int) -> Tile:
    mean = pairs // experts
    if mean <= 8:
        # few pairs: narrow tiles, so that the chosen experts' weights are read by all multiprocessors
        return Tile(16, 32, 128, 4, 4) if pairs <= 16 else Tile(16, 64, 64, 4, 5)
    if mean <= 24:
        return Tile(32, 64, 64, 4, 4)
    return Tile(64, 64, 64, 4, 4) if mean <= 96 else Tile(128, 128, 64, 8, 3)


def _tiles(pairs: int, experts: int, tile: int) -> int:
    """The most tiles that any choice of experts can need."""
    return (pairs + min(experts, pairs) * (tile - 1)) // tile


def lay_out(experts_RK: Tensor, experts: int, tile: int) -> Layout:
    """A stable counting sort of the pairs by expert. `experts_RK` holds ids below `experts`."""
    pairs = experts_RK.numel()
    tiles = _tiles(pairs, experts, tile)
    chosen = experts_RK.contiguous()
    integers = {"dtype": torch.int32, "device": experts_RK.device}
    layout = Layout(
        tile,
        experts_RK.shape[1],
        torch.empty(tiles * tile, **integers),
        torch.empty(tiles, **integers),
        torch.empty(experts_RK.shape, **integers),
        torch.empty(experts + 1, **integers),
    )
    bins = max(32, triton.next_power_of_2(experts))
    if pairs * max(experts, 128) < ONE_LAUNCH:  # about 128 programs run side by side: fewer experts count no sooner
        _lay_out_kernel[(experts + 1,)](
            chosen,
            layout.pair_P,
            layout.expert_B,
            layout.place_RK,
            layout.first_X1,
            pairs,
            tiles,
            EXPERTS=experts,
            BINS=bins,
            TILE=tile,
            CHUNK=512 if pairs <= 512 else 2048,
            num_warps=4 if pairs <= 512 else 8,
        )
        return layout
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, bins, **integers)
    _count_kernel[(chunks,)](chosen, counts, layout.pair_P, pairs, tiles * tile, BINS=bins, CHUNK=CHUNK)
    _place_kernel[(chunks,)](
        chosen,
        counts,
        layout.pair_P,
        layout.expert_B,
        layout.place_RK,
        layout.first_X1,
        pairs,
        chunks,
        tiles,
        EXPERTS=experts,
        BINS=bins,
        TILE=tile,
        CHUNK=CHUNK,
        AT_ONCE=max(1, 4096 // bins),
        num_warps=8,
    )
    return layout


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _lay_out_kernel(
    experts_ptr,
    pair_ptr,
    expert_ptr,
    place_ptr,
    first_ptr,
    pairs,
    tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Few pairs. Program e owns expert e's tiles, program EXPERTS those that are left. Each counts all pairs: none waits for another."""
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for at in range(0, pairs, CHUNK):
        live = at + lanes < pairs
        ids = tl.load(experts_ptr + at + lanes, mask=live, other=0).to(tl.int32)
        counts += tl.histogram(ids, BINS, mask=live)
    needed = (counts + TILE - 1) // TILE
    first_tile = tl.sum(tl.where(bins < own, needed, 0), 0)
    last_tile = tl.where(own == EXPERTS, tiles, first_tile + tl.sum(tl.where(bins == own, needed, 0), 0))
    position = first_tile * TILE
    tl.store(first_ptr + own, position)

    for at in range(0, pairs, CHUNK):
        pair = at + lanes
        mine = (tl.load(experts_ptr + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32) == own) & (pair < pairs)
        place = position + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pair_ptr + place, pair, mask=mine)
        tl.store(place_ptr + pair, place, mask=mine)
        position += tl.sum(mine.to(tl.int32), 0)
    for at in range(position, last_tile * TILE, CHUNK):
        tl.store(pair_ptr + at + lanes, -1, mask=at + lanes < last_tile * TILE)
    for at in range(first_tile, last_tile, CHUNK):
        tl.store(expert_ptr + at + lanes, tl.where(own == EXPERTS, -1, own), mask=at + lanes < last_tile)


@triton.jit(do_not_specialize=["pairs", "positions"])
def _count_kernel(experts_ptr, counts_ptr, pair_ptr, pairs, positions, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Many pairs, first launch: a chunk's pairs by expert; and -1 in all positions, shared out among the programs."""
    own = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    live = own * CHUNK + lanes < pairs
    ids = tl.load(experts_ptr + own * CHUNK + lanes, mask=live, other=0).to(tl.int32)
    tl.store(counts_ptr + own * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS, mask=live))
    for at in range(own * CHUNK, positions, tl.num_programs(0) * CHUNK):
        tl.store(pair_ptr + at + lanes, -1, mask=at + lanes < positions)


@triton.jit(do_not_specialize=["pairs", "chunks", "tiles"])
def _place_kernel(
    experts_ptr,
    counts_ptr,
    pair_ptr,
    expert_ptr,
    place_ptr,
    first_ptr,
    pairs,
    chunks,
    tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Second launch: a pair lies behind its expert's pairs of earlier chunks, and those of its chunk that are before it."""
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lines = tl.arange(0, AT_ONCE)
    all_counts = tl.zeros((AT_ONCE, BINS), tl.int32)
    earlier_counts = tl.zeros((AT_ONCE, BINS), tl.int32)
    for at in range(0, chunks, AT_ONCE):
        chunk = (at + lines)[:, None]
        found = tl.load(counts_ptr + chunk * BINS + bins[None, :], mask=chunk < chunks, other=0)
        all_counts += found
        earlier_counts += tl.where(chunk < own, found, 0)
    needed = (tl.sum(all_counts, 0) + TILE - 1) // TILE
    last_tile = tl.cumsum(needed, 0)
    start = (last_tile - needed) * TILE + tl.sum(earlier_counts, 0)

    pair = own * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(experts_ptr + pair, mask=pair < pairs, other=0).to(tl.int32)
    before = tl.zeros((32, CHUNK), tl.int32)
    for at in range(own * CHUNK, tl.minimum(own * CHUNK + CHUNK, pairs), 32):
        other = at + tl.arange(0, 32)
        theirs = tl.load(experts_ptr + other, mask=other < pairs, other=0).to(tl.int32)
        before += ((theirs[:, None] == ids[None, :]) & (other[:, None] < pair[None, :])).to(tl.int32)
    place = tl.gather(start, ids, 0) + tl.sum(before, 0)
    tl.store(pair_ptr + place, pair, mask=pair < pairs)
    tl.store(place_ptr + pair, place, mask=pair < pairs)

    share = tl.cdiv(tiles, chunks)
    for at in range(own * share, tl.minimum(own * share + share, tiles), 16):
        tile = at + tl.arange(0, 16)
        owner = tl.sum((last_tile[:, None] <= tile[None, :]).to(tl.int32), 0)
        tl.store(expert_ptr + tile, tl.where(owner < EXPERTS, owner, -1), mask=(tile < own * share + share) & (tile < tiles))
    if own == 0:
        tl.store(first_ptr + bins, (last_tile - needed) * TILE, mask=bins < EXPERTS)
        tl.store(first_ptr + EXPERTS, tl.sum(needed, 0) * TILE)


@triton.jit
def source_row(position, pair, BY: tl.constexpr, SLOTS: tl.constexpr):
    """The row that belongs to a position: the position itself, its pair, or its pair's row."""
    if BY == POSITION:
        found = position
    elif BY == PAIR:
        found = pair
    else:
        found = pair // SLOTS
    return found.to(tl.int64)


@triton.jit(do_not_specialize=["tiles"])
def _product_kernel(
    a_ptr,
    weight_ptr,
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
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = a W_e^T by tiles, W [X, N, K] (TRANSPOSED: [X, K, N]); SWIGLU: W [X, 2N, K], and the two halves meet in swiglu."""
    GROUP: tl.constexpr = 8  # tiles that share a block of weight columns while it is in cache
    columns = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP * columns)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    tile = group * GROUP + (tl.program_id(0) % (GROUP * columns)) % height
    n = (tl.program_id(0) % (GROUP * columns)) // height * BLOCK_N + tl.arange(0, BLOCK_N)
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
    if TRANSPOSED:
        w_at = weight_ptr + expert * (N * K) + k[:, None] * N + n[None, :]
    elif SWIGLU:
        w_at = weight_ptr + expert * (2 * N * K) + n[None, :].to(tl.int64) * K + k[:, None]
    else:
        w_at = weight_ptr + expert * (N * K) + n[None, :].to(tl.int64) * K + k[:, None]
    WHOLE: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE:
            a = tl.load(a_at, mask=live[:, None], other=0.0)
            w = tl.load(w_at)
        else:
            a = tl.load(a_at, mask=live[:, None] & (start + k < K)[None, :], other=0.0)
            w = tl.load(w_at, mask=(start + k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
        if SWIGLU:
            if WHOLE:
                up = tl.load(w_at + N * K)
            else:
                up = tl.load(w_at + N * K, mask=(start + k < K)[:, None] & (n < N)[None, :], other=0.0)
            acc_up = tl.dot(a, up, acc_up, input_precision="ieee")
        a_at += BLOCK_K
        w_at += BLOCK_K * (N if TRANSPOSED else 1)

    kind = out_ptr.dtype.element_ty
    if SWIGLU:  # gate_up rounds before swiglu does
        acc = silu_times(acc.to(kind).to(tl.float32), acc_up.to(kind).to(tl.float32), LIMIT)
    target = source_row(position, pair, OUT_BY, SLOTS)
    tl.store(out_ptr + target[:, None] * N + n[None, :], acc.to(kind), mask=live[:, None] & (n < N)[None, :])


def grouped_product(
    a: Tensor,
    weight: Tensor,
    out: Tensor,
    layout: Layout | None,
    experts_RK: Tensor,
    by: tl.constexpr,
    out_by: tl.constexpr,
    tile: Tile,
    fused: bool = False,
    transposed: bool = False,
    limit: float | None = None,
) -> Tensor:
    """Without a layout there is one row: each of its pairs is a tile of its own."""
    tiles = experts_RK.numel() if layout is None else layout.expert_B.numel()
    n = out.shape[-1]
    k = a.shape[-1]
    pair, expert = (experts_RK, experts_RK) if layout is None else (layout.pair_P, layout.expert_B)
    _product_kernel[(tiles * triton.cdiv(n, tile.columns),)](
        a,
        weight,
        out,
        pair,
        expert,
        experts_RK,
        tiles,
        N=n,
        K=k,
        SLOTS=experts_RK.shape[1],
        BY=by.value,
        OUT_BY=out_by.value,
        LONE=layout is None,
        SWIGLU=fused,
        LIMIT=limit,
        TRANSPOSED=transposed,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return out


def experts_triton(x_RD: Tensor, experts_RK: Tensor, gate_up_X2FD: Tensor, down_XDF: Tensor, limit: float | None = None) -> Tensor:
    """Gate and up with swiglu in one launch, down in another, which writes each slot row to its own place."""
    rows, slots = experts_RK.shape
    count, hidden, intermediate = down_XDF.shape
    out = x_RD.new_empty(rows, slots, hidden)
    if out.numel() == 0:
        return out
    chosen = experts_RK.contiguous()
    tile = _tile(rows * slots, count)
    layout = None if rows == 1 else lay_out(chosen, count, tile.rows)
    positions = slots * tile.rows if layout is None else layout.pair_P.numel()
    hidden_PF = x_RD.new_empty(positions, intermediate)
    grouped_product(x_RD.contiguous(), gate_up_X2FD.contiguous(), hidden_PF, layout, chosen, ROW, POSITION, tile, fused=True, limit=limit)
    return grouped_product(hidden_PF, down_XDF.contiguous(), out, layout, chosen, POSITION, PAIR, tile)


def experts_deepgemm(x_RD: Tensor, experts_RK: Tensor, gate_up_X2FD: Tensor, down_XDF: Tensor, limit: float | None = None) -> Tensor:
    """Many rows through DeepGEMM's grouped products. Fewer go to Triton, whose bytes qualification has found to be the same."""
    few = experts_RK.numel() < DEEPGEMM_ROWS * down_XDF.shape[0]
    return (experts_triton if few else through_deepgemm)(x_RD, experts_RK, gate_up_X2FD, down_XDF, limit)


def through_deepgemm(x_RD: Tensor, experts_RK: Tensor, gate_up_X2FD: Tensor, down_XDF: Tensor, limit: float | None = None) -> Tensor:
    """DeepGEMM at any number of rows; each expert's rows are padded to its tile."""
    import deep_gemm

    rows, slots = experts_RK.shape
    count, hidden, intermediate = down_XDF.shape
    layout = lay_out(experts_RK, count, deep_gemm.get_mk_alignment_for_contiguous_layout())
    positions = layout.pair_P.numel()
    # positions without a pair compute what memory held, those past the last expert nothing: nobody reads them
    x_PD = _copy_rows(x_RD, layout.pair_P, slots, x_RD.new_empty(positions, hidden))
    gate_up_P2F = x_RD.new_empty(positions, 2 * intermediate)
    down_PD = x_RD.new_empty(positions, hidden)
    ends_X = layout.first_X1[1:]
    product = partial(deep_gemm.m_grouped_bf16_gemm_nt_contiguous, use_psum_layout=True)
    product(x_PD, gate_up_X2FD.contiguous(), gate_up_P2F, ends_X)
    product(swiglu(gate_up_P2F, limit, layout.pair_P), down_XDF.contiguous(), down_PD, ends_X)
    return _copy_rows(down_PD, layout.place_RK, 1, x_RD.new_empty(rows, slots, hidden))


def _copy_rows(x_ID: Tensor, source: Tensor, share: int, out: Tensor) -> Tensor:
    """out[i] = x_ID[source[i] // share], i over all of `source`; where it is negative, out's row stays as memory was."""
    hidden = x_ID.shape[1]
    block = min(triton.next_power_of_2(hidden), 1024)
    height = 4096 // block
    grid = (triton.cdiv(source.numel(), height), triton.cdiv(hidden, block))
    _copy_rows_kernel[grid](x_ID.contiguous(), source, out, source.numel(), D=hidden, SHARE=share, ROWS=height, BLOCK=block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["rows"])
def _copy_rows_kernel(x_ptr, source_ptr, out_ptr, rows, D: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = x[source[i] // SHARE]; rows whose source is negative stay as memory was."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    source = tl.load(source_ptr + row, mask=row < rows, other=-1)
    mask = (source >= 0)[:, None] & (d < D)
    values = tl.load(x_ptr + (source // SHARE).to(tl.int64)[:, None] * D + d, mask=mask, other=0.0)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * D + d, values, mask=mask)


def experts_grouped_mm(x_RD: Tensor, experts_RK: Tensor, gate_up_X2FD: Tensor, down_XDF: Tensor, limit: float | None = None) -> Tensor:
    """Torch's grouped product, whose order of additions nobody promises."""
    rows, slots = experts_RK.shape
    layout = lay_out(experts_RK, gate_up_X2FD.shape[0], 1)
    ends_X = layout.first_X1[1:]
    x_PD = x_RD.index_select(0, layout.pair_P // slots)
    gate_up_P2F = torch._grouped_mm(x_PD, gate_up_X2FD.transpose(1, 2), offs=ends_X)
    down_PD = torch._grouped_mm(swiglu(gate_up_P2F, limit=limit), down_XDF.transpose(1, 2), offs=ends_X)
    return down_PD.index_select(0, layout.place_RK.view(-1)).view(rows, slots, -1)


def experts_backward(
    grad_RKD: Tensor, x_RD: Tensor, experts_RK: Tensor, gate_up_X2FD: Tensor, down_XDF: Tensor, limit: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Recomputes the intermediate rows. Every sum has one owner and one order: rows of an expert by pair, slots of a row by slot."""
    rows, slots = experts_RK.shape
    count, hidden, intermediate = down_XDF.shape
    if rows * slots == 0:
        return torch.zeros_like(x_RD), torch.zeros_like(gate_up_X2FD), torch.zeros_like(down_XDF)
    grad_RKD = grad_RKD.contiguous()
    x_RD = x_RD.contiguous()
    chosen = experts_RK.contiguous()
    gate_up_X2FD = gate_up_X2FD.contiguous()
    down_XDF = down_XDF.contiguous()
    tile = backward_tile(rows * slots, count)
    layout = lay_out(chosen, count, tile.rows)
    positions = layout.pair_P.numel()

    gate_up_P2F = x_RD.new_empty(positions, 2 * intermediate)
    grouped_product(x_RD, gate_up_X2FD, gate_up_P2F, layout, chosen, ROW, POSITION, tile)
    grad_hidden_PF = x_RD.new_empty(positions, intermediate)
    grouped_product(grad_RKD, down_XDF, grad_hidden_PF, layout, chosen, PAIR, POSITION, tile, transposed=True)
    activated_PF = swiglu(gate_up_P2F, limit, layout.pair_P)
    grad_down_XDF = _weight_grad(grad_RKD, activated_PF, torch.empty_like(down_XDF), layout, PAIR, POSITION)
    grad_gate_up_P2F = swiglu_backward(grad_hidden_PF, gate_up_P2F, limit, layout.pair_P)
    grad_gate_up_X2FD = _weight_grad(grad_gate_up_P2F, x_RD, torch.empty_like(gate_up_X2FD), layout, POSITION, ROW)
    slots_PD = x_RD.new_empty(positions, hidden)
    grouped_product(grad_gate_up_P2F, gate_up_X2FD, slots_PD, layout, chosen, POSITION, POSITION, tile, transposed=True)
    return add_slots(slots_PD, layout), grad_gate_up_X2FD, grad_down_XDF


def backward_tile(pairs: int, experts: int) -> Tile:
    return Tile(64, 128, 64, 4, 3) if pairs <= 96 * experts else Tile(128, 128, 64, 8, 3)


def add_slots(slots_PD: Tensor, layout: Layout) -> Tensor:
    """[R, D]: the sum of each row's slots, in slot order."""
    rows, slots = layout.place_RK.shape
    hidden = slots_PD.shape[1]
    out_RD = slots_PD.new_empty(rows, hidden)
    _add_slots_kernel[(rows, triton.cdiv(hidden, 1024))](slots_PD, layout.place_RK, out_RD, D=hidden, SLOTS=slots, BLOCK=1024)
    return out_RD


def _weight_grad(left: Tensor, right: Tensor, out_XMN: Tensor, layout: Layout, left_by: tl.constexpr, right_by: tl.constexpr) -> Tensor:
    """out[e] = sum over expert e's rows, ascending, of left_row^T right_row; zero for an expert without rows."""
    count, m, n = out_XMN.shape
    assert layout.tile % BLOCK_R == 0
    grid = (triton.cdiv(m, 128) * triton.cdiv(n, 128), count)
    _weight_grad_kernel[grid](
        left,
        right,
        out_XMN,
        layout.pair_P,
        layout.first_X1,
        M=m,
        N=n,
        SLOTS=layout.slots,
        LEFT_BY=left_by.value,
        RIGHT_BY=right_by.value,
        BLOCK_M=128,
        BLOCK_N=128,
        ROWS=BLOCK_R,
        num_warps=8,
        num_stages=3,
    )
    return out_XMN


@triton.jit
def _weight_grad_kernel(
    left_ptr,
    right_ptr,
    out_ptr,
    pair_ptr,
    first_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    LEFT_BY: tl.constexpr,
    RIGHT_BY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out[e] = sum over expert e's rows, ascending, of left_row^T right_row, in one FP32 accumulator."""
    expert = tl.program_id(1)
    m = tl.program_id(0) // tl.cdiv(N, BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(tl.load(first_ptr + expert), tl.load(first_ptr + expert + 1), ROWS):
        position = at + tl.arange(0, ROWS)
        pair = tl.load(pair_ptr + position)
        live = (pair >= 0)[:, None]
        known = tl.maximum(pair, 0)
        left_row = source_row(position, known, LEFT_BY, SLOTS)[:, None]
        right_row = source_row(position, known, RIGHT_BY, SLOTS)[:, None]
        left = tl.load(left_ptr + left_row * M + m[None, :], mask=live & (m < M)[None, :], other=0.0)
        right = tl.load(right_ptr + right_row * N + n[None, :], mask=live & (n < N)[None, :], other=0.0)
        acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
    at = expert.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _add_slots_kernel(slots_ptr, place_ptr, out_ptr, D: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """A row's gradient: the sum of its slots' rows in slot order, in FP32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        place = tl.load(place_ptr + row * SLOTS + slot).to(tl.int64)
        acc += tl.load(slots_ptr + place * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)
