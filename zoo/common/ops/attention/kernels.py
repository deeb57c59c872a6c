"""attention on CUDA: FlashAttention 4 inside a key segment, segments merged left to right.

A row at position p reads segments 0 .. p // S of S keys each. Training and prefill pair query chunks with key segments by distance,
decode runs all segments of a sequence side by side; both give the parts to one merge. With one segment FA4's output is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.rows import Rows

T = TypeVar("T")

PARALLEL_BLOCKS = 132  # multiprocessors of an H200: the unaligned rival splits keys until they are busy
MERGE_HEADS = 8  # of one program at most; it moves no byte


_primed: set[tuple[Any, ...]] = set()  # kinds of launches of one row that were compiled from two


def _fa4(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """FlashAttention 4's forward, one split; returns the output.

    It compiles for the strides of the first call, and a leading dim of 1 has none that a longer batch would fit. So the first call of
    a kind with one row is preceded by one with that row twice, whose result is dropped.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    if q.shape[0] == 1:
        given = tuple(sorted((name, value if isinstance(value, bool) else value is None) for name, value in options.items()))
        kind = (q.dtype, q.dim(), q.shape[-2:], k.shape[-3 if k.dim() == 4 else -2 :], given)
        if kind not in _primed:
            _flash_attn_fwd(*_twice(q, k, v), num_splits=1, **{name: _doubled(name, value, q) for name, value in options.items()})
            _primed.add(kind)
    return _flash_attn_fwd(q, k, v, num_splits=1, **options)[0]


def _twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The one row of q twice; packed keys as well, pages as they are."""
    repeat = (lambda t: t) if k.dim() == 4 else (lambda t: torch.cat([t, t]))
    return torch.cat([q, q]), repeat(k), repeat(v)


def _doubled(name: str, value: Any, q: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name.startswith("cu_seqlens"):  # one sequence of q's (and the keys') rows
        return value * 2
    if name == "lse":
        return value.new_empty(2, *value.shape[1:]) if q.dim() == 4 else value.new_empty(value.shape[0], 2)
    if name == "out" or q.dim() == 4:  # the batch form: a second sequence like the first
        return torch.cat([value, value])
    return value


def attention_fa4(
    q_RHE: Tensor, k: Tensor, v: Tensor, page_table_NB: Tensor | None, rows: Rows, scale: float, segment: int | None
) -> tuple[Tensor, Tensor]:
    """(out_RHE, log-sum-exp [H, R] FP32; written for packed keys, whose backward reads it)."""
    if q_RHE.shape[0] == 0:
        return torch.empty_like(q_RHE), q_RHE.new_empty(q_RHE.shape[1], 0, dtype=torch.float32)
    if segment is None or rows.max_length <= segment:
        return _one_pass(q_RHE, k, v, page_table_NB, rows, scale)
    if page_table_NB is None:
        return _packed_segments(q_RHE, k, v, rows, scale, segment)
    if segment % k.shape[1]:
        raise ValueError(f"attention: pages of {k.shape[1]} keys do not divide the program's key segments of {segment}")
    if rows.max_rows == 1:
        return _decode_segments(q_RHE, k, v, page_table_NB, rows, scale, segment)
    return _paged_segments(q_RHE, k, v, page_table_NB, rows, scale, segment)


def attention_split_kv(
    q_RHE: Tensor, k: Tensor, v: Tensor, page_table_NB: Tensor | None, rows: Rows, scale: float, segment: int | None
) -> tuple[Tensor, Tensor]:
    """The unaligned rival: keys split by what fills the GPU at this batch size, so bytes depend on the batch."""
    if page_table_NB is None or rows.max_rows > 1:
        return _one_pass(q_RHE, k, v, page_table_NB, rows, scale)
    blocks = rows.lengths_N.shape[0] * k.shape[-2]
    page = k.shape[1]
    splits = max(1, min(PARALLEL_BLOCKS // blocks, rows.max_length // (2 * page)))
    if splits == 1:
        return _one_pass(q_RHE, k, v, page_table_NB, rows, scale)
    pages = -(-(-(-rows.max_length // page)) // splits)
    return _decode_segments(q_RHE, k, v, page_table_NB, rows, scale, pages * page)


def _one_pass(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    if page_table is None:
        out = _fa4(
            q,
            k,
            v,
            cu_seqlens_q=rows.starts_N1,
            cu_seqlens_k=rows.starts_N1,
            max_seqlen_q=rows.max_rows,
            max_seqlen_k=rows.max_rows,
            softmax_scale=scale,
            causal=True,
            lse=lse,
        )
        return out, lse
    pages = -(-rows.max_length // k.shape[1])
    table = page_table[:, :pages]
    if rows.max_rows == 1:  # the batch form is a tenth faster than the packed one and gives its bytes
        out = _fa4(
            q[:, None], k, v, seqused_k=rows.lengths_N, page_table=table, max_seqlen_k=rows.max_length, softmax_scale=scale, causal=True
        )
        return out[:, 0], lse
    out = _fa4(
        q,
        k,
        v,
        cu_seqlens_q=rows.starts_N1,
        seqused_k=rows.lengths_N,
        page_table=table,
        max_seqlen_q=rows.max_rows,
        max_seqlen_k=rows.max_length,
        softmax_scale=scale,
        causal=True,
    )
    return out, lse


@dataclass(frozen=True)
class _Chunks:
    """Queries cut on the absolute grid of S positions: chunk c holds rows offsets[c] .. offsets[c + 1] of one sequence's segment."""

    offsets: list[int]
    sequence: list[int]
    segment: list[int]
    keys: list[int]  # keys of its own segment that exist after the push

    @classmethod
    def cut(cls, rows: Rows, size: int) -> _Chunks:
        starts = rows.starts_N1.tolist()
        lengths = rows.lengths_N.tolist()
        offsets = [0]
        sequence = []
        segment = []
        keys = []
        for n, length in enumerate(lengths):
            position = length - (starts[n + 1] - starts[n])
            while position < length:
                end = min((position // size + 1) * size, length)
                offsets.append(offsets[-1] + end - position)
                sequence.append(n)
                segment.append(position // size)
                keys.append(end - position // size * size)
                position = end
        return cls(offsets, sequence, segment, keys)


def _once(rows: Rows, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """What `make` derives from the rows and from what `key` names, made for the first of all layers."""
    if key not in rows.launch:
        rows.launch[key] = make()
    return rows.launch[key]


def _once_per_table(rows: Rows, page_table: Tensor, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """The same of a page table. The entry keeps the table, so that no other one comes to lie at its address."""
    where = (page_table.data_ptr(), page_table.shape, page_table.stride())
    return _once(rows, (*key, *where), lambda: (page_table, make()))[1]


def _chunks(rows: Rows, size: int) -> _Chunks:
    return _once(rows, ("attention chunks", size), lambda: _Chunks.cut(rows, size))


def _on_device(lists: list[list[int]], device: torch.device) -> list[Tensor]:
    """The lists as int32 tensors, by one copy that the host does not wait for (long lists apart, as CUDA stages pageable memory)."""
    flat = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int32).to(device, non_blocking=True)
    return list(flat.split([len(numbers) for numbers in lists]))


@dataclass(frozen=True)
class _Distance:
    """One launch: queries from row `first` on against keys before row `last` (None: all), `options` for FlashAttention 4."""

    first: int
    last: int | None
    options: dict[str, Tensor]


@dataclass(frozen=True)
class _Plan:
    """The launches of distances 0, 1, ... of one Rows, and their first rows on the device."""

    distances: list[_Distance]
    firsts: Tensor


def _packed_segments(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """Whole documents: chunk c reads segment c - d at distance d, which lies d chunks before it in the same packed rows."""
    plan = _once(rows, ("attention, packed", size), lambda: _packed_plan(_chunks(rows, size), rows.starts_N1.device))
    return _by_distance(q, k, v, rows, plan, scale, size)


def _packed_plan(chunks: _Chunks, device: torch.device) -> _Plan:
    count = len(chunks.sequence)
    offsets = chunks.offsets
    depth = max(chunks.segment) + 1
    lists = [offsets[:depth]]
    for d in range(depth):
        used = [chunks.keys[c - d] if chunks.sequence[c - d] == chunks.sequence[c] else 0 for c in range(d, count)]
        lists += [[offset - offsets[d] for offset in offsets[d:]], offsets[: count - d + 1], used]
    firsts, *tensors = _on_device(lists, device)
    distances = []
    for d in range(depth):
        queries, keys, used = tensors[3 * d : 3 * d + 3]
        options = {"cu_seqlens_q": queries, "cu_seqlens_k": keys} | ({"seqused_k": used} if d else {})
        distances.append(_Distance(offsets[d], offsets[count - d], options))
    return _Plan(distances, firsts)


def _paged_segments(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, rows: Rows, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """New rows of sequences with a context: every chunk against every segment at or before its own, by distance."""
    pages = size // k.shape[1]
    key = ("attention, paged", size, pages)
    plan = _once_per_table(rows, page_table, key, lambda: _paged_plan(_chunks(rows, size), page_table, size, pages))
    return _by_distance(q, k, v, rows, plan, scale, size)


def _paged_plan(chunks: _Chunks, page_table: Tensor, size: int, pages: int) -> _Plan:
    count = len(chunks.sequence)
    depth = max(chunks.segment) + 1
    lists = [[0] * depth, chunks.offsets, chunks.sequence]
    for d in range(depth):
        lists.append([max(s - d, 0) for s in chunks.segment])
        lists.append([(own if d == 0 else size) if s >= d else 0 for s, own in zip(chunks.segment, chunks.keys, strict=True)])
    firsts, queries, sequence, *tensors = _on_device(lists, page_table.device)
    table = _whole_segments(page_table, depth * pages).view(-1, depth, pages)
    tables = table[sequence, torch.cat(tensors[0::2]).view(depth, count)]
    options = [{"cu_seqlens_q": queries, "seqused_k": tensors[2 * d + 1], "page_table": tables[d]} for d in range(depth)]
    return _Plan([_Distance(0, None, each) for each in options], firsts)


def _by_distance(q: Tensor, k: Tensor, v: Tensor, rows: Rows, plan: _Plan, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """Distance 0 writes into the result, into which the merge adds the others."""
    total = q.shape[0]
    heads = q.shape[1]
    depth = len(plan.distances)
    out = q.new_empty(q.shape)
    parts = q.new_empty(depth - 1, *q.shape)
    lse = torch.empty(heads * total, dtype=torch.float32, device=q.device)
    part_lse = lse.new_empty(depth - 1, heads * total)
    for d, distance in enumerate(plan.distances):
        first = distance.first
        last = distance.last
        rest = total - distance.first
        out_d, lse_d = (parts[d - 1, first:], part_lse[d - 1]) if d else (out, lse)
        _fa4(
            q[first:],
            k[:last],
            v[:last],
            **distance.options,
            max_seqlen_q=size,
            max_seqlen_k=size,
            softmax_scale=scale,
            causal=d == 0,
            out=out_d,
            lse=lse_d[: heads * rest].view(heads, rest),
        )
    if depth > 1:
        _merge(out, lse, parts, part_lse, rows.positions_R, plan.firsts, 0, size)
    return out, lse.view(heads, total)


def _decode_segments(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, rows: Rows, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """One query a sequence: all its segments are virtual sequences of one launch, dead ones hold no key."""
    batch, heads, width = q.shape
    depth = -(-rows.max_length // size)
    pages = size // k.shape[1]
    table = _once_per_table(rows, page_table, ("segment table", depth, pages), lambda: _whole_segments(page_table, depth * pages))
    used = _once(rows, ("segment lengths", depth, size), lambda: _segment_lengths(rows, depth, size))
    parts = q.new_empty(batch * depth, 1, heads, width)
    part_lse = torch.empty(batch * depth, heads, 1, dtype=torch.float32, device=q.device)
    virtual = q.repeat_interleave(depth, 0)[:, None]  # a copy: FlashAttention 4 compiles a stride of 0 in
    _fa4(
        virtual,
        k,
        v,
        seqused_k=used,
        page_table=table.view(batch * depth, pages),
        max_seqlen_k=size,
        softmax_scale=scale,
        causal=True,
        out=parts,
        lse=part_lse,
    )
    out = q.new_empty(q.shape)
    lse = torch.empty(heads, batch, dtype=torch.float32, device=q.device)
    _merge(out, lse, parts, part_lse, rows.positions_R, None, depth, size)
    return out, lse


def _segment_lengths(rows: Rows, depth: int, size: int) -> Tensor:
    """Keys of each sequence in each segment, int32 [N * depth]."""
    first = torch.arange(depth, dtype=torch.int32, device=rows.lengths_N.device) * size
    return (rows.lengths_N[:, None] - first).clamp(0, size).view(-1)


def _whole_segments(page_table: Tensor, pages: int) -> Tensor:
    """The table cut or padded (with the reserved page) to whole segments."""
    missing = pages - page_table.shape[1]
    table = torch.nn.functional.pad(page_table, (0, missing)) if missing > 0 else page_table[:, :pages]
    return table.contiguous()


def _merge(
    out: Tensor, lse: Tensor, parts: Tensor, part_lse: Tensor, positions_R: Tensor, firsts: Tensor | None, depth: int, size: int
) -> None:
    """Fills `out` [R, H, E] and `lse` [H, R]. With `firsts` (parts by distance) they hold the rows' own segments already."""
    total, heads, width = out.shape
    block = min(heads & -heads, MERGE_HEADS)  # a power of two that divides the heads
    _merge_kernel[(total, heads // block)](
        out,
        lse,
        parts,
        part_lse,
        positions_R,
        positions_R if firsts is None else firsts,
        total,
        depth,
        size,
        heads,
        width,
        BLOCK=block,
        DISTANCE=firsts is not None,
        num_warps=4,
    )


@triton.jit
def _merge_kernel(
    out_ptr,
    lse_ptr,
    parts_ptr,
    part_lse_ptr,
    positions_ptr,
    firsts_ptr,
    total,
    depth,
    size,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DISTANCE: tl.constexpr,
):
    """Segments left to right in FP32, one rounding; a row of the first segment keeps the bytes of its only part.

    DISTANCE: a row's own segment lies in the result, the one at distance d in part d - 1. Else parts lie segment by segment.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    own = (tl.load(positions_ptr + row) // size).to(tl.int64)
    place = head[:, None] * WIDTH + column[None, :]
    out = out_ptr + row * HEADS * WIDTH + place
    lse = lse_ptr + head.to(tl.int64) * total + row
    if DISTANCE:
        last = out
        last_lse = lse
    else:
        last = parts_ptr + (row * depth + own) * HEADS * WIDTH + place
        last_lse = part_lse_ptr + (row * depth + own) * HEADS + head
    if own > 0:
        near = tl.load(last)
        near_lse = tl.load(last_lse)
        peak = near_lse
        for s in range(own):
            peak = tl.maximum(peak, _part_lse(part_lse_ptr, firsts_ptr, row, head, own, s, total, depth, HEADS, DISTANCE))
        acc = tl.zeros((BLOCK, WIDTH), tl.float32)
        mass = tl.zeros((BLOCK,), tl.float32)
        for s in range(own):
            index = (own - s - 1) * total + row if DISTANCE else row * depth + s
            part = tl.load(parts_ptr + index * HEADS * WIDTH + place)  # before its weight, which waits for other threads
            weight = tl.exp(_part_lse(part_lse_ptr, firsts_ptr, row, head, own, s, total, depth, HEADS, DISTANCE) - peak)
            acc = tl.fma(weight[:, None], part.to(tl.float32), acc)
            mass = mass + weight
        weight = tl.exp(near_lse - peak)
        acc = tl.fma(weight[:, None], near.to(tl.float32), acc)
        mass = mass + weight
        tl.debug_barrier()  # no thread may still have to read what another one overwrites
        tl.store(out, (acc / mass[:, None]).to(out_ptr.dtype.element_ty))
        tl.store(lse, peak + tl.log(mass))
    elif not DISTANCE:
        tl.store(out, tl.load(last))
        tl.store(lse, tl.load(last_lse))


@triton.jit
def _part_lse(part_lse_ptr, firsts_ptr, row, head, own, s, total, depth, HEADS: tl.constexpr, DISTANCE: tl.constexpr):
    """Log-sum-exp of segment s of a row whose own segment is `own`, from where that part lies."""
    if DISTANCE:
        first = tl.load(firsts_ptr + (own - s)).to(tl.int64)
        offset = (own - s - 1) * HEADS * total + head * (total - first) + (row - first)
    else:
        offset = (row * depth + s) * HEADS + head
    return tl.load(part_lse_ptr + offset)


def attention_backward(
    grad: Tensor, q_RHE: Tensor, k_RGE: Tensor, v_RGE: Tensor, out_RHE: Tensor, lse_HR: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FA4's deterministic backward from the merged output and log-sum-exp: one pass, whatever the forward's segments."""
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        q_RHE,
        k_RGE,
        v_RGE,
        out_RHE,
        grad.contiguous(),
        lse_HR,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=rows.starts_N1,
        cu_seqlens_k=rows.starts_N1,
        max_seqlen_q=rows.max_rows,
        max_seqlen_k=rows.max_rows,
        deterministic=True,
    )[:3]
