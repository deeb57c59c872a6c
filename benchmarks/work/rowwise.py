"""What a row needs nothing else for: norms, rotations, activations and the draw of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from benchmarks.work.cases import Place, Work, subset_law
from benchmarks.work.shapes import HEADS, INTERMEDIATES, PREFILL, WIDTHS
from zoo.common import ops
from zoo.common.rollouts import SamplingParams
from zoo.common.row_sampling import RowSampling

EPS = 1e-6


def rms_norm(place: Place, rows: int) -> Iterator[Work]:
    for model, width in WIDTHS.items():
        width = place.size(width, 64)
        x = place.randn(rows, width)
        residual = place.randn(rows, width, scale=3.0)
        weight = 1 + place.randn(width, scale=0.1)

        def run(x: Tensor, r: Tensor, w: Tensor = weight) -> Any:
            return ops.add_rms_norm(x, r, w, EPS, program=place.ours)

        def exact(x: Tensor = x, r: Tensor = residual, w: Tensor = weight) -> Tensor:
            total = (x + r).double()
            return total * (total.square().mean(1, keepdim=True) + EPS).rsqrt() * w.double()

        yield Work(
            "rms_norm",
            f"{model} add, {width}",
            rows,
            {"aligned": lambda i, run=run, x=x, r=residual: run(x, r)},
            {
                "compiled": lambda i, a=(x, residual, weight, EPS): rivals.compiled(rivals.add_rms_norm)(*a),
                "compiled F.rms_norm": lambda i, a=(x, residual, weight, EPS): rivals.compiled(rivals.add_rms_norm_torch)(*a),
                "triton sum": lambda i, a=(x, residual, weight, EPS): rivals.add_rms_norm_triton(*a),
            },
            flops=0.0,
            nbytes=8.0 * rows * width,
            law=subset_law(
                lambda run=run, x=x, r=residual: run(x, r),
                lambda i, run=run, x=x, r=residual: run(x[i], r[i]),
                rows,
                place.device,
            ),
            exact=exact,
        )


def norm_rope(place: Place, rows: int) -> Iterator[Work]:
    for model, (heads, kv_heads, width) in HEADS.items():
        if width != 128 or place.tiny:
            continue  # heads of 256 rotate a quarter of their columns
        qkv = place.randn(rows, (heads + 2 * kv_heads) * width)
        positions = place.below(4096, rows)
        weights = [1 + place.randn(width, scale=0.1) for _ in range(2)]
        turn = ops.rope_table(4096, width, 1e6).to(place.device)
        sizes = {"heads": heads, "kv_heads": kv_heads, "eps": EPS}

        def run(qkv: Tensor, at: Tensor, w: list[Tensor] = weights, turn: Tensor = turn, sizes: dict[str, Any] = sizes) -> Any:
            return ops.norm_rope(qkv, *w, turn, at, program=place.ours, **sizes)

        yield Work(
            "norm_rope",
            f"{model} {heads}+{kv_heads} heads of {width}",
            rows,
            {"aligned": lambda i, run=run, a=(qkv, positions): run(*a)},
            {"compiled": lambda i, a=(qkv, *weights, turn, positions, heads, kv_heads, EPS): rivals.compiled(rivals.norm_rope)(*a)},
            flops=0.0,
            nbytes=4.0 * rows * (heads + kv_heads) * width,
            law=subset_law(
                lambda run=run, a=(qkv, positions): run(*a),
                lambda i, run=run, a=(qkv, positions): run(a[0][i], a[1][i]),
                rows,
                place.device,
            ),
            exact=lambda a=(qkv, weights, turn, positions), s=(heads, kv_heads): rivals.norm_rope(
                a[0].double(), a[1][0].double(), a[1][1].double(), a[2].double(), a[3], *s, EPS
            )[0],
        )


def rope(place: Place, rows: int) -> Iterator[Work]:
    """Heads of 128 in halves, and GLM-5's of 64 in pairs of neighbours, the trailing columns of a wider head."""
    for model, heads, width, neighbours in (("", 40, 128, False), ("glm-5.2 ", 64, 64, True)):
        whole = place.randn(rows, place.size(heads, 2), 256 if neighbours else width)
        positions = place.below(4096, rows)
        x = whole[..., whole.shape[2] - width :]
        turn = ops.rope_table(4096, width, 1e6).to(place.device)

        def run(x: Tensor, at: Tensor, turn: Tensor = turn, neighbours: bool = neighbours) -> Tensor:
            return ops.rope(x, turn, at, program=place.ours, neighbours=neighbours)

        plain = rivals.rope_of_neighbours if neighbours else rivals.rope
        yield Work(
            "rope",
            f"{model}{x.shape[1]} heads of {width}" + (" in neighbours" if neighbours else ""),
            rows,
            {"aligned": lambda i, run=run, x=x, at=positions: run(x, at)},
            {"compiled": lambda i, plain=plain, a=(x, turn, positions): rivals.compiled(plain)(*a)},
            flops=0.0,
            nbytes=4.0 * x.numel(),
            law=subset_law(
                lambda run=run, a=(x, positions): run(*a), lambda i, run=run, a=(x, positions): run(a[0][i], a[1][i]), rows, place.device
            ),
            exact=lambda plain=plain, a=(x, turn, positions): plain(a[0].double(), a[1].double(), a[2]),
        )


def swiglu(place: Place, rows: int) -> Iterator[Work]:
    for model, intermediate in INTERMEDIATES.items():
        x = place.randn(rows, 2 * place.size(intermediate, 64))

        def run(x: Tensor) -> Tensor:
            return ops.swiglu(x, program=place.ours)

        def exact(x: Tensor = x) -> Tensor:
            gate, up = x.double().chunk(2, 1)
            return gate / (1 + (-gate).exp()) * up

        yield Work(
            "swiglu",
            f"{model} {x.shape[1]}",
            rows,
            {"aligned": lambda i, x=x: run(x)},
            {"compiled": lambda i, x=x: rivals.compiled(rivals.swiglu)(x)},
            flops=0.0,
            nbytes=3.0 * x.numel(),
            law=subset_law(lambda x=x: run(x), lambda i, x=x: run(x[i]), rows, place.device),
            exact=exact,
        )


def sample(place: Place, rows: int) -> Iterator[Work]:
    """No float64 result: a draw is a token, and each contender has noise of its own."""
    if rows >= PREFILL:
        return
    logits = place.randn(rows, place.size(151936, 512), dtype=torch.float32, scale=2.5)
    noise = torch.empty_like(logits)
    for name, params in (
        ("plain", SamplingParams()),
        ("top-k 20, top-p 0.95", SamplingParams(temperature=0.7, top_k=20, top_p=0.95)),
    ):
        drawn = RowSampling.of([replace(params, seed=r) for r in range(rows)], list(range(rows)), place.device)
        ordinary = {
            "multinomial": lambda i: rivals.multinomial(logits),
            "compiled gumbel": lambda i: rivals.compiled(rivals.gumbel)(logits, noise),
        }
        yield Work(
            "sample",
            f"{logits.shape[1]} {name}",
            rows,
            {"aligned": lambda i, d=drawn: ops.sample(logits, d, place.ours)},
            ordinary if name == "plain" else {},
            flops=0.0,
            nbytes=4.0 * logits.numel(),
            law=subset_law(
                lambda d=drawn: tuple(ops.sample(logits, d, place.ours)),
                lambda i, d=drawn: tuple(ops.sample(logits[i], d[i], place.ours)),
                rows,
                place.device,
            ),
        )
