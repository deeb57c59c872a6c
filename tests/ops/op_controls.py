"""Ops broken on purpose, one for each law and op: the helpers of `zoo.testing` must catch every one.

A control has the public signature of the op that it stands in for. Each is a fault that real kernels have had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.history import CodedRows, CompressedRows, KeyValues, TokenRows, WindowedRows
from zoo.common.ops.e2m1 import dequantised
from zoo.common.ops.fp8_quantise import Codes, ScaleRule
from zoo.common.ops.sample import sample, score_filtered
from zoo.common.program import Program
from zoo.common.rows import Rows

Replace = dict[str, Callable[..., Any]]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested outputs with every floating tensor changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: mapped(getattr(value, f.name), change) for f in dataclasses.fields(value)})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change) for v in value))
    if isinstance(value, tuple):
        return tuple(mapped(v, change) for v in value)
    return value


def in_dtype(program: Program, dtype: str) -> Program:
    """The same program for operands of another dtype, which its ops then read."""
    return replace(program, dtype=dtype)


def jittered(op: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat: a result that depends on the global random state, as an atomic sum does on its timing."""
    return lambda *args, **kwargs: mapped(op(*args, **kwargs), lambda t: t * (1 + 0.03 * torch.rand(())))


def from_storage_start(op: Callable[..., Any]) -> Callable[..., Any]:
    """Place: a kernel handed the buffer's pointer and not the view's, so it reads whatever lies before the rows."""

    def broken(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(first.as_strided(first.shape, first.stride(), 0), *args, **kwargs)

    return broken


def batch_scaled(op: Callable[..., Any]) -> Callable[..., Any]:
    """Row: one scale for the whole batch, as a per-tensor quantiser has."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        def change(t: Tensor) -> Tensor:
            scale = t.detach().abs().max() * 1.1
            return (t / scale) * scale

        return mapped(op(*args, **kwargs), change)

    return broken


def plain_linear(x: Tensor, weight: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    """Row: a matmul whose kernel, and so whose order of additions, depends on the number of rows."""
    return (x.float() @ weight.float().T).to(out_dtype or x.dtype)


def unpadded_columns(x: Tensor, weight: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    """Column: panels of 16 rows, but the weight's columns in one piece and not padded."""
    rows = x.shape[0]
    padded = torch.cat([x, x.new_zeros(-rows % 16, x.shape[1])]).float()
    return torch.cat([panel @ weight.float().T for panel in padded.split(16)])[:rows].to(out_dtype or x.dtype)


def torch_sum_norm(x: Tensor, weight: Tensor, eps: float, *, program: Program, zero_centred: bool = False) -> Tensor:
    """Row: torch.sum over rows laid side by side; its order depends on how many there are."""
    value = x.float().flatten(0, -2)
    total = (value * value).T.contiguous().sum(0).view(*x.shape[:-1], 1)
    return (x.float() * torch.rsqrt(total / x.shape[-1] + eps) * (weight.float() + float(zero_centred))).to(x.dtype)


def unrounded_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, program: Program, zero_centred: bool = False) -> Any:
    """Fusion: the norm reads the residual sum before it is rounded."""
    total = x.float() + residual.float()
    normed = ops.rms_norm(total, weight.float(), eps, program=in_dtype(program, "float32"), zero_centred=zero_centred)
    return normed.to(x.dtype), total.to(x.dtype)


def relative_positions(x: Tensor, table: Tensor, positions: Tensor, **names: Any) -> Tensor:
    """Row: positions counted from the batch's first row."""
    return ops.rope(x, table, (positions - positions[0]) % table.shape[0], **names)


def unrounded_norm_rope(*, qkv_RC: Tensor, q_weight_E: Tensor, k_weight_E: Tensor, program: Program, **names: Any) -> Any:
    """Fusion: the rotation reads the norm's output before it is rounded."""
    weights = {"q_weight_E": q_weight_E.float(), "k_weight_E": k_weight_E.float()}
    wide = ops.norm_rope(qkv_RC=qkv_RC.float(), **weights, program=in_dtype(program, "float32"), **names)
    return mapped(wide, lambda t: t.to(qkv_RC.dtype))


def relative_norm_rope(*, positions_R: Tensor, **names: Any) -> Any:
    """Row: positions counted from the batch's first row."""
    return ops.norm_rope(positions_R=(positions_R - positions_R[0]) % names["table_PC2"].shape[0], **names)


def unviewed_norm_rope(*, qkv_RC: Tensor, **names: Any) -> Any:
    """Place: the buffer's pointer and not the view's."""
    return ops.norm_rope(qkv_RC=qkv_RC.as_strided(qkv_RC.shape, qkv_RC.stride(), 0), **names)


def contracted_rotation(x: Tensor, table: Tensor, positions: Tensor, *, program: Program, **names: Any) -> Tensor:
    """Fusion: with several heads in the launch the compiler contracts a * cos - b * sin, so a product is not rounded."""
    if x.shape[1] == 1:
        return ops.rope(x, table, positions, program=program, **names)
    return ops.rope(x.double(), table, positions, program=in_dtype(program, "float64"), **names).to(x.dtype)


def contiguous_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, program: Program) -> Tensor:
    """Fusion: a kernel that takes rows to lie side by side, whatever the stride says."""
    dense = torch.empty(x.shape, device="meta").stride()
    return ops.layer_norm(x.as_strided(x.shape, dense), weight, bias, eps, program=program)


def plain_head_linear(x: Tensor, weight: Tensor, *, program: Program) -> Tensor:
    """Row and column: a batched matmul, whose order of additions depends on its shape."""
    return torch.einsum("rhk,hnk->rhn", x.float(), weight.float()).to(x.dtype)


def wide_head_linear(x: Tensor, weight: Tensor, *, program: Program) -> Tensor:
    """Fusion: another accumulator than linear's."""
    return torch.einsum("rhk,hnk->rhn", x.double(), weight.double()).to(x.dtype)


def dead_latents(q: Tensor, latent: TokenRows, *args: Any, **names: Any) -> Tensor:
    """Place: multiplies a dead page by zero, as a tile that runs over the end of a list does."""
    out = ops.sparse_attention(q, latent, *args, **names)
    return out + 0 * latent.rows.float().sum().to(out.dtype)


def eight_bit_select(pool: bool) -> Callable[..., Tensor]:
    """Row and split: queries in eight bits with one scale for the whole call; `pool`, place: index keys with one for all pages."""

    def eight_bit(x: Tensor) -> Tensor:
        scale = x.float().abs().max() / 448
        return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)

    def broken(q: Tensor, weights: Tensor, keys: TokenRows, *args: Any, **names: Any) -> Tensor:
        if pool:
            return ops.select(q, weights, replace(keys, rows=eight_bit(keys.rows)), *args, **names)
        return ops.select(eight_bit(q), weights, keys, *args, **names)

    return broken


def eight_bit_compressed_select(pool: bool) -> Callable[..., Tensor]:
    """The same of a selector of compressed rows."""

    def eight_bit(x: Tensor) -> Tensor:
        scale = x.float().abs().max() / 448
        return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)

    def broken(q: Tensor, weights: Tensor, keys: CompressedRows, *args: Any, **names: Any) -> Tensor:
        if pool:
            return ops.compressed_select(q, weights, replace(keys, rows=eight_bit(keys.rows)), *args, **names)
        return ops.compressed_select(eight_bit(q), weights, keys, *args, **names)

    return broken


def eight_bit_fp8_select(pool: bool) -> Callable[..., Tensor]:
    """As above; of coded keys it is their scales that are of the whole pool: the largest."""

    def broken(q: Tensor, weights: Tensor, keys: CodedRows, *args: Any, **names: Any) -> Tensor:
        if pool:
            scale = keys.scales.nan_to_num(0).abs().max().expand_as(keys.scales)
            return ops.fp8_select(q, weights, replace(keys, scales=scale.contiguous()), *args, **names)
        scale = q.float().abs().max() / 448
        coarse = ((q.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(q.dtype)
        return ops.fp8_select(coarse, weights, keys, *args, **names)

    return broken


def jittered_compressed_select(q: Tensor, *args: Any, **names: Any) -> Tensor:
    """Repeat: scores that depend on the global random state."""
    return ops.compressed_select(q * (1 + torch.rand(q.shape)).to(q.dtype), *args, **names)


def windows_from_the_push(rows_RC: Tensor, ape: Tensor, history: Any, rows: Rows, width: int, *, program: Program) -> Tensor:
    """Split: windows counted from the first row that is pushed, not from the sequence's first."""
    counts = (rows.starts_N1[1:] - rows.starts_N1[:-1]).tolist()
    return ops.compress(rows_RC, ape, history, Rows.pushed(counts, None, rows_RC.device), width, program=program)


def whole_open_windows(rows_RC: Tensor, ape: Tensor, history: Any, *args: Any, **names: Any) -> Tensor:
    """Place: multiplies the rows of every slot by a mask, so that a dead slot counts as 0 times what it holds."""
    out = ops.compress(rows_RC, ape, history, *args, **names)
    return out + 0 * history.rows_SWC.sum().to(out.dtype) if hasattr(history, "rows_SWC") else out


def dead_windows(q: Tensor, history: WindowedRows, *args: Any, **names: Any) -> Tensor:
    """Place: multiplies a dead page by zero, as a tile that runs over the end of a list does."""
    out = ops.compressed_attention(q, history, *args, **names)
    return out + 0 * history.window.float().sum().to(out.dtype)


def relative_tail(x: Tensor, table: Tensor, positions: Tensor, **names: Any) -> Tensor:
    """Row: positions counted from the batch's first row."""
    return ops.tail_rope(x, table, (positions - positions[0]) % table.shape[0], **names)


def contracted_tail(x: Tensor, table: Tensor, positions: Tensor, *, program: Program, inverse: bool = False) -> Tensor:
    """Fusion: with several heads in the launch a product is not rounded."""
    if x.shape[1] == 1:
        return ops.tail_rope(x, table, positions, program=program, inverse=inverse)
    wide = ops.tail_rope(x.double(), table, positions, program=in_dtype(program, "float64"), inverse=inverse)
    return wide.float().to(x.dtype)


def coded_by_batch(x: Tensor, *args: Any, **names: Any) -> Tensor:
    """Row: the batch's largest value in every group's scale."""
    largest = x.float().abs().max().clamp(min=1e-30)
    return (ops.code_round((x.float() / largest).to(x.dtype), *args, **names).float() * largest).to(x.dtype)


def jittered_fp8_select(q: Tensor, *args: Any, **names: Any) -> Tensor:
    return ops.fp8_select(q * (1 + torch.rand(q.shape)).to(q.dtype), *args, **names)


def jittered_select(q: Tensor, *args: Any, **names: Any) -> Tensor:
    """Repeat: scores that depend on the global random state, as an atomic sum does on its timing."""
    return ops.select(q * (1 + torch.rand(q.shape)).to(q.dtype), *args, **names)


def vectorised_silu(gate_up: Tensor, *, program: Program, limit: float | None = None) -> Tensor:
    """Row and column: torch's silu, whose vector body and scalar tail round differently; it knows no limit."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate.contiguous()) * up).to(gate_up.dtype)


def batch_peak(logits: Tensor, top_k: int, renormalise: bool, *, program: Program) -> Any:
    """Row: exponentials from the largest logit of the batch."""
    exponential = torch.exp(logits - logits.max())
    weights, chosen = torch.sort(exponential / exponential.sum(-1, keepdim=True), descending=True, stable=True)
    weights = weights[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), chosen[:, :top_k]


def _expert_by_expert(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, product: Callable[..., Tensor], rounds: bool) -> Tensor:
    out = x.new_empty(*chosen.shape, x.shape[1])
    for e in chosen.unique().tolist():
        row, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = product(x[row], gate_up[e]).chunk(2, -1)
        if rounds:
            gate = gate.to(x.dtype).float()
            up = up.to(x.dtype).float()
        hidden = (gate / (1 + torch.exp(-gate))) * up
        out[row, slot] = product(hidden.to(x.dtype) if rounds else hidden, down[e]).to(x.dtype)
    return out


def plain_experts(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, *, program: Program, **limit: float) -> Tensor:
    """Row: a matmul shaped by how many rows chose the expert."""
    return _expert_by_expert(x, chosen, gate_up, down, lambda a, b: a.float() @ b.float().T, rounds=True)


def unrounded_experts(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, *, program: Program, **limit: float) -> Tensor:
    """Fusion: gate, up and their product stay in FP32 between the two projections."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return ops.linear(a.float(), b.float(), program=in_dtype(program, "float32"))

    return _expert_by_expert(x, chosen, gate_up, down, product, rounds=False)


def parts_by_local_experts(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, *, program: Program, **limit: float) -> Tensor:
    """Shard: the split of K depends on how many experts this rank holds."""
    parts = 2 if gate_up.shape[0] % 4 == 0 and x.shape[1] % 2 == 0 and down.shape[2] % 2 == 0 else 1

    def product(a: Tensor, b: Tensor) -> Tensor:
        return ops.linear(a, b, program=program, out_dtype=torch.float32, k_parts=parts)

    return _expert_by_expert(x, chosen, gate_up, down, product, rounds=True)


def rotated_slots(slots: Tensor, weights: Tensor, experts: Tensor, count: int, *, program: Program, shared_RD: Any = None) -> Tensor:
    """Row: a row adds its slots from the one that its place in the batch names."""
    depth = slots.shape[1]
    rows = slots.shape[0]
    order = (torch.arange(depth) + torch.arange(rows)[:, None]) % depth
    slots = slots.gather(1, order[..., None].expand_as(slots))
    return ops.combine(slots, weights.gather(1, order), experts.gather(1, order), count, program=program, shared_RD=shared_RD)


def one_accumulator(slots: Tensor, weights: Tensor, experts: Tensor, count: int, *, program: Program, shared_RD: Any = None) -> Tensor:
    """Fusion: all slots in one FP32 accumulator, the leaves never rounded."""
    total = torch.zeros(slots.shape[0], slots.shape[2])
    for slot in range(slots.shape[1]):
        total = total + weights[:, slot, None] * slots[:, slot].float()
    return (total if shared_RD is None else total + shared_RD.float()).to(slots.dtype)


def contributors_by_world(
    slots: Tensor, weights: Tensor, experts: Tensor, count: int, *, program: Program, shared_RD: Any = None
) -> Tensor:
    """Shard: as many contributors as ranks, here one."""
    return ops.combine(slots, weights, experts, count, program=replace(program, contributors=1), shared_RD=shared_RD)


def plain_logits(hidden: Tensor, weight: Tensor, *, program: Program, inverse_temperature_R: Tensor | None = None) -> Tensor:
    """Row and shard: logits by a matmul that sees the number of rows and of columns."""
    out = hidden.float() @ weight.float().T
    return out if inverse_temperature_R is None else out * inverse_temperature_R[:, None]


def plain_log_prob(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, program: Program, inverse_temperature_R: Tensor | None = None
) -> Any:
    """Row: the same matmul under log_prob."""
    scores = plain_logits(hidden, weight, program=program, inverse_temperature_R=inverse_temperature_R)
    return ops.log_prob_of_logits(scores, targets, program=program)


def groups_of_128(hidden: Tensor, weight: Tensor, targets: Tensor, *, program: Program, **temperature: Any) -> Any:
    """Fusion: one driver groups the vocabulary by 128."""
    return ops.log_prob(hidden, weight, targets, program=replace(program, vocab_group=128), **temperature)


def drawn_by_place(logits: Tensor, rows: Any, program: Program) -> Any:
    """Row: noise counted by the row's place in the batch, not by its position in its sequence."""
    return sample(logits, replace(rows, position_R=torch.arange(len(rows.position_R))), program)


def unfiltered_replay(hidden: Tensor, weight: Tensor, targets: Tensor, rows: Any, program: Program) -> Any:
    """Fusion: the trainer forgets the filters."""
    return ops.log_prob(hidden, weight, targets, program=program, inverse_temperature_R=rows.inverse_temperature_R)


def whole_pool(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Any, *args: Any, **names: Any) -> Tensor:
    """Place: multiplies every slot's rows by a mask, so that a dead slot counts as 0 times what it holds."""
    out = ops.gated_delta(q, k, v, log_decay, beta, state, *args, **names)
    return out if state is None else out + 0 * state.v_SVJE.float().sum().to(out.dtype)


def whole_carry(x: Tensor, weight: Tensor, history: Any, *args: Any, **names: Any) -> Tensor:
    """Place: the same fault in the convolution's carried rows."""
    out = ops.causal_conv(x, weight, history, *args, **names)
    return out + 0 * history.rows_SWC.float().sum().to(out.dtype) if hasattr(history, "rows_SWC") else out


Tiles = Callable[[Tensor, KeyValues, int, int], list[int]]


def tiled_attention(tiles: Tiles, peeks: bool = False) -> Callable[..., Tensor]:
    """A streaming softmax in FP32 whose key tiles begin where `tiles(q, history, context, length)` says.

    `peeks`: multiplies a dead page by zero, as a tile that runs over the end of the table does.
    """

    def attention(q: Tensor, history: KeyValues, rows: Rows, scale: float, *, program: Program) -> Tensor:
        out = torch.empty_like(q)
        starts = rows.starts_N1.tolist()
        for n, length in enumerate(rows.lengths_N.tolist()):
            mine = slice(starts[n], starts[n + 1])
            keys = history.k[mine]
            values = history.v[mine]
            if history.page_table_NB is not None:
                keys, values = (t[history.page_table_NB[n].long()].flatten(0, 1)[:length] for t in (history.k, history.v))
            share = q.shape[1] // keys.shape[1]
            keys, values = (t.float().transpose(0, 1).repeat_interleave(share, 0) for t in (keys, values))
            context = length - (mine.stop - mine.start)
            state = q[mine].float().transpose(0, 1)
            edges = tiles(q, history, context, length)
            hidden = torch.arange(length)[None] > torch.arange(context, length)[:, None]
            peak = torch.full(state.shape[:2], -torch.inf)
            mass = torch.zeros(state.shape[:2])
            total = torch.zeros_like(state)
            for begin, end in zip(edges, [*edges[1:], length], strict=True):
                scores = (state @ keys[:, begin:end].transpose(1, 2) * scale).masked_fill(hidden[:, begin:end], -torch.inf)
                top = torch.maximum(peak, scores.amax(-1))
                weight = torch.exp(scores - top[..., None])
                keep = torch.exp(peak - top)
                mass = mass * keep + weight.sum(-1)
                total = total * keep[..., None] + weight @ values[:, begin:end]
                peak = top
            result = (total / mass[..., None]).transpose(0, 1)
            if peeks and history.page_table_NB is not None:
                result = result + 0 * history.v[-1].float().sum()
            out[mine] = result.to(q.dtype)
        return out

    return attention


def every(size: int) -> Tiles:
    return lambda q, history, context, length: list(range(0, length, size))


def by_row_count(q: Tensor, history: KeyValues, context: int, length: int) -> list[int]:
    return list(range(0, length, 64 if q.shape[0] > 64 else 8))


def from_chunk_start(q: Tensor, history: KeyValues, context: int, length: int) -> list[int]:
    return sorted({0, *range(context, length, 64)})


def by_page(q: Tensor, history: KeyValues, context: int, length: int) -> list[int]:
    return list(range(0, length, 64 if history.page_table_NB is None else history.k.shape[1]))


def by_head_count(q: Tensor, history: KeyValues, context: int, length: int) -> list[int]:
    return list(range(0, length, 8 * q.shape[1]))


def quantised_by_batch(x: Tensor, rule: ScaleRule, *, program: Program) -> Codes:
    """Row: one scale for the whole batch."""
    codes, scales = ops.fp8_quantise(x, rule, program=program)
    return Codes(codes, torch.full_like(scales, float(scales.nan_to_num(0).max())))


def jittered_quantise(x: Tensor, rule: ScaleRule, *, program: Program) -> Codes:
    codes, scales = ops.fp8_quantise(x, rule, program=program)
    return Codes(codes, scales * (1 + 0.03 * torch.rand(())))


def scales_of_the_first_block(x: Tensor, codes: Tensor, scales: Tensor, rule: ScaleRule, **named: Any) -> Tensor:
    """Column: every block of rows takes the scales of the first, so a part that begins elsewhere differs from the whole."""
    return ops.fp8_linear(x, codes, scales[:1].expand_as(scales).contiguous(), rule, **named)


def first_block_experts(x: Tensor, chosen: Tensor, gate_up: Tensor, scales: Tensor, *others: Any, **named: Any) -> Tensor:
    """Fusion: gate and up take the scales of an expert's first rows."""
    return ops.fp8_experts(x, chosen, gate_up, scales[:, :1].expand_as(scales).contiguous(), *others, **named)


def first_local_experts(x: Tensor, chosen: Tensor, gate_up: Tensor, scales: Tensor, *others: Any, **named: Any) -> Tensor:
    """Shard: every expert takes the scales of the first that this rank holds."""
    return ops.fp8_experts(x, chosen, gate_up, scales[:1].expand_as(scales).contiguous(), *others, **named)


def odd_columns_first(x: Tensor, chosen: Tensor, gate_up: Tensor, *others: Any, **named: Any) -> Tensor:
    """Fusion: the high half of a byte is taken for the even column."""
    both = gate_up.view(torch.uint8)
    return ops.packed_experts(x, chosen, ((both << 4) | (both >> 4)).view(torch.int8), *others, **named)


def plain_packed_experts(x: Tensor, chosen: Tensor, gate_up: Tensor, scales: Tensor, down: Tensor, *others: Any, **named: Any) -> Tensor:
    """Row: a matmul shaped by how many rows chose the expert."""
    weights = dequantised(gate_up, scales, x.dtype), dequantised(down, others[0], x.dtype)
    return plain_experts(x, chosen, *weights, **named)


FAULTS: dict[tuple[str, str], list[Replace]] = {
    ("compress", "split"): [{"compress": windows_from_the_push}],
    ("compress", "place"): [{"compress": whole_open_windows}],
    ("compressed_select", "row"): [{"compressed_select": eight_bit_compressed_select(False)}],
    ("compressed_select", "split"): [{"compressed_select": eight_bit_compressed_select(False)}],
    ("compressed_select", "place"): [{"compressed_select": eight_bit_compressed_select(True)}],
    ("compressed_attention", "place"): [{"compressed_attention": dead_windows}],
    ("code_round", "row"): [{"code_round": coded_by_batch}],
    ("tail_rope", "row"): [{"tail_rope": relative_tail}],
    ("tail_rope", "fusion"): [{"tail_rope": contracted_tail}],
    ("packed_experts", "fusion"): [{"packed_experts": odd_columns_first}],
    ("packed_experts", "row"): [{"packed_experts": plain_packed_experts}, {"packed_experts": batch_scaled(ops.packed_experts)}],
    ("fp8_experts", "row"): [{"fp8_experts": batch_scaled(ops.fp8_experts)}],
    ("fp8_experts", "fusion"): [{"fp8_experts": first_block_experts}],
    ("fp8_experts", "shard"): [{"fp8_experts": first_local_experts}],
    ("fp8_quantise", "row"): [{"fp8_quantise": quantised_by_batch}],
    ("fp8_linear", "column"): [{"fp8_linear": scales_of_the_first_block}],
    ("attention", "row"): [{"attention": tiled_attention(by_row_count)}],
    ("attention", "split"): [{"attention": tiled_attention(from_chunk_start)}],
    ("attention", "place"): [{"attention": tiled_attention(by_page)}, {"attention": tiled_attention(every(64), peeks=True)}],
    ("attention", "shard"): [{"attention": tiled_attention(by_head_count)}],
    ("combine", "row"): [{"combine": rotated_slots}, {"combine": batch_scaled(ops.combine)}],
    ("combine", "fusion"): [{"combine": one_accumulator}],
    ("combine", "shard"): [{"combine": contributors_by_world}, {"combine": one_accumulator}],
    ("embed", "row"): [{"embed": batch_scaled(ops.embed)}],
    ("experts", "row"): [{"experts": plain_experts}, {"experts": batch_scaled(ops.experts)}],
    ("experts", "fusion"): [{"experts": unrounded_experts}],
    ("experts", "shard"): [{"experts": parts_by_local_experts}],
    ("head_linear", "row"): [{"head_linear": plain_head_linear}, {"head_linear": batch_scaled(ops.head_linear)}],
    ("head_linear", "column"): [{"head_linear": plain_head_linear}],
    ("head_linear", "fusion"): [{"head_linear": wide_head_linear}],
    ("layer_norm", "fusion"): [{"layer_norm": contiguous_layer_norm}],
    ("select", "row"): [{"select": eight_bit_select(False)}],
    ("select", "split"): [{"select": eight_bit_select(False)}],
    ("select", "place"): [{"select": eight_bit_select(True)}],
    ("fp8_select", "row"): [{"fp8_select": eight_bit_fp8_select(False)}],
    ("fp8_select", "split"): [{"fp8_select": eight_bit_fp8_select(False)}],
    ("fp8_select", "place"): [{"fp8_select": eight_bit_fp8_select(True)}],
    ("sparse_attention", "place"): [{"sparse_attention": dead_latents}],
    ("linear", "row"): [{"linear": plain_linear}, {"linear": batch_scaled(ops.linear)}],
    ("linear", "column"): [{"linear": unpadded_columns}],
    ("log_prob", "row"): [{"log_prob": plain_log_prob}],
    ("log_prob", "fusion"): [{"log_prob": groups_of_128}, {"logits": plain_logits}],
    ("log_prob", "shard"): [{"logits": plain_logits}],
    ("causal_conv", "place"): [{"causal_conv": whole_carry}],
    ("gated_delta", "place"): [{"gated_delta": whole_pool}],
    ("norm_rope", "place"): [{"norm_rope": unviewed_norm_rope}],
    ("sample", "place"): [{"logits": from_storage_start(ops.logits)}],
    ("norm_rope", "row"): [{"norm_rope": relative_norm_rope}],
    ("norm_rope", "fusion"): [{"norm_rope": unrounded_norm_rope}],
    ("rms_norm", "row"): [{"rms_norm": torch_sum_norm}, {"rms_norm": batch_scaled(ops.rms_norm)}],
    ("rms_norm", "fusion"): [{"add_rms_norm": unrounded_sum}],
    ("rope", "row"): [{"rope": relative_positions}],
    ("rope", "fusion"): [{"rope": contracted_rotation}],
    ("route", "row"): [{"route": batch_peak}],
    ("sample", "row"): [{"sample": drawn_by_place}],
    ("sample", "fusion"): [{"score_filtered": unfiltered_replay}, {"score_filtered": jittered(score_filtered)}],
    ("swiglu", "row"): [{"swiglu": batch_scaled(ops.swiglu)}, {"swiglu": vectorised_silu}],
    ("swiglu", "column"): [{"swiglu": batch_scaled(ops.swiglu)}, {"swiglu": vectorised_silu}],
}
MAIN = {name: getattr(ops, name) for name in ops.CONTRACTS if hasattr(ops, name)}
MAIN["sample"] = sample
for _name, _op in MAIN.items():
    FAULTS[_name, "repeat"] = [{_name: jittered(_op)}]
    FAULTS.setdefault((_name, "place"), [{_name: from_storage_start(_op)}])
    for _law in ("row", "column", "split", "shard"):  # an op with nothing finer: a scale over the whole call
        FAULTS.setdefault((_name, _law), [{_name: batch_scaled(_op)}])
FAULTS["fp8_quantise", "repeat"] = [{"fp8_quantise": jittered_quantise}]
FAULTS["fp8_select", "repeat"] = [{"fp8_select": jittered_fp8_select}]
FAULTS["select", "repeat"] = [{"select": jittered_select}]
FAULTS["compressed_select", "repeat"] = [{"compressed_select": jittered_compressed_select}]
