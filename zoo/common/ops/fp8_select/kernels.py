"""fp8_select on CUDA: DeepGEMM's scores, or ours where it has no kernel, and one program a row that chooses among them.

Nothing waits for the device: the host knows an upper bound of the lengths, which is the width of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.history import CodedRows
from zoo.common.ops.fp8_quantise.kernels import codes_and_scales
from zoo.common.ops.fp8_quantise.reference import LARGEST
from zoo.common.ops.fp8_select.reference import LANES, NAN_SCORE, QUERY_RULE
from zoo.common.ops.tree_kernels import EXACT, pair_tree
from zoo.common.ops.trees import padded_width
from zoo.common.rows import Rows

HELD = 1 << 26  # scores held at a time
KEY_TILE = 64
ROW_TILE = 16  # rows whose scores one program makes, so that it reads its keys once
DEEPGEMM_PAGE = 64
CHOICE_TILE = 16384  # places that a program writes at a time: more don't fit its registers
FEW_ROWS = 256
KEPT = 32768  # a row of at most so many scores is read once and kept in registers
UNGUARDED = 4  # interpolated probes between two halvings

Scores = Iterator[tuple[int, Tensor]]  # (first row, FP32 [rows, columns]) of each block of rows; columns behind a row's own are anything


@triton.jit(do_not_specialize=["q_row", "gate_row"])
def _fold_queries(
    q_ptr,
    gates_ptr,
    codes_ptr,
    weights_ptr,
    q_row,
    q_head,
    gate_row,
    floor,
    head_factor,
    width_factor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A row's heads as codes, and weight = ((gate * H^-0.5) * scale) * E^-0.5 of each."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_E)
    inside = (head[:, None] < HEADS) & (column[None, :] < WIDTH)
    x = tl.load(q_ptr + row * q_row + head[:, None] * q_head + column[None, :], mask=inside, other=0.0).to(tl.float32)
    code, scale = codes_and_scales(x, floor, POWER_OF_TWO, LARGEST)
    tl.store(codes_ptr + (row * HEADS + head[:, None]) * WIDTH + column[None, :], code.to(tl.float8e4nv), mask=inside)
    gate = tl.load(gates_ptr + row * gate_row + head, mask=head < HEADS, other=0.0).to(tl.float32)
    tl.store(weights_ptr + row * HEADS + head, gate * head_factor * scale * width_factor, mask=head < HEADS)


def fold_queries(q_RHE: Tensor, weights_RH: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [R, H, E], FP32 weights [R, H] with the queries' scales), both contiguous."""
    rows, heads, width = q_RHE.shape
    q = q_RHE if q_RHE.stride(2) == 1 else q_RHE.contiguous()
    gates = weights_RH if weights_RH.stride(1) == 1 else weights_RH.contiguous()
    codes_RHE = torch.empty(rows, heads, width, dtype=torch.float8_e4m3fn, device=q.device)
    folded_RH = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    _fold_queries[(rows,)](
        q,
        gates,
        codes_RHE,
        folded_RH,
        q.stride(0),
        q.stride(1),
        gates.stride(0),
        QUERY_RULE.floor,
        heads**-0.5,
        width**-0.5,
        HEADS=heads,
        WIDTH=width,
        LARGEST=LARGEST,
        POWER_OF_TWO=QUERY_RULE.power_of_two,
        BLOCK_H=padded_width(heads),
        BLOCK_E=padded_width(width),
        num_warps=4,
        **EXACT,
    )
    return codes_RHE, folded_RH


@triton.jit(do_not_specialize=["first_row", "last_row", "out_row", "columns", "table_row"])
def _coded_scores(
    q_ptr,
    weights_ptr,
    codes_ptr,
    scales_ptr,
    table_ptr,
    positions_ptr,
    sequence_ptr,
    starts_ptr,
    out_ptr,
    table_row,
    codes_page,
    scales_page,
    first_row,
    last_row,
    out_row,
    columns,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STEP_E: tl.constexpr,
    LANES: tl.constexpr,
):
    """score = sum over heads of max(q . k, 0) * weight, times the key's scale, of ROWS rows and a tile of positions. PAGE 0: packed keys.

    Partial j adds the heads 8 g + j; see the contract. All rows of a program read the same keys where they are of one sequence.
    """
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = tl.arange(0, BLOCK_H)
    lane = tl.arange(0, LANES)
    group = tl.arange(0, BLOCK_H // LANES)
    first = first_row + tl.program_id(0).to(tl.int64) * ROWS
    for r in range(ROWS):
        row = first + r
        position = tl.load(positions_ptr + row, mask=row < last_row, other=-1)
        if tl.program_id(1) * TILE <= position:
            sequence = tl.load(sequence_ptr + row)
            seen = place <= position
            if PAGE > 0:
                page = tl.load(table_ptr + sequence * table_row + place // PAGE, mask=seen, other=0).to(tl.int64)
                code_place = page * codes_page + (place % PAGE) * WIDTH
                scale_place = page * scales_page + place % PAGE
            else:
                scale_place = tl.load(starts_ptr + sequence).to(tl.int64) + place
                code_place = scale_place * WIDTH
            q_row = q_ptr + row * (HEADS * WIDTH)
            dot = tl.zeros((TILE, BLOCK_H), dtype=tl.float32)
            for start in tl.static_range(0, BLOCK_E, STEP_E):
                column = start + tl.arange(0, STEP_E)
                k = tl.load(codes_ptr + code_place[:, None] + column[None, :], mask=seen[:, None] & (column[None, :] < WIDTH), other=0.0)
                q = tl.load(
                    q_row + head[None, :] * WIDTH + column[:, None], mask=(head[None, :] < HEADS) & (column[:, None] < WIDTH), other=0.0
                )
                dot = tl.dot(k, q, dot, input_precision="ieee")
            dot = tl.where(dot > 0.0, dot, 0.0)
            grouped = tl.reshape(dot, (TILE, BLOCK_H // LANES, LANES))
            partial = tl.zeros((TILE, LANES), dtype=tl.float32)
            for g in tl.static_range((HEADS + LANES - 1) // LANES):
                # one term is not zero: the sum picks it
                mine = tl.sum(tl.where(group[None, :, None] == g, grouped, 0.0), axis=1)
                of_head = g * LANES + lane
                weight = tl.load(weights_ptr + row * HEADS + of_head, mask=of_head < HEADS, other=0.0)
                partial = tl.fma(mine, tl.broadcast_to(weight[None, :], (TILE, LANES)), partial)
            pairs = tl.sum(tl.reshape(partial, (TILE, LANES // 2, 2)), axis=2)
            scale = tl.load(scales_ptr + scale_place, mask=seen, other=0.0)
            score = pair_tree(pairs * scale[:, None], LANES // 2)
            tl.store(out_ptr + (row - first_row) * out_row + place, score, mask=place < columns)


@triton.jit
def _ordered(score):
    """FP32 as an integer that orders like it, -0 as +0, NaN as -inf."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    lowest: tl.constexpr = -0x7F800001
    return tl.where(score != score, lowest, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _value(key):
    """The FP32 number of such an integer."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _scores_of(row_ptr, first, seen, TILE: tl.constexpr):
    """A row's ordered integers at places first .. first + TILE, below all scores from `seen` on; and the same with NaN above all."""
    nowhere: tl.constexpr = -0x80000000
    highest: tl.constexpr = 0x7FFFFFFF
    place = first + tl.arange(0, TILE)
    score = tl.load(row_ptr + place, mask=place < seen, other=0.0)
    key = tl.where(place < seen, _ordered(score), nowhere)
    return key, tl.where((score != score) & (place < seen), highest, key)


@triton.jit
def _write_taken(out_ptr, key, first, low, high, above, between, wanted, TILE: tl.constexpr):
    """Writes the places of a tile that are taken, behind those of earlier tiles; how many scores are above and between, in 16 bits each."""
    is_between = (key >= low) & (key < high)
    counted = tl.where(key >= high, 0x10000, 0) + is_between.to(tl.int32)
    before = tl.cumsum(counted, 0) - counted
    between_before = between + (before & 0xFFFF)
    slot = above + (before >> 16) + tl.minimum(between_before, wanted)
    taken = (key >= high) | (is_between & (between_before < wanted))
    tl.store(out_ptr + slot, first + tl.arange(0, TILE), mask=taken)
    return counted


@triton.jit(do_not_specialize=["first_row", "top_k", "least", "most"])
def _choose(
    scores_ptr,
    positions_ptr,
    out_ptr,
    flag_ptr,
    scores_row,
    first_row,
    top_k,
    least,
    most,
    TILE: tl.constexpr,
    WRITTEN: tl.constexpr,
    KEPT: tl.constexpr,
    UNGUARDED: tl.constexpr,
):
    """The places of a row's top_k largest scores, ascending, for rows that see more than `least` and at most `most` tokens.

    It looks for a bound that top_k scores reach: by interpolating the counts at the two bounds known so far, in logarithms, and by
    halving where that did not bring them together. Whatever is probed, the choice is one: all scores from `high` on, and of those
    from `low` on the first ones. KEPT: the row's scores stay in registers between probes.
    """
    row = first_row + tl.program_id(0)
    seen = (tl.load(positions_ptr + row) + 1).to(tl.int32)
    row_ptr = scores_ptr + tl.program_id(0).to(tl.int64) * scores_row
    out_row = out_ptr + row.to(tl.int64) * top_k
    if (seen > least) & (seen <= most):
        if seen <= top_k:
            for first in range(0, top_k, WRITTEN):
                slot = first + tl.arange(0, WRITTEN)
                tl.store(out_row + slot, tl.where(slot < seen, slot, -1), mask=slot < top_k)
        else:
            highest: tl.constexpr = 0x7FFFFFFF
            above_infinity: tl.constexpr = 0x7F800001
            key, marked = _scores_of(row_ptr, 0, seen, TILE)
            low = tl.min(tl.where(tl.arange(0, TILE) < seen, key, highest), axis=0)
            high = tl.max(marked, axis=0)
            if not KEPT:
                for first in range(TILE, seen, TILE):
                    key, marked = _scores_of(row_ptr, first, seen, TILE)
                    low = tl.minimum(low, tl.min(tl.where(first + tl.arange(0, TILE) < seen, key, highest), axis=0))
                    high = tl.maximum(high, tl.max(marked, axis=0))
            tl.store(flag_ptr, 1, mask=high == highest)
            high = tl.where(high == highest, above_infinity, high + 1)  # no score reaches it
            low_count = seen
            high_count = tl.full((), 0, tl.int32)
            target = top_k.to(tl.float32)
            low_share = tl.log2((low_count.to(tl.float32) + 0.5) / target)
            high_share = tl.log2(0.5 / target)
            moved = tl.full((), 0, tl.int32)
            probes = tl.full((), 0, tl.int32)
            while (low_count != top_k) & (high - 1 > low):
                share = low_share / (low_share - high_share)
                from_value = _value(low)
                between_value = from_value + (_value(high) - from_value) * share
                if (probes < UNGUARDED) & (tl.abs(between_value) < float("inf")):
                    probe = _ordered(between_value)
                    probes += 1
                else:
                    # the middle without an overflow
                    probe = (low >> 1) + (high >> 1) + (low & high & 1)
                    probes = tl.full((), 0, tl.int32)
                probe = tl.minimum(tl.maximum(probe, low + 1), high - 1)
                if KEPT:
                    reached = tl.sum((key >= probe).to(tl.int32), axis=0)
                else:
                    reached = tl.full((), 0, tl.int32)
                    for first in range(0, seen, TILE):
                        key, marked = _scores_of(row_ptr, first, seen, TILE)
                        reached += tl.sum((key >= probe).to(tl.int32), axis=0)
                count = (reached.to(tl.float32) + 0.5) / target
                if reached >= top_k:
                    low = probe
                    low_count = reached
                    low_share = tl.log2(count)
                    high_share = tl.where(moved == 1, high_share * 0.5, high_share)
                    moved = tl.full((), 1, tl.int32)
                else:
                    high = probe
                    high_count = reached
                    high_share = tl.log2(count)
                    low_share = tl.where(moved == -1, low_share * 0.5, low_share)
                    moved = tl.full((), -1, tl.int32)
            wanted = top_k - high_count  # of those between the bounds
            if KEPT and TILE <= WRITTEN:
                _write_taken(out_row, key, 0, low, high, 0, 0, wanted, TILE)
            else:
                above = tl.full((), 0, tl.int32)
                between = tl.full((), 0, tl.int32)
                for first in range(0, seen, WRITTEN):
                    part = _scores_of(row_ptr, first, seen, WRITTEN)[0]
                    counted = tl.sum(_write_taken(out_row, part, first, low, high, above, between, wanted, WRITTEN), axis=0)
                    above += counted >> 16
                    between += counted & 0xFFFF


def choose(scores_RT: Tensor, first: int, out_RK: Tensor, rows: Rows) -> None:
    """Writes the choices of rows first, first + 1, ... into `out_RK`, from the scores of these rows.

    Widths are classes: a launch serves the rows that see at most twice as many tokens as the next narrower one's. Few rows are served
    by one launch of the widest.
    """
    count, columns = scores_RT.shape
    top_k = out_RK.shape[1]
    widest = padded_width(columns)
    least = 0
    width = widest if count <= FEW_ROWS else min(widest, KEPT, max(1024, 2 * padded_width(top_k)))
    while True:
        kept = width <= KEPT
        last = width >= widest or not kept
        _choose[(count,)](
            scores_RT,
            rows.positions_R,
            out_RK,
            rows.flag(NAN_SCORE),
            scores_RT.stride(0),
            first,
            top_k,
            least,
            columns if last else width,
            TILE=width if kept else KEPT // 2,
            WRITTEN=min(width, CHOICE_TILE),
            KEPT=kept,
            UNGUARDED=UNGUARDED,
            num_warps=min(32, max(4, width // (256 if count <= FEW_ROWS else 1024))),
            **EXACT,
        )
        if last:
            return
        least = width
        width *= 2


def _blocks(count: int, columns: int, grain: int) -> Iterator[tuple[int, int]]:
    """Blocks of rows whose scores are held at a time: a multiple of `grain` rows, the last maybe fewer."""
    step = max(grain, HELD // columns // grain * grain)
    for first in range(0, count, step):
        yield first, min(step, count - first)


def triton_scores(codes_RHE: Tensor, folded_RH: Tensor, keys: CodedRows, rows: Rows) -> Scores:
    count, heads, width = codes_RHE.shape
    columns = rows.max_length
    table = rows.starts_N1 if keys.page_table_NB is None else keys.page_table_NB
    for first, block in _blocks(count, columns, ROW_TILE):
        scores_RT = torch.empty(block, columns, dtype=torch.float32, device=codes_RHE.device)
        _coded_scores[(triton.cdiv(block, ROW_TILE), triton.cdiv(columns, KEY_TILE))](
            codes_RHE,
            folded_RH,
            keys.codes,
            keys.scales,
            table,
            rows.positions_R,
            rows.sequence_R,
            rows.starts_N1,
            scores_RT,
            table.stride(0),
            keys.codes.stride(0),
            keys.scales.stride(0),
            first,
            first + block,
            columns,
            columns,
            HEADS=heads,
            WIDTH=width,
            PAGE=0 if keys.page_table_NB is None else keys.codes.shape[1],
            ROWS=ROW_TILE,
            TILE=KEY_TILE,
            BLOCK_H=max(16, padded_width(heads)),
            BLOCK_E=max(32, padded_width(width)),
            STEP_E=max(32, padded_width(width)),
            LANES=LANES,
            num_warps=4,
            **EXACT,
        )
        yield first, scores_RT


@triton.jit(do_not_specialize=["table_row", "columns"])
def _pack_keys(
    codes_ptr,
    scales_ptr,
    table_ptr,
    lengths_ptr,
    packed_codes_ptr,
    packed_scales_ptr,
    table_row,
    codes_page,
    scales_page,
    columns,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A tile of a sequence's rows from its pages, one after another from row sequence * columns on. It moves bytes."""
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = place < tl.minimum(tl.load(lengths_ptr + sequence), columns)
    column = tl.arange(0, BLOCK_E)
    inside = there[:, None] & (column[None, :] < WIDTH)
    page = tl.load(table_ptr + sequence * table_row + place // PAGE, mask=there, other=0).to(tl.int64)
    target = sequence * columns + place
    code = tl.load(codes_ptr + (page * codes_page + (place % PAGE) * WIDTH)[:, None] + column[None, :], mask=inside, other=0)
    tl.store(packed_codes_ptr + target[:, None] * WIDTH + column[None, :], code, mask=inside)
    tl.store(packed_scales_ptr + target, tl.load(scales_ptr + page * scales_page + place % PAGE, mask=there, other=0.0), mask=there)


def packed_keys(keys: CodedRows, rows: Rows) -> tuple[Tensor, Tensor]:
    """(codes [N * columns, E], scales [N * columns]): sequence n's rows from n * columns on; what lies behind its length is anything."""
    assert keys.page_table_NB is not None
    sequences = rows.lengths_N.shape[0]
    columns = rows.max_length
    page, width = keys.codes.shape[1:]
    codes_TE = torch.empty(sequences * columns, width, dtype=torch.float8_e4m3fn, device=keys.codes.device)
    scales_T = torch.empty(sequences * columns, dtype=torch.float32, device=keys.codes.device)
    _pack_keys[(sequences, triton.cdiv(columns, KEY_TILE))](
        keys.codes.view(torch.uint8),
        keys.scales,
        keys.page_table_NB,
        rows.lengths_N,
        codes_TE.view(torch.uint8),
        scales_T,
        keys.page_table_NB.stride(0),
        keys.codes.stride(0),
        keys.scales.stride(0),
        columns,
        WIDTH=width,
        PAGE=page,
        TILE=KEY_TILE,
        BLOCK_E=padded_width(width),
        num_warps=4,
    )
    return codes_TE, scales_T


def joined_pages(keys: CodedRows) -> Tensor | None:
    """uint8 [P, page, 1, E + 4] as DeepGEMM reads pages, each a page's codes and then its scales; None where they lie otherwise."""
    page, width = keys.codes.shape[1:]
    whole = page * (width + 4)
    lie_so = (
        page == DEEPGEMM_PAGE
        and keys.codes.stride() == (keys.codes.stride(0), width, 1)
        and keys.codes.stride(0) >= whole
        and keys.codes.stride(0) % 16 == 0
        and keys.scales.stride(0) * 4 == keys.codes.stride(0)
        and keys.scales.stride(1) == 1
        and keys.scales.data_ptr() == keys.codes.data_ptr() + page * width
    )
    if not lie_so:
        return None
    return keys.codes.view(torch.uint8).as_strided(
        (keys.codes.shape[0], page, 1, width + 4), (keys.codes.stride(0), width + 4, width + 4, 1)
    )


def _paged_plan(rows: Rows) -> tuple[Tensor, Tensor]:
    """(tokens that each row sees [N, 1], DeepGEMM's division of a decode step among multiprocessors), once for all layers."""
    import deep_gemm

    key = (deepgemm_scores, "plan")
    if key not in rows.launch:
        lengths_N1 = (rows.positions_R + 1).to(torch.int32)[:, None]
        rows.launch[key] = lengths_N1, deep_gemm.get_paged_mqa_logits_metadata(lengths_N1, DEEPGEMM_PAGE, deep_gemm.get_num_sms())
    found: tuple[Tensor, Tensor] = rows.launch[key]
    return found


def deepgemm_scores(codes_RHE: Tensor, folded_RH: Tensor, keys: CodedRows, rows: Rows) -> Scores:
    """By the paged kernel for a decode step, else by the packed one."""
    import deep_gemm

    count, heads, _ = codes_RHE.shape
    columns = rows.max_length
    if keys.page_table_NB is not None and rows.max_rows == 1:
        pages = joined_pages(keys)
        if pages is not None:
            lengths_N1, plan = _paged_plan(rows)
            # row n is sequence n's; its scores are as wide as the longest sequence may be, as those of one block of any step are
            yield 0, deep_gemm.fp8_paged_mqa_logits(codes_RHE[:, None], pages, folded_RH, lengths_N1, keys.page_table_NB, plan, columns)
            return
    if keys.page_table_NB is None:
        codes_TE = keys.codes.contiguous()
        scales_T = keys.scales[:, 0].contiguous()
        begin_R = rows.starts_N1[rows.sequence_R]
    else:
        codes_TE, scales_T = packed_keys(keys, rows)
        begin_R = (rows.sequence_R * columns).to(torch.int32)
    end_R = begin_R + (rows.positions_R + 1).to(torch.int32)
    # so many rows keep every multiprocessor busy with blocks of 128 rows and heads
    grain = 128 // heads * deep_gemm.get_num_sms()
    for first, block in _blocks(count, columns, grain):
        mine = slice(first, first + block)
        yield (
            first,
            deep_gemm.fp8_mqa_logits(codes_RHE[mine], (codes_TE, scales_T), folded_RH[mine], begin_R[mine], end_R[mine], False, columns),
        )


def _select(
    scores: Callable[[Tensor, Tensor, CodedRows, Rows], Scores], q_RHE: Tensor, weights_RH: Tensor, keys: CodedRows, rows: Rows, top_k: int
) -> Tensor:
    """positions_RK. Scores [rows, longest sequence] are held for as many rows at a time as HELD allows."""
    if rows.max_length <= top_k:  # nothing to choose
        place = torch.arange(top_k, dtype=torch.int32, device=q_RHE.device)
        return torch.where(place <= rows.positions_R[:, None], place, -1)
    out_RK = torch.empty(q_RHE.shape[0], top_k, dtype=torch.int32, device=q_RHE.device)
    codes_RHE, folded_RH = fold_queries(q_RHE, weights_RH)
    for first, scores_RT in scores(codes_RHE, folded_RH, keys, rows):
        choose(scores_RT, first, out_RK, rows)
    return out_RK


def select_deepgemm(q_RHE: Tensor, weights_RH: Tensor, keys: CodedRows, rows: Rows, top_k: int) -> Tensor:
    return _select(deepgemm_scores, q_RHE, weights_RH, keys, rows, top_k)


def select_triton(q_RHE: Tensor, weights_RH: Tensor, keys: CodedRows, rows: Rows, top_k: int) -> Tensor:
    return _select(triton_scores, q_RHE, weights_RH, keys, rows, top_k)
