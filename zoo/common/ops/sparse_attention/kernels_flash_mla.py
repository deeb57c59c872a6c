"""sparse_attention by FlashMLA's sparse kernel, for latent rows of 576 columns with values of 512.

The kernel reads one long row of token rows by their places in it, so packed rows and pages are read where they lie: one launch of ours
turns positions into places, once for all layers that share a list. Rows "sparse" of benchmarks.library_classes and
`tests/ops/test_flash_mla_cuda.py` are what the class rests on: a row's bytes depend on no other row, head, place or width of a list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.sparse_attention.kernels_backward import sparse_attention_backward as backward_of_lists
from zoo.common.rows import Rows

LIST_TILE = 128  # a list's width is a multiple of it
HEAD_COUNTS = (64, 128)  # that the kernel takes; others are padded with heads of zeros
WIDTHS = (512, 576)
VALUES = 512
BASE_2 = 2.0
LAUNCH = "places of sparse_attention's lists"


@triton.jit(do_not_specialize=["positions_stride", "table_stride", "listed"])
def _places(
    positions_ptr,
    table_ptr,
    sequence_ptr,
    starts_ptr,
    places_ptr,
    counts_ptr,
    positions_stride,
    table_stride,
    listed,
    columns,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where a row's listed tokens lie among all token rows, -1 behind the last, and how many there are, at least 1."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequence_ptr + row)
    begin = tl.load(starts_ptr + sequence)
    count = 0
    for first in range(0, columns, TILE):
        lane = first + tl.arange(0, TILE)
        position = tl.load(positions_ptr + row * positions_stride + lane, mask=lane < listed, other=-1)
        live = position >= 0
        if PAGE > 0:
            page = tl.load(table_ptr + sequence * table_stride + position // PAGE, mask=live, other=0)
            place = page * PAGE + position % PAGE
        else:
            place = begin + position
        tl.store(places_ptr + row * columns + lane, tl.where(live, place, -1))
        count += tl.sum(live.to(tl.int32), axis=0)
    tl.store(counts_ptr + row, tl.maximum(count, 1))


class Lists(NamedTuple):
    """places_R1K int32, -1 behind a list's last; counts_R int32. `of` are the tensors that they were made of, kept so that no others
    come to lie at their addresses."""

    places_R1K: Tensor
    counts_R: Tensor
    of: tuple[Tensor, ...]


def lists_of(positions_RK: Tensor, rows: Rows, page_table_NB: Tensor | None, page: int) -> Lists:
    """The last lists asked for are kept: those of the layers that share a choice are one."""
    made_of = (positions_RK,) if page_table_NB is None else (positions_RK, page_table_NB)
    key = (page, *((t.data_ptr(), t.shape, t.stride()) for t in made_of))
    kept = rows.launch.get(LAUNCH)
    if kept is None or kept[0] != key:
        kept = rows.launch[LAUNCH] = (key, _made(positions_RK, rows, page_table_NB, page, made_of))
    lists: Lists = kept[1]
    return lists


def _made(positions_RK: Tensor, rows: Rows, page_table_NB: Tensor | None, page: int, made_of: tuple[Tensor, ...]) -> Lists:
    count, listed = positions_RK.shape
    # no row lists more than it sees
    columns = triton.cdiv(min(listed, rows.max_length), LIST_TILE) * LIST_TILE
    positions = positions_RK if positions_RK.stride(1) == 1 else positions_RK.contiguous()
    places = torch.empty(count, 1, columns, dtype=torch.int32, device=positions.device)
    counts = torch.empty(count, dtype=torch.int32, device=positions.device)
    table = rows.starts_N1 if page_table_NB is None else page_table_NB
    _places[(count,)](
        positions,
        table,
        rows.sequence_R,
        rows.starts_N1,
        places,
        counts,
        positions.stride(0),
        table.stride(0),
        listed,
        columns,
        PAGE=page,
        TILE=LIST_TILE,
        num_warps=4,
    )
    return Lists(places, counts, made_of)


def sparse_attention(
    q_RHC: Tensor, latent: Tensor, page_table_NB: Tensor | None, positions_RK: Tensor, rows: Rows, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_RHV, log-sum-exp_RH in FP32, to the base 2; +inf for a row that lists nothing)."""
    from sgl_kernel.flash_mla import flash_mla_sparse_fwd

    count, heads, width = q_RHC.shape
    if not count:
        return q_RHC.new_empty(0, heads, values), q_RHC.new_empty(0, heads, dtype=torch.float32)
    lists = lists_of(positions_RK, rows, page_table_NB, 0 if page_table_NB is None else latent.shape[1])
    tokens = latent.reshape(-1, 1, width)
    found = []
    for part in q_RHC.split(HEAD_COUNTS[-1], 1):
        mine = part.shape[1]
        taken = next(c for c in HEAD_COUNTS if mine <= c)
        q = part if mine == taken else torch.nn.functional.pad(part, (0, 0, 0, taken - mine))
        out, _, lse = flash_mla_sparse_fwd(q.contiguous(), tokens, lists.places_R1K, scale, values, None, lists.counts_R)
        found.append((out[:, :mine], lse[:, :mine]))
    if len(found) == 1:
        return found[0][0].contiguous(), found[0][1].contiguous()
    return torch.cat([out for out, _ in found], 1), torch.cat([lse for _, lse in found], 1)


def sparse_attention_backward(
    grad_RHV: Tensor, q_RHC: Tensor, latent_RC: Tensor, positions_RK: Tensor, out_RHV: Tensor, lse_RH: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    """(d queries, d latent rows)."""
    return backward_of_lists(grad_RHV, q_RHC, latent_RC, positions_RK, out_RHV, lse_RH, rows, scale, base=BASE_2)
