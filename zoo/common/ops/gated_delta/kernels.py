"""gated_delta on CUDA: the launches. Whole chunks in parallel around a scan of states, or one row a sequence replayed from its slot.

The kernels stand in `kernels_chunks`, with the formulas, and in `kernels_step`. What a launch chooses (columns of a program, warps,
stages) moves no byte.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.ops.gated_delta import kernels_chunks as chunks
from zoo.common.ops.gated_delta import kernels_step
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.rows import Rows

# columns of a state that a closing step holds at once
CLOSE_COLUMNS = 32
SUM_HEADS = 32
# columns of a chunk's outputs at once: 4 programs are resident. ptxas 12.8 assembles fewer wrongly where K is 64 or more
# (docs/TRITON_FAULT.md)
OUTPUT_COLUMNS = 64
# a scan's launch for at most so many sequences x heads x columns: columns of a program, warps, stages (3: a chunk's operands arrive
# during the one before, a program a multiprocessor; 2: two programs fit and overlap)
SCAN_SHAPES = ((132 * 32, 32, 4, 3), (264 * 32, 32, 4, 2), (1 << 62, 64, 4, 2))
# rows of the inverse at once; even, as `load_pair` loads aligned pairs, and divides 64. 64 registers: 32 programs fit
INVERT_ROWS = 8
# registers of a thread of the kernels around it, so that 4 programs are resident; without a cache or in FP32 it would spill
WIDE_REGISTERS = 128
# a step's launch for at most so many sequences x heads: columns of a program, warps, stages (2: it copies its tiles
# asynchronously: fast alone, but only two fit a multiprocessor), registers of a thread at most; the fastest of 11 on an H200
STEP_SHAPES = ((64, 64, 4, 2, None), (1 << 62, 128, 4, 1, None))
# rows of a step's tiles, which the compiler pads to the tensor cores' 16 (16 gives the same bytes)
STEP_ROWS = 2


def gated_delta(
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RVE: Tensor,
    log_decay_RV: Tensor,
    beta_RV: Tensor,
    initial_NVKE: Tensor | None,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """(o_RVE, the state after each document's last whole chunk)."""
    return _by_chunks(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, initial_NVKE, None, rows)


def serve(
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RVE: Tensor,
    log_decay_RV: Tensor,
    beta_RV: Tensor,
    state: DeltaState,
    rows: Rows,
) -> Tensor:
    """o_RVE; the slots of `state` advance in place. Several rows a sequence, or one, can be captured in a CUDA graph."""
    if rows.max_rows > 1:
        return _by_chunks(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, None, state, rows)[0]
    return _by_steps(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, state, rows)


def heads_contiguous(x_RHK: Tensor) -> Tensor:
    """Rows may be slices of wider ones; inside a row heads follow each other."""
    return x_RHK if x_RHK.stride()[1:] == (x_RHK.shape[2], 1) else x_RHK.contiguous()


def plan(rows: Rows) -> tuple[Tensor, Tensor]:
    """Where chunks [C, 4] and sequences [N, 2] lie, once for all layers: the tables of `chunks.lay_out_chunks`.

    C is the most chunks that so many rows and sequences can touch, a bound from shapes alone, so that nothing waits for the host.
    """
    key = "gated_delta plan"
    if key not in rows.launch:
        rows.launch[key] = _lay_out(rows)
    return rows.launch[key]


def _lay_out(rows: Rows) -> tuple[Tensor, Tensor]:
    sequences = rows.starts_N1.shape[0] - 1
    count = rows.count // CHUNK + 2 * sequences
    chunk = torch.empty(count, 4, dtype=torch.int32, device=rows.starts_N1.device)
    sequence = torch.empty(sequences, 2, dtype=torch.int32, device=rows.starts_N1.device)
    chunks.lay_out_chunks[(count,)](
        rows.starts_N1,
        rows.lengths_N,
        chunk,
        sequence,
        sequences,
        BLOCK=triton.next_power_of_2(sequences),
    )
    return chunk, sequence


def _by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    state: DeltaState | None,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    q = heads_contiguous(q)
    k = heads_contiguous(k)
    v = heads_contiguous(v)
    beta = beta.contiguous()
    _, key_heads, key_dim = k.shape
    _, heads, value_dim = v.shape
    chunk, sequence = plan(rows)
    out = v.new_empty(v.shape)
    *_, decay, u, rounded, final = states(k, v, log_decay.contiguous(), beta, initial, state, rows)
    sizes = {"REPEAT": heads // key_heads, "K": key_dim, "E": value_dim}
    slot = chunk if state is None else state.slot_N  # a table in the place of what is never read
    k_cache = chunk if state is None else state.k_SHJK
    chunks.chunk_outputs[(chunk.shape[0], heads)](
        q,
        k,
        k_cache,
        slot,
        chunk,
        decay,
        u,
        rounded,
        out,
        q.stride(0),
        k.stride(0),
        heads,
        key_dim**-0.5,
        **sizes,
        BLOCK=min(value_dim, OUTPUT_COLUMNS),
        CACHED=state is not None,
        num_warps=4,
        num_stages=1,
        **EXACT,
    )
    if state is not None:
        chunks.keep_open_chunk[(sequence.shape[0], heads)](
            k,
            v,
            beta,
            decay,
            chunk,
            sequence,
            slot,
            k_cache,
            state.v_SVJE,
            state.beta_SVJ,
            state.decay_SVJ,
            k.stride(0),
            v.stride(0),
            heads,
            **sizes,
            num_warps=4,
            **EXACT,
        )
    return out, final


def states(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    state: DeltaState | None,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """(T [C, V, 64, 64], w, exp(G_63 - G) k, G [C, V, 64], u, the state before each chunk as its rows read it, the last states).

    The last states are those after each sequence's last whole chunk.
    """
    chunk, sequence = plan(rows)
    count = chunk.shape[0]
    sequences = sequence.shape[0]
    _, key_heads, key_dim = k.shape
    _, heads, value_dim = v.shape
    repeat = heads // key_heads
    cached = state is not None
    registers = WIDE_REGISTERS if cached and k.element_size() == 2 else None
    exact = {"dtype": torch.float32, "device": k.device}
    decay = torch.empty(count, heads, CHUNK, **exact)
    inverse = torch.empty(count, heads, CHUNK, CHUNK, **exact)
    w = k.new_empty(count, heads, CHUNK, key_dim)
    closing_k = k.new_empty(count, heads, CHUNK, key_dim)
    u = k.new_empty(count, heads, CHUNK, value_dim)
    value_factors = k.new_empty(inverse.shape)
    rounded = k.new_empty(count, heads, key_dim, value_dim)
    if state is None:
        slot = k_cache = v_cache = u_cache = beta_cache = decay_cache = inverse_cache = final_rounded = chunk  # never read
        start = chunk if initial is None else initial.float().contiguous()
        final = torch.empty(sequences, heads, key_dim, value_dim, **exact)
    else:
        slot = state.slot_N
        k_cache = state.k_SHJK
        v_cache = state.v_SVJE
        u_cache = state.u_SVJE
        beta_cache = state.beta_SVJ
        decay_cache = state.decay_SVJ
        inverse_cache = state.inverse_SVJJ
        final_rounded = state.rounded_SVKE
        start = final = state.start_SVKE
    chunks.sum_log_decays[(count, triton.cdiv(heads, SUM_HEADS))](
        log_decay,
        decay_cache,
        slot,
        chunk,
        decay,
        heads,
        BLOCK=SUM_HEADS,
        CACHED=cached,
        num_warps=1,
        **EXACT,
    )
    chunks.key_products[(count, heads)](
        k,
        beta,
        k_cache,
        beta_cache,
        slot,
        chunk,
        decay,
        inverse,
        closing_k,
        k.stride(0),
        heads,
        REPEAT=repeat,
        K=key_dim,
        CACHED=cached,
        num_warps=4,
        num_stages=1,
        maxnreg=registers,
        **EXACT,
    )
    chunks.invert_triangle[(count, heads)](inverse, chunk, heads, ROWS=INVERT_ROWS, num_warps=1, num_stages=1, **EXACT)
    chunks.apply_inverse[(count, heads)](
        k,
        beta,
        k_cache,
        beta_cache,
        inverse_cache,
        slot,
        chunk,
        decay,
        inverse,
        w,
        value_factors,
        k.stride(0),
        heads,
        REPEAT=repeat,
        K=key_dim,
        CACHED=cached,
        num_warps=4,
        num_stages=1,
        maxnreg=registers,
        **EXACT,
    )
    wanted, warps, stages = next(shape for most, *shape in SCAN_SHAPES if sequences * heads * value_dim <= most)
    block = min(value_dim, wanted)
    chunks.scan_states[(sequences * (value_dim // block), heads)](
        v,
        v_cache,
        value_factors,
        w,
        closing_k,
        decay,
        chunk,
        sequence,
        start,
        slot,
        u,
        rounded,
        final,
        final_rounded,
        u_cache,
        v.stride(0),
        heads,
        K=key_dim,
        E=value_dim,
        BLOCK=block,
        CACHED=cached,
        INITIAL=start is not chunk,
        num_warps=warps,
        num_stages=stages,
        **EXACT,
    )
    return inverse, w, closing_k, decay, u, rounded, final


def _by_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: DeltaState,
    rows: Rows,
) -> Tensor:
    q = heads_contiguous(q)
    k = heads_contiguous(k)
    v = heads_contiguous(v)
    count, key_heads, key_dim = k.shape
    _, heads, value_dim = v.shape
    wanted, warps, stages, registers = next(shape for most, *shape in STEP_SHAPES if count * heads <= most)
    block = min(value_dim, wanted)
    out = v.new_empty(v.shape)
    kernels_step.decode_row[(count, heads, value_dim // block)](
        q,
        k,
        v,
        log_decay.contiguous(),
        beta.contiguous(),
        rows.positions_R,
        state.slot_N,
        state.start_SVKE,
        state.rounded_SVKE,
        state.k_SHJK,
        state.v_SVJE,
        state.u_SVJE,
        state.beta_SVJ,
        state.decay_SVJ,
        state.inverse_SVJJ,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        heads,
        key_dim**-0.5,
        REPEAT=heads // key_heads,
        K=key_dim,
        E=value_dim,
        BLOCK=block,
        NARROW=min(block, CLOSE_COLUMNS),
        ROWS=STEP_ROWS,
        STAGES=stages,
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
        **EXACT,
    )
    return out
