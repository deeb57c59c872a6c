"""The work of `benchmarks.ops`: each op's operands, rivals, row law and FP64 result at the published models' shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.work.cases import Place, Work, subset_law
from benchmarks.work.latent import biased_route, head_linear, layer_norm, select, sparse_attention
from benchmarks.work.products import combine, experts, linear, log_prob, packed_experts, route
from benchmarks.work.rowwise import norm_rope, rms_norm, rope, sample, swiglu
from benchmarks.work.sequences import attention, gated_delta

__all__ = ["OPS", "Place", "Work", "subset_law"]

OPS: dict[str, Callable[[Place, int], Iterator[Work]]] = {
    "linear": linear,
    "rms_norm": rms_norm,
    "norm_rope": norm_rope,
    "rope": rope,
    "swiglu": swiglu,
    "attention": attention,
    "experts": experts,
    "packed_experts": packed_experts,
    "route": route,
    "combine": combine,
    "log_prob": log_prob,
    "sample": sample,
    "gated_delta": gated_delta,
    "layer_norm": layer_norm,
    "head_linear": head_linear,
    "biased_route": biased_route,
    "select": select,
    "sparse_attention": sparse_attention,
}
