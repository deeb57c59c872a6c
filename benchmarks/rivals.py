"""What our ops are measured against: the ordinary way to compute the same thing, its order of additions nobody's promise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype), total


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = row * WIDTH + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = (x + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(total_ptr.dtype.element_ty)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(total_ptr + at, total, mask=mask)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One program a row, the compiler's own sum."""
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _add_rms_norm[(x.shape[0],)](x, residual, weight, out, total, eps, WIDTH=width, BLOCK=block, num_warps=min(16, max(4, block // 512)))
    return out, total


def _wide(x: Tensor) -> Tensor:
    """FP32 of a narrower type; float64 stays, so that the same lines give the exact result."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    width = q_weight.shape[0]
    q, k, v = qkv.unflatten(1, (-1, width)).split([heads, kv_heads, kv_heads], 1)
    turn = table[positions][:, None]
    return _turned(_normed(q, q_weight, eps), turn), _turned(_normed(k, k_weight, eps), turn), v


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    first, second = _wide(x).chunk(2, -1)
    cos = turn[..., 0]
    sin = turn[..., 1]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return _turned(x, table[positions][:, None])


def rope_of_neighbours(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return rope(torch.cat([x[..., 0::2], x[..., 1::2]], -1), table, positions)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(torch.softmax(logits, -1), top_k, -1)
    return weights / weights.sum(-1, keepdim=True), experts


def biased_route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    score = logits.sigmoid()
    chosen = (score + bias).topk(top_k, -1).indices
    weights = score.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) * scale, chosen


def combine(slots: Tensor, weights: Tensor) -> Tensor:
    return (slots * weights[..., None]).sum(1).to(slots.dtype)


def log_prob(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logits a thousand rows at a time, then one log-sum-exp."""
    return torch.cat([_scored(h, weight, t) for h, t in zip(hidden.split(1024), targets.split(1024))])


def _scored(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, 1)


def log_prob_compiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The product by cuBLAS, the cross entropy in one compiled pass."""
    parts = zip(hidden.split(1024), targets.split(1024))
    return torch.cat([compiled(_cross_entropy)(h @ weight.T, t) for h, t in parts])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]


def gumbel(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    token = (torch.softmax(logits, -1) / noise.exponential_()).argmax(-1)
    return token, logits.gather(1, token[:, None])[:, 0] - torch.logsumexp(logits, 1)


@triton.jit
def _recurrent_step(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    scale,
    REPEAT: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    i = tl.arange(0, K)
    e = part * BLOCK + tl.arange(0, BLOCK)
    value = row * VALUES + head
    key = row * (VALUES // REPEAT) + head // REPEAT
    at = state_ptr + (value * K + i[:, None]) * E + e[None, :]
    k = tl.load(k_ptr + key * K + i).to(tl.float32)
    state = tl.load(at) * tl.exp(tl.load(decay_ptr + value))
    u = (tl.load(v_ptr + value * E + e).to(tl.float32) - tl.sum(k[:, None] * state, axis=0)) * tl.load(beta_ptr + value)
    state += k[:, None] * u[None, :]
    tl.store(at, state)
    q = tl.load(q_ptr + key * K + i).to(tl.float32)
    tl.store(out_ptr + value * E + e, (tl.sum(q[:, None] * state, axis=0) * scale).to(out_ptr.dtype.element_ty))


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One ordinary step of the gated delta rule: the state is read, corrected and written in place. state FP32 [N, V, K, E]."""
    rows, values, width = v.shape
    out = torch.empty_like(v)
    block = min(32, width)
    _recurrent_step[(rows, values, width // block)](
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        log_decay,
        beta,
        state,
        out,
        k.shape[2] ** -0.5,
        REPEAT=values // k.shape[1],
        VALUES=values,
        K=k.shape[2],
        E=width,
        BLOCK=block,
        num_warps=4,
    )
    return out


def recurrent_steps(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """`recurrent_step` over operands [T, N, ...]: the last token's output."""
    return [recurrent_step(*token, state) for token in zip(q, k, v, log_decay, beta)][-1]


def delta_exact(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in float64, token by token from a state of zero: [R, ...] of one document or [R, N, ...] -> the last token's."""
    repeat = v.shape[-2] // k.shape[-2]
    scale = k.shape[-1] ** -0.5
    q, k, v, decay, beta = (t.double() for t in (q, k, v, log_decay, beta))
    q, k = (t.repeat_interleave(repeat, -2) for t in (q, k))
    state = torch.zeros(*v.shape[1:-1], k.shape[-1], v.shape[-1], dtype=torch.float64, device=v.device)
    for t in range(v.shape[0]):
        state = state * decay[t].exp()[..., None, None]
        update = (v[t] - torch.einsum("...k,...ke->...e", k[t], state)) * beta[t][..., None]
        state = state + k[t][..., :, None] * update[..., None, :]
    return torch.einsum("...k,...ke->...e", q[-1], state) * scale


def fla_recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """flash-linear-attention's fused recurrence from `state` over operands [N, T, ...]: the last token's output. ImportError without it."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True)[0][:, -1]


def fla_chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """flash-linear-attention's chunked prefill of documents between `starts`; q and k with as many heads as v."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    operands = {"q": q[None], "k": k[None], "v": v[None], "g": log_decay[None], "beta": beta[None]}
    return chunk_gated_delta_rule(**operands, output_final_state=True, cu_seqlens=starts if len(starts) > 2 else None)[0][0]


def select(q: Tensor, weights: Tensor, past: Any, top_k: int) -> Tensor:
    """All scores at once, in no order."""
    if past.context is None:
        scores = torch.einsum("rh,rht->rt", weights, torch.einsum("rhe,te->rht", q, past.packed).relu())
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).topk(min(top_k, len(q)), -1).indices
    keys = past.pools[0][past.table.long()].flatten(1, 2)[:, : past.context]
    return torch.einsum("rh,rht->rt", weights, torch.einsum("rhe,rte->rht", q, keys).relu()).topk(top_k, -1).indices


def _flat(past: Any, lists: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """Token rows [T, C] side by side and where each list's lie among them, -1 behind the last."""
    if past.context is None:
        return past.packed, lists
    page = past.pools[i].shape[1]
    rows = past.table.gather(1, lists.clamp(min=0).long() // page) * page + lists % page
    return past.pools[i].flatten(0, 1), torch.where(lists < 0, lists, rows)


def flash_mla(q: Tensor, past: Any, lists: Tensor, values: int, scale: float, i: int) -> Tensor:
    """FlashMLA's sparse prefill, which serves decode too; lists in tokens of one long row of them."""
    from sgl_kernel.flash_mla import flash_mla_sparse_fwd

    latent, rows = _flat(past, lists, i)
    return flash_mla_sparse_fwd(q, latent[:, None], rows[:, None].to(torch.int32), scale, values)[0]


def sparse_attention(q: Tensor, past: Any, lists: Tensor, values: int, scale: float, i: int) -> Tensor:
    """Rows gathered, then two batched products, 64 queries at a time."""
    latent, rows = _flat(past, lists, i)
    out = []
    for mine, some in zip(q.split(64), rows.split(64)):
        chosen = latent[some.clamp(min=0).long()]
        scores = (torch.bmm(mine, chosen.transpose(1, 2)) * scale).masked_fill((some < 0)[:, None], -torch.inf)
        out.append(torch.bmm(scores.softmax(-1), chosen[..., :values]))
    return torch.cat(out)
