"""compressed_select on CUDA: a kernel scores rows against tiles of compressed keys; the choice is by integer keys, which all differ.

Nothing waits for the device: the host knows an upper bound of the lengths, which is the width of the scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.history import CompressedRows
from zoo.common.ops.compressed_select.reference import NAN_SCORE
from zoo.common.ops.tree_kernels import EXACT, pair_tree_first
from zoo.common.ops.trees import padded_width
from zoo.common.rows import Rows

KEY_TILE = 64
HELD = 1 << 26  # integers of 8 bytes held at a time: a row's scores, and the choice and its sort, four times top_k
NOWHERE = torch.iinfo(torch.int64).min


@triton.jit(do_not_specialize=["table_stride", "first_row", "columns", "top_k"])
def _compressed_scores(
    q_ptr,
    weights_ptr,
    keys_ptr,
    table_ptr,
    positions_ptr,
    sequence_ptr,
    starts_ptr,
    out_ptr,
    flag_ptr,
    q_row,
    q_head,
    weight_row,
    table_stride,
    first_row,
    columns,
    top_k,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Keys of one row and one tile of compressed rows, each as an integer that orders by (score, lower place). PAGE 0: packed keys.

    A NaN score among those that a choice is made from sets the flag; programs that set it together write the same value.
    """
    row = first_row + tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    count = (tl.load(positions_ptr + row) + 1) // TOKENS
    sequence = tl.load(sequence_ptr + row)
    seen = place < count
    if tl.program_id(1) * TILE < count:
        if PAGE > 0:
            page = tl.load(table_ptr + sequence * table_stride + place // PAGE, mask=seen, other=0).to(tl.int64)
            source = page * PAGE + place % PAGE
        else:
            source = tl.load(starts_ptr + sequence).to(tl.int64) + (place.to(tl.int64) + 1) * TOKENS - 1
        head = tl.arange(0, BLOCK_H)
        q_base = q_ptr + row * q_row + head[:, None] * q_head
        dot = tl.zeros((BLOCK_H, TILE), dtype=tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK_E):
            column = start + tl.arange(0, BLOCK_E)
            q = tl.load(q_base + column[None, :], mask=(head[:, None] < HEADS) & (column[None, :] < WIDTH), other=0.0)
            k = tl.load(keys_ptr + source[None, :] * WIDTH + column[:, None], mask=seen[None, :] & (column[:, None] < WIDTH), other=0.0)
            dot = tl.dot(q, k, dot, input_precision="ieee")
        weight = tl.load(weights_ptr + row * weight_row + head, mask=head < HEADS, other=0.0).to(tl.float32)
        # a comparison lets NaN through where a maximum may not
        term = tl.where(dot < 0.0, 0.0, dot) * weight[:, None]
        term = tl.where(head[:, None] < HEADS, term, 0.0)
        score = pair_tree_first(term, BLOCK_H, TILE)
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
        lowest: tl.constexpr = -0x7F800001  # -inf, made monotonic
        missing = (score != score) & seen & (count > top_k)
        tl.store(flag_ptr, 1, mask=tl.max(missing.to(tl.int32), axis=0) > 0)
        key = tl.where(score != score, lowest, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64)
        key = key * 0x80000000 + (0x7FFFFFFF - place)
    else:
        key = tl.zeros((TILE,), dtype=tl.int64)
    nowhere: tl.constexpr = -0x8000000000000000
    out = out_ptr + tl.program_id(0).to(tl.int64) * columns + place
    tl.store(out, tl.where(seen, key, nowhere), mask=place < columns)


def compressed_select(q_RHE: Tensor, weights_RH: Tensor, keys: CompressedRows, rows: Rows, top_k: int) -> Tensor:
    """chosen_RK. Scores [rows, compressed rows] are held for as many rows at a time as HELD allows."""
    count, heads, width = q_RHE.shape
    columns = rows.max_length // keys.tokens
    if columns <= top_k:  # nothing to choose
        place = torch.arange(top_k, dtype=torch.int32, device=q_RHE.device)
        return torch.where(place < ((rows.positions_R + 1) // keys.tokens)[:, None], place, -1)
    q = q_RHE if q_RHE.stride(2) == 1 else q_RHE.contiguous()
    weights = weights_RH if weights_RH.stride(1) == 1 else weights_RH.contiguous()
    table = rows.starts_N1 if keys.page_table_NB is None else keys.page_table_NB
    out = torch.empty(count, top_k, dtype=torch.int32, device=q.device)
    step = max(1, HELD // (columns + 4 * top_k))
    for first in range(0, count, step):
        block = min(step, count - first)
        key_RT = torch.empty(block, columns, dtype=torch.int64, device=q.device)
        _compressed_scores[(block, triton.cdiv(columns, KEY_TILE))](
            q,
            weights,
            keys.rows.contiguous(),
            table,
            rows.positions_R,
            rows.sequence_R,
            rows.starts_N1,
            key_RT,
            rows.flag(NAN_SCORE),
            q.stride(0),
            q.stride(1),
            weights.stride(0),
            table.stride(0),
            first,
            columns,
            top_k,
            HEADS=heads,
            WIDTH=width,
            TOKENS=keys.tokens,
            PAGE=0 if keys.page_table_NB is None else keys.rows.shape[1],
            TILE=KEY_TILE,
            BLOCK_H=max(16, padded_width(heads)),
            BLOCK_E=min(64, max(16, padded_width(width))),
            num_warps=4,
            **EXACT,
        )
        top = torch.topk(key_RT, top_k, dim=1, sorted=False)
        place = torch.where(top.values == NOWHERE, columns, top.indices).sort(1).values
        out[first : first + block] = torch.where(place == columns, -1, place)
    return out
