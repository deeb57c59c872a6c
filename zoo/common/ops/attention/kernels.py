"""attention on CUDA: FlashAttention 4 inside a key segment, segments merged left to right.

A row at position p reads segments 0 .. p // S of S keys each. Training and prefill pair query chunks with key segments by distance,
decode runs all segments of a sequence side by side; both give the parts to one merge. With one segment FA4's output is the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.rows import Rows

PARALLEL_BLOCKS = 132  # multiprocessors of an H200: the unaligned rival splits keys until they are busy


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
    blocks, page = rows.lengths_N.shape[0] * k.shape[-2], k.shape[1]
    splits = max(1, min(PARALLEL_BLOCKS // blocks, rows.max_length // (2 * page)))
    if splits == 1:
        return _one_pass(q_RHE, k, v, page_table_NB, rows, scale)
    pages = -(-(-(-rows.max_length // page)) // splits)
    return _decode_segments(q_RHE, k, v, page_table_NB, rows, scale, pages * page)


def _one_pass(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    if page_table is None:
        out = _fa4(
            q, k, v, cu_seqlens_q=rows.starts_N1, cu_seqlens_k=rows.starts_N1, max_seqlen_q=rows.max_rows, max_seqlen_k=rows.max_rows,
            softmax_scale=scale, causal=True, lse=lse,
        )  # fmt: skip
        return out, lse
    pages = -(-rows.max_length // k.shape[1])
    table = page_table[:, :pages]
    if rows.max_rows == 1:  # the batch form is a tenth faster than the packed one and gives its bytes
        out = _fa4(
            q[:, None], k, v, seqused_k=rows.lengths_N, page_table=table, max_seqlen_k=rows.max_length, softmax_scale=scale, causal=True
        )
        return out[:, 0], lse
    out = _fa4(
        q, k, v, cu_seqlens_q=rows.starts_N1, seqused_k=rows.lengths_N, page_table=table, max_seqlen_q=rows.max_rows,
        max_seqlen_k=rows.max_length, softmax_scale=scale, causal=True,
    )  # fmt: skip
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
        key = ("attention chunks", size)
        if key not in rows.launch:
            rows.launch[key] = cls._cut(rows, size)
        return rows.launch[key]

    @classmethod
    def _cut(cls, rows: Rows, size: int) -> _Chunks:
        starts, lengths = rows.starts_N1.tolist(), rows.lengths_N.tolist()
        offsets, sequence, segment, keys = [0], [], [], []
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


def _ints(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(like.device, non_blocking=True)


def _packed_segments(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """Whole documents: chunk c reads segment c - d at distance d, which lies d chunks before it in the same packed rows."""
    chunks = _Chunks.cut(rows, size)
    count, total, heads = len(chunks.sequence), q.shape[0], q.shape[1]
    depth = max(chunks.segment) + 1
    parts = q.new_empty(depth, *q.shape)
    part_lse = torch.empty(depth, heads * total, dtype=torch.float32, device=q.device)
    offsets = chunks.offsets
    for d in range(depth):
        first, last = offsets[d], offsets[count - d]
        same = [chunks.keys[c - d] if chunks.sequence[c - d] == chunks.sequence[c] else 0 for c in range(d, count)]
        _fa4(
            q[first:], k[:last], v[:last],
            cu_seqlens_q=_ints([o - first for o in offsets[d:]], q), cu_seqlens_k=_ints(offsets[: count - d + 1], q),
            seqused_k=_ints(same, q) if d else None, max_seqlen_q=size, max_seqlen_k=size, softmax_scale=scale, causal=d == 0,
            out=parts[d, first:], lse=part_lse[d, : heads * (total - first)].view(heads, total - first),
        )  # fmt: skip
    return _merge_by_distance(q, parts, part_lse, rows, [offsets[d] for d in range(depth)], size)


def _paged_segments(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, rows: Rows, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """New rows of sequences with a context: every chunk against every segment at or before its own, by distance."""
    chunks = _Chunks.cut(rows, size)
    total, heads, pages = q.shape[0], q.shape[1], size // k.shape[1]
    depth = max(chunks.segment) + 1
    parts = q.new_empty(depth, *q.shape)
    part_lse = torch.empty(depth, heads * total, dtype=torch.float32, device=q.device)
    table = _whole_segments(page_table, depth * pages).view(-1, depth, pages)
    sequence, segment = (torch.tensor(t, device=q.device) for t in (chunks.sequence, chunks.segment))
    offsets = _ints(chunks.offsets, q)
    for d in range(depth):
        keys = [(own if d == 0 else size) if s >= d else 0 for s, own in zip(chunks.segment, chunks.keys, strict=True)]
        _fa4(
            q, k, v, cu_seqlens_q=offsets, seqused_k=_ints(keys, q), page_table=table[sequence, (segment - d).clamp(min=0)].contiguous(),
            max_seqlen_q=size, max_seqlen_k=size, softmax_scale=scale, causal=d == 0,
            out=parts[d], lse=part_lse[d].view(heads, total),
        )  # fmt: skip
    return _merge_by_distance(q, parts, part_lse, rows, [0] * depth, size)


def _decode_segments(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, rows: Rows, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """One query a sequence: all its segments are virtual sequences of one launch, dead ones hold no key."""
    batch, heads, width = q.shape
    depth, pages = -(-rows.max_length // size), size // k.shape[1]
    table = _segment_table(page_table, rows, depth * pages).view(batch * depth, pages)
    used = _segment_lengths(rows, depth, size)
    parts = q.new_empty(batch * depth, 1, heads, width)
    part_lse = torch.empty(batch * depth, heads, 1, dtype=torch.float32, device=q.device)
    virtual = q.repeat_interleave(depth, 0)[:, None]  # a copy: FlashAttention 4 compiles a stride of 0 in
    _fa4(
        virtual, k, v, seqused_k=used, page_table=table, max_seqlen_k=size, softmax_scale=scale, causal=True,
        out=parts, lse=part_lse,
    )  # fmt: skip
    out = torch.empty_like(q)
    lse = torch.empty(heads, batch, dtype=torch.float32, device=q.device)
    unread = rows.positions_R  # the kernel wants a pointer
    _merge_kernel[(batch,)](
        parts, part_lse, rows.positions_R, unread, out, lse, batch, depth, size, heads, width, DISTANCE=False, num_warps=4
    )
    return out, lse


def _segment_lengths(rows: Rows, depth: int, size: int) -> Tensor:
    """Keys of each sequence in each segment, int32 [N * depth]."""
    key = ("segment lengths", depth, size)
    if key not in rows.launch:
        first = torch.arange(depth, dtype=torch.int32, device=rows.lengths_N.device) * size
        rows.launch[key] = (rows.lengths_N[:, None] - first).clamp(0, size).view(-1)
    return rows.launch[key]


def _segment_table(page_table: Tensor, rows: Rows, pages: int) -> Tensor:
    """The whole-segment table, made once for all layers (they share one table)."""
    key = ("segment table", page_table.data_ptr(), page_table.shape, pages)
    if key not in rows.launch:
        rows.launch[key] = _whole_segments(page_table, pages)
    return rows.launch[key]


def _whole_segments(page_table: Tensor, pages: int) -> Tensor:
    """The table cut or padded (with the reserved page) to whole segments."""
    missing = pages - page_table.shape[1]
    table = torch.nn.functional.pad(page_table, (0, missing)) if missing > 0 else page_table[:, :pages]
    return table.contiguous()


def _merge_by_distance(q: Tensor, parts: Tensor, part_lse: Tensor, rows: Rows, firsts: list[int], size: int) -> tuple[Tensor, Tensor]:
    total, heads, width = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    _merge_kernel[(total,)](
        parts, part_lse, rows.positions_R, torch.tensor(firsts, device=q.device), out, lse, total, 0, size, heads, width,
        DISTANCE=True, num_warps=4,
    )  # fmt: skip
    return out, lse


@triton.jit
def _merge_kernel(
    parts_ptr, part_lse_ptr, positions_ptr, firsts_ptr, out_ptr, lse_ptr, total, depth, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Segments left to right in FP32, one rounding. DISTANCE: the part of segment s of a row lies at index own - s."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    own = (tl.load(positions_ptr + row) // size).to(tl.int64)
    peak = tl.full((HEADS,), -float("inf"), tl.float32)
    for s in range(own + 1):
        peak = tl.maximum(peak, _part_lse(part_lse_ptr, firsts_ptr, row, head, own, s, total, depth, HEADS, DISTANCE))
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    for s in range(own + 1):
        weight = tl.exp(_part_lse(part_lse_ptr, firsts_ptr, row, head, own, s, total, depth, HEADS, DISTANCE) - peak)
        index = (own - s) * total + row if DISTANCE else row * depth + s
        part = tl.load(parts_ptr + (index * HEADS + head[:, None]) * WIDTH + column[None, :]).to(tl.float32)
        acc = acc + weight[:, None] * part
        mass = mass + weight
    tl.store(out_ptr + (row * HEADS + head[:, None]) * WIDTH + column[None, :], (acc / mass[:, None]).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + head.to(tl.int64) * total + row, peak + tl.log(mass))


@triton.jit
def _part_lse(
    part_lse_ptr, firsts_ptr, row, head, own, s, total, depth, HEADS: tl.constexpr, DISTANCE: tl.constexpr
):  # fmt: skip
    if DISTANCE:
        first = tl.load(firsts_ptr + (own - s))
        offset = (own - s) * HEADS * total + head * (total - first) + (row - first)
    else:
        offset = (row * depth + s) * HEADS + head
    return tl.load(part_lse_ptr + offset)


def attention_backward(
    grad: Tensor, q_RHE: Tensor, k_RGE: Tensor, v_RGE: Tensor, out_RHE: Tensor, lse_HR: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FA4's deterministic backward from the merged output and log-sum-exp: one pass, whatever the forward's segments."""
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        q_RHE, k_RGE, v_RGE, out_RHE, grad.contiguous(), lse_HR, softmax_scale=scale, causal=True, cu_seqlens_q=rows.starts_N1,
        cu_seqlens_k=rows.starts_N1, max_seqlen_q=rows.max_rows, max_seqlen_k=rows.max_rows, deterministic=True,
    )[:3]  # fmt: skip
