"""The ops as textbooks write them, in float64, and the ops' references as plain functions that autograd can walk.

Both tables stand in for public ops through a trial's `replace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zoo.common.history import CompressedRows, KeyValues, TokenRows, WholeWindows, WindowedRows
from zoo.common.ops import TokenScores
from zoo.common.ops.attention import reference as attention_reference
from zoo.common.ops.biased_route import Choice
from zoo.common.ops.biased_route import reference as biased_route_reference
from zoo.common.ops.code_round import FP8_ROWS, Grid
from zoo.common.ops.code_round import reference as code_round_reference
from zoo.common.ops.combine import reference as combine_reference
from zoo.common.ops.compress import reference as compress_reference
from zoo.common.ops.compress.windows import Window
from zoo.common.ops.compressed_attention import reference as compressed_attention_reference
from zoo.common.ops.embed import reference as embed_reference
from zoo.common.ops.experts import reference as experts_reference
from zoo.common.ops.fp8_linear import reference as fp8_linear_reference
from zoo.common.ops.fp8_quantise import reference as fp8_quantise_reference
from zoo.common.ops.hadamard import reference as hadamard_reference
from zoo.common.ops.hash_route import reference as hash_route_reference
from zoo.common.ops.head_linear import reference as head_linear_reference
from zoo.common.ops.hyper_head import reference as hyper_head_reference
from zoo.common.ops.hyper_post import reference as hyper_post_reference
from zoo.common.ops.hyper_pre import Sinkhorn
from zoo.common.ops.hyper_pre import reference as hyper_pre_reference
from zoo.common.ops.layer_norm import reference as layer_norm_reference
from zoo.common.ops.linear import reference as linear_reference
from zoo.common.ops.log_prob import reference as log_prob_reference
from zoo.common.ops.norm_rope import reference as norm_rope_reference
from zoo.common.ops.packed_experts import reference as packed_experts_reference
from zoo.common.ops.rms_norm import reference as rms_norm_reference
from zoo.common.ops.rope import reference as rope_reference
from zoo.common.ops.route import reference as route_reference
from zoo.common.ops.softplus_route import reference as softplus_route_reference
from zoo.common.ops.swiglu import reference as swiglu_reference
from zoo.common.ops.tail_rope import reference as tail_rope_reference
from zoo.common.program import Program
from zoo.common.rows import Rows

Op = Callable[..., Any]


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Of the whole tensor: |found - exact| / |exact|, in float64."""
    found = found.detach().double()
    exact = exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp(min=1e-300))


def tensor_core_product(x_RK: Tensor, weight_NK: Tensor, spare_bits: int = 2, sum_bits: int = 24) -> Tensor:
    """x W^T of BF16 values in float64, as a tensor core adds: 16 products and the sum so far are cut to `spare_bits` below the largest
    one's last FP32 bit and added, and the sum is cut to `sum_bits`, both towards zero."""

    def cut(terms: Tensor, largest: Tensor, bits: int) -> Tensor:
        unit = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - bits)
        return (terms / unit).trunc() * unit

    total = x_RK.new_zeros(x_RK.shape[0], weight_NK.shape[0])
    for x, weight in zip(x_RK.split(16, 1), weight_NK.split(16, 1), strict=True):
        terms = torch.cat([x[:, None] * weight[None], total[..., None]], -1)
        exact = cut(terms, terms.abs().amax(-1, keepdim=True), 24 + spare_bits).sum(-1)
        total = cut(exact, exact.abs(), sum_bits)
    return total


# the references, without the closed-form backward of the public ops


def _linear(x: Tensor, weight: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    return linear_reference.linear(x, weight, out_dtype or x.dtype, k_parts)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, program: Program, zero_centred: bool = False) -> Tensor:
    return rms_norm_reference.rms_norm(x, None, weight, eps, float(zero_centred))[0]


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, program: Program, zero_centred: bool = False) -> Any:
    return rms_norm_reference.rms_norm(x, residual, weight, eps, float(zero_centred))


def _norm_rope(
    qkv_RC: Tensor,
    q_weight_E: Tensor,
    k_weight_E: Tensor,
    table_PC2: Tensor,
    positions_R: Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    program: Program,
    query_width: int | None = None,
    zero_centred: bool = False,
) -> Any:
    width = q_weight_E.shape[0]
    shape = norm_rope_reference.Heads(heads, kv_heads, width, query_width or width)
    offset = float(zero_centred)
    q, k = norm_rope_reference.norm_rope(qkv_RC, q_weight_E, k_weight_E, table_PC2, positions_R, shape, eps, offset)
    return q, k, norm_rope_reference.split_heads(qkv_RC, shape)[2]


def _attention(q: Tensor, history: KeyValues, rows: Rows, scale: float, *, program: Program) -> Tensor:
    segment = program.key_segment(q.shape[2])
    return attention_reference.attention(q, history.k, history.v, history.page_table_NB, rows, scale, segment)[0]


def _combine(slots: Tensor, weights: Tensor, experts: Tensor, count: int, *, program: Program, shared_RD: Any = None) -> Tensor:
    block = -(-count // program.contributors)
    return combine_reference.combine(slots, weights, experts, shared_RD, block, program.contributors)


def _log_prob(hidden: Tensor, weight: Tensor, targets: Tensor, *, program: Program, inverse_temperature_R: Any = None) -> TokenScores:
    logits = linear_reference.panels(hidden, weight)
    logits = logits if inverse_temperature_R is None else logits * inverse_temperature_R[:, None]
    stats = log_prob_reference.group_stats(logits, program.vocab_group)
    lse, mean = log_prob_reference.merge_groups(*stats)
    return TokenScores(torch.clamp(logits.gather(1, targets[:, None])[:, 0] - lse, max=0.0), lse, lse - mean)


def _fp8_experts(x: Tensor, chosen: Tensor, *weights: Any, program: Program, limit: float | None = None) -> Tensor:
    """The quantisers as autograd would take them if their slope were 1."""
    gate_up, gate_up_scales, down, down_scales, rule = weights

    def product(rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        found = fp8_quantise_reference.fp8_quantise(rows.detach(), rule.floor, rule.power_of_two)
        values = fp8_linear_reference.fp8_linear(*found, codes, scales, rows.dtype)
        smooth = rows @ fp8_linear_reference.dequantised(codes, scales, rows.dtype).T
        return smooth + (values - smooth).detach()

    out = x.new_zeros(*chosen.shape, x.shape[1])
    for e in chosen.unique().tolist():
        row, slot = (chosen == e).nonzero(as_tuple=True)
        hidden = swiglu_reference.swiglu(product(x[row], gate_up[e], gate_up_scales[e]), limit)
        out = out.index_put((row, slot), product(hidden, down[e], down_scales[e]))
    return out


def _compress(rows_RC: Tensor, ape: Tensor, history: WholeWindows, rows: Rows, width: int, *, program: Program) -> Tensor:
    window = Window(ape.shape[0], ape.shape[1] > width)
    return compress_reference.compress(rows_RC, ape, history, rows, window, program.torch_dtype)


def _compressed_attention(
    q: Tensor, history: WindowedRows, chosen: Any, sinks: Tensor, rows: Rows, window: int, scale: float, *, program: Program
) -> Tensor:
    return compressed_attention_reference.compressed_attention(q, history, chosen, sinks, rows, window, scale)[0]


REFERENCES: dict[str, Op] = {
    "hyper_pre": lambda streams, fn, base, scale, how, *, program: hyper_pre_reference.hyper_pre(streams, fn, base, scale, how),
    "hyper_post": lambda branch, streams, post, comb, *, program: hyper_post_reference.hyper_post(branch, streams, post, comb),
    "hyper_head": lambda *args, program: hyper_head_reference.hyper_head(*args),
    "tail_rope": lambda x, table, at, *, program, inverse=False: tail_rope_reference.tail_rope(x, table, at, inverse),
    "softplus_route": lambda logits, bias, top_k, scale, *, program: softplus_route_reference.softplus_route(logits, bias, top_k, scale),
    "hash_route": lambda logits, ids, table, scale, *, program: hash_route_reference.hash_route(logits, ids, table, scale),
    # straight through the codes
    "code_round": lambda x, columns, grid, *, program: x + (code_round_reference.code_round(x, columns, grid) - x).detach(),
    "hadamard": lambda x, *, program: hadamard_reference.hadamard(x),
    "compress": _compress,
    "compressed_attention": _compressed_attention,
    "embed": lambda ids, weight, *, program: embed_reference.embed(ids, weight),
    "linear": _linear,
    # straight through the quantiser of x
    "fp8_linear": lambda x, codes, scales, rule, *, program: x @ fp8_linear_reference.dequantised(codes, scales, x.dtype).T,
    "fp8_experts": _fp8_experts,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "norm_rope": _norm_rope,
    "rope": lambda x, table, positions, *, program, neighbours=False: rope_reference.rope(x, table, positions, False, neighbours),
    "layer_norm": lambda x, weight, bias, eps, *, program: layer_norm_reference.layer_norm(x, weight, bias, eps),
    "head_linear": lambda x, weight, *, program: head_linear_reference.head_linear(x, weight),
    "biased_route": lambda logits, bias, choice, *, program: biased_route_reference.biased_route(logits, bias, choice),
    "swiglu": lambda gate_up, *, program, limit=None: swiglu_reference.swiglu(gate_up, limit),
    "attention": _attention,
    "route": lambda logits, top_k, renormalise, *, program: route_reference.route(logits, top_k, renormalise),
    "experts": lambda x, chosen, gate_up, down, *, program, limit=None: experts_reference.experts(x, chosen, gate_up, down, limit),
    "packed_experts": lambda x, chosen, *weights, program, limit=None: packed_experts_reference.packed_experts(x, chosen, *weights, limit),
    "combine": _combine,
    "log_prob": _log_prob,
}

# the textbook


def _norm(x: Tensor, weight: Tensor, eps: float, *, program: Program, zero_centred: bool = False) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + float(zero_centred))


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **names: Any) -> Any:
    return _norm(x + residual, weight, eps, **names), x + residual


def _rotate(x: Tensor, table: Tensor, positions: Tensor, *, program: Program, neighbours: bool = False) -> Tensor:
    """A complex product, on pairs (i, i + C) or (2i, 2i + 1)."""
    half = table.shape[1]
    turning = x[..., : 2 * half].unflatten(-1, (half, 2) if neighbours else (2, half))
    real, imaginary = turning.unbind(-1 if neighbours else -2)
    turned = torch.complex(real, imaginary) * torch.view_as_complex(table.double())[positions][:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def _norm_rotate(
    qkv_RC: Tensor,
    q_weight_E: Tensor,
    k_weight_E: Tensor,
    table_PC2: Tensor,
    positions_R: Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    program: Program,
    query_width: int | None = None,
    zero_centred: bool = False,
) -> Any:
    width = q_weight_E.shape[0]
    columns = qkv_RC.split([heads * (query_width or width), kv_heads * width, kv_heads * width], 1)
    q, k, v = (part.unflatten(1, (count, -1)) for part, count in zip(columns, (heads, kv_heads, kv_heads), strict=True))
    q, k = (_norm(x[..., :width], w, eps, program=program, zero_centred=zero_centred) for x, w in ((q, q_weight_E), (k, k_weight_E)))
    return *(_rotate(x, table_PC2, positions_R, program=program) for x in (q, k)), v


def _softmax_attention(q: Tensor, history: KeyValues, rows: Rows, scale: float, *, program: Program) -> Tensor:
    starts = rows.starts_N1.tolist()
    out = []
    for begin, end in zip(starts, starts[1:], strict=False):
        heads = (t[begin:end].transpose(0, 1) for t in (q, history.k, history.v))
        out.append(functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out)


def _top_k(logits: Tensor, top_k: int, renormalise: bool, *, program: Program) -> Any:
    chosen = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(logits, -1).gather(1, chosen)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), chosen


def _biased_top_k(logits: Tensor, bias: Tensor, choice: Choice, *, program: Program) -> Any:
    score = torch.sigmoid(logits)
    biased = (score + bias).unflatten(1, (choice.groups, -1))
    worth = biased.topk(2, -1).values.sum(-1) if choice.groups > 1 else biased.amax(-1)
    opened = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, : choice.open_groups]
    mask = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, opened, True)
    chosen = torch.sort(biased.masked_fill(~mask[..., None], -torch.inf).flatten(1), dim=-1, descending=True, stable=True).indices
    weights = score.gather(1, chosen[:, : choice.top_k])
    total = weights.sum(-1, keepdim=True) + 1e-20 if choice.renormalise else 1.0
    return weights / total * choice.scale, chosen[:, : choice.top_k]


def _selected(q: Tensor, weights: Tensor, keys: TokenRows, rows: Rows, top_k: int, *, program: Program) -> Tensor:
    """All scores at once; with one head and width the products are exact, and so are ties."""
    starts = rows.starts_N1.tolist()
    out = []
    for begin, end in zip(starts, starts[1:], strict=False):
        dots = torch.einsum("rhe,te->rht", q[begin:end], keys.rows[begin:end])
        scores = torch.einsum("rht,rh->rt", functional.relu(dots), weights[begin:end]) + 0.0
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        order = torch.sort(scores.masked_fill(hidden, -torch.inf), dim=-1, descending=True, stable=True).indices
        order = functional.pad(order[:, :top_k], (0, max(top_k - (end - begin), 0)), value=end - begin)
        order = torch.where(order > torch.arange(end - begin)[:, None], end - begin, order).sort(-1).values
        out.append(torch.where(order == end - begin, -1, order).to(torch.int32))
    return torch.cat(out)


def _masked_attention(
    q: Tensor, latent: TokenRows, positions: Tensor, rows: Rows, values: int, scale: float, *, program: Program
) -> Tensor:
    starts = rows.starts_N1.tolist()
    out = []
    for begin, end in zip(starts, starts[1:], strict=False):
        count = end - begin
        places = positions[begin:end].long()
        mask = torch.zeros(count, count + 1, dtype=torch.bool).scatter_(1, torch.where(places < 0, count, places), True)[:, :count]
        mine = latent.rows[begin:end]
        scores = torch.einsum("rhc,tc->rht", q[begin:end], mine) * scale
        p = torch.softmax(scores.masked_fill(~mask[:, None], -torch.inf), -1)
        out.append(torch.einsum("rht,tv->rhv", p, mine[:, :values]))
    return torch.cat(out)


def _gated(gate_up: Tensor, *, program: Program, limit: float = math.inf) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _every_expert(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, *, program: Program, limit: float = math.inf) -> Tensor:
    """All experts on all rows, then the chosen ones."""
    gated = _gated(torch.einsum("rd,xfd->rxf", x, gate_up), program=program, limit=limit)
    every = torch.einsum("rxf,xdf->rxd", gated, down)
    return every.gather(1, chosen[..., None].expand(*chosen.shape, x.shape[1]))


def _values(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Of E2M1 codes, by the definition of a float: two bits of exponent with bias 1, one of mantissa."""
    both = codes.view(torch.uint8).long()
    code = torch.stack([both % 16, both // 16], -1).flatten(-2)
    exponent = code // 2 % 4
    mantissa = (code % 2).double()
    size = torch.where(exponent > 0, torch.exp2(exponent.double() - 1) * (1 + mantissa / 2), mantissa / 2)
    values = torch.where(code >= 8, -size, size)
    return (values * scales.double().repeat_interleave(32, -1)).to(dtype)


def _weighted_sum(slots: Tensor, weights: Tensor, experts: Tensor, count: int, *, program: Program, shared_RD: Any = None) -> Tensor:
    out = torch.einsum("rkd,rk->rd", slots, weights)
    return out if shared_RD is None else out + shared_RD


def _log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor, *, program: Program, inverse_temperature_R: Any = None) -> TokenScores:
    logits = hidden @ weight.T
    logits = logits if inverse_temperature_R is None else logits * inverse_temperature_R[:, None]
    p = torch.log_softmax(logits, -1)
    return TokenScores(p.gather(1, targets[:, None])[:, 0], torch.logsumexp(logits, -1), -(p.exp() * p).sum(-1))


def _mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """The norm before the product, as transformers has it."""
    x = streams.flatten(1).to(fn.dtype)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) @ fn.T


def _collapsed(streams: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("rsd,rs->rd", streams.to(weights.dtype), weights).to(streams.dtype)


def _hyper_pre(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, how: Sinkhorn, *, program: Program) -> Any:
    count = streams.shape[1]
    pre, post, comb = _mix(streams, fn, how.eps).split((count, count, count * count), -1)
    bases = base.split((count, count, count * count))
    matrix = torch.softmax((comb * scale[2] + bases[2]).unflatten(1, (count, count)), -1) + how.floor
    matrix = matrix / (matrix.sum(-2, keepdim=True) + how.floor)
    for _ in range(how.rounds - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + how.floor)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + how.floor)
    weights = torch.sigmoid(pre * scale[0] + bases[0]) + how.floor
    return _collapsed(streams, weights), 2 * torch.sigmoid(post * scale[1] + bases[1]), matrix


def _hyper_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, floor: float, *, program: Program) -> Tensor:
    return _collapsed(streams, torch.sigmoid(_mix(streams, fn, eps) * scale + base) + floor)


def _tail_rotate(x: Tensor, table: Tensor, positions: Tensor, *, program: Program, inverse: bool = False) -> Tensor:
    """A complex product, or the division by it."""
    still = x.shape[-1] - 2 * table.shape[1]
    turns = torch.view_as_complex(table.double())[positions][:, None]
    pairs = torch.view_as_complex(x[..., still:].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * (turns.conj() if inverse else turns)).flatten(-2)
    return torch.cat([x[..., :still], turned.to(x.dtype)], -1)


def _softplus_weights(logits: Tensor, chosen: Tensor, scale: float) -> Tensor:
    weights = torch.logaddexp(logits, torch.zeros_like(logits)).sqrt().gather(1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


def _softplus_route(logits: Tensor, bias: Tensor, top_k: int, scale: float, *, program: Program) -> Any:
    score = torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()
    chosen = torch.sort(score + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return _softplus_weights(logits, chosen, scale), chosen


def _windows(rows_RC: Tensor, ape: Tensor, history: WholeWindows, rows: Rows, width: int, *, program: Program) -> Tensor:
    """Window by window, token by token."""
    tokens, columns = ape.shape
    starts = rows.starts_N1.tolist()
    out = [rows_RC.new_zeros(width)] * len(rows_RC)
    for begin, end in zip(starts, starts[1:], strict=False):
        for last in range(begin + tokens - 1, end, tokens):
            first = last + 1 - tokens
            values = list(rows_RC[first : last + 1, columns - width : columns])
            gates = list(rows_RC[first : last + 1, 2 * columns - width :] + ape[:, columns - width :])
            if columns > width and first > begin:
                values += list(rows_RC[first - tokens : first, :width])
                gates += list(rows_RC[first - tokens : first, columns : columns + width] + ape[:, :width])
            out[last] = (torch.softmax(torch.stack(gates), 0) * torch.stack(values)).sum(0)
    return torch.stack(out).to(program.torch_dtype if rows_RC.dtype == torch.float64 else torch.float32)


def _compressed_selected(q: Tensor, weights: Tensor, keys: CompressedRows, rows: Rows, top_k: int, *, program: Program) -> Tensor:
    """All scores of a document at once."""
    starts = rows.starts_N1.tolist()
    out = torch.full((len(q), top_k), -1, dtype=torch.int32)
    for begin, end in zip(starts, starts[1:], strict=False):
        mine = keys.rows[begin:end][keys.tokens - 1 :: keys.tokens].to(q.dtype)
        scores = torch.einsum("rht,rh->rt", functional.relu(torch.einsum("rhe,te->rht", q[begin:end], mine)), weights[begin:end]) + 0.0
        for r, score in enumerate(scores):
            seen = (r + 1) // keys.tokens
            found = torch.sort(score[:seen], descending=True, stable=True).indices[:top_k].sort().values
            out[begin + r, : len(found)] = found.to(torch.int32)
    return out


def _sunk_attention(
    q: Tensor, history: WindowedRows, chosen: Any, sinks: Tensor, rows: Rows, window: int, scale: float, *, program: Program
) -> Tensor:
    """One softmax of all scores and the sink, row by row."""
    starts = rows.starts_N1.tolist()
    out = []
    for begin, end in zip(starts, starts[1:], strict=False):
        pooled = history.compressed_of(0, begin, end, end - begin).to(q.dtype)
        for r in range(begin, end):
            seen = (r - begin + 1) // history.tokens if history.tokens else 0
            listed = pooled[:seen] if chosen is None else pooled[chosen[r][chosen[r] >= 0].long()]
            mine = torch.cat([history.window[max(begin, r + 1 - window) : r + 1].to(q.dtype), listed])
            scores = torch.cat([q[r] @ mine.T * scale, sinks[:, None].to(q.dtype)], 1)
            out.append(torch.softmax(scores, -1)[:, :-1] @ mine)
    return torch.stack(out)


def _code_round(x: Tensor, columns: int, grid: Grid, *, program: Program) -> Tensor:
    """Group by group, by torch's own FP8 and a list of the numbers of four bits; its gradient is 1."""
    listed = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    out = x.detach().clone()
    for first in range(0, columns, grid.group):
        group = x.detach()[:, first : min(first + grid.group, columns)]
        largest = group.abs().amax(1, keepdim=True).clamp(min=grid.floor)
        scales = torch.exp2(torch.ceil(torch.log2((largest / grid.largest).double())))
        values = group.double() / scales
        if grid == FP8_ROWS:
            codes = values.float().to(torch.float8_e4m3fn).double()
        else:
            distances = (values.abs()[..., None] - listed).abs() + torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]) * 1e-9  # ties to even codes
            codes = listed[distances.argmin(-1)].copysign(values)
        out[:, first : first + group.shape[1]] = (codes * scales).to(x.dtype)
    return x + (out - x).detach()


def _hadamard(x: Tensor, *, program: Program) -> Tensor:
    """A product with the whole matrix, doubled until it is wide enough."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.double() @ matrix / len(matrix) ** 0.5).to(x.dtype)


TEXTBOOK: dict[str, Op] = {
    "code_round": _code_round,
    "hadamard": _hadamard,
    "hyper_pre": _hyper_pre,
    "hyper_post": lambda branch, streams, post, comb, *, program: (
        torch.einsum("rjk,rjd->rkd", comb, streams.to(comb.dtype)) + post[..., None] * branch.to(comb.dtype)[:, None]
    ),
    "hyper_head": _hyper_head,
    "tail_rope": _tail_rotate,
    "softplus_route": _softplus_route,
    "hash_route": lambda logits, ids, table, scale, *, program: (_softplus_weights(logits, table[ids], scale), table[ids]),
    "compress": _windows,
    "compressed_select": _compressed_selected,
    "compressed_attention": _sunk_attention,
    "embed": lambda ids, weight, *, program: functional.embedding(ids, weight),
    "linear": lambda x, weight, *, program, out_dtype=None, k_parts=1: x @ weight.T,
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "norm_rope": _norm_rotate,
    "rope": _rotate,
    "layer_norm": lambda x, weight, bias, eps, *, program: functional.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "head_linear": lambda x, weight, *, program: torch.einsum("rhk,hnk->rhn", x, weight),
    "biased_route": _biased_top_k,
    "select": _selected,
    "sparse_attention": _masked_attention,
    "swiglu": _gated,
    "attention": _softmax_attention,
    "route": _top_k,
    "experts": _every_expert,
    "packed_experts": lambda x, chosen, gate_up, gate_up_scales, down, down_scales, **names: _every_expert(
        x, chosen, _values(gate_up, gate_up_scales, x.dtype), _values(down, down_scales, x.dtype), **names
    ),
    "combine": _weighted_sum,
    "log_prob": _log_softmax,
}
