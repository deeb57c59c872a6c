"""Products and mixtures: linear, experts with their route and combine, and log_prob over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from benchmarks.common import sets_for
from benchmarks.work.cases import Call, Place, Work, subset_law
from benchmarks.work.shapes import BIASED, HEADS_OF_VOCABULARY, LINEARS, MIXTURES, PACKED_MIXTURES
from zoo.common import ops
from zoo.common.ops import CONTRACTS
from zoo.common.ops.e2m1 import dequantised, quantised
from zoo.common.ops.log_prob import VOCABULARY_CHUNK
from zoo.common.program import Program, split_k
from zoo.verify.qualify import Target


def _by(function: Callable[..., Tensor], x: Tensor, weights: list[Tensor], kind: torch.dtype, parts: int) -> Call:
    return lambda i: function(x, weights[i], kind, parts)


def linear(place: Place, rows: int) -> Iterator[Work]:
    for model, shapes in LINEARS.items():
        for name, (n, k, wide) in shapes.items():
            if (name == "head" and rows > 256) or (name == "head chunk" and rows <= 256):
                continue
            n = place.size(n, 96)
            k = place.size(k, 64)
            parts = split_k(n, k)
            kind = torch.float32 if wide else torch.bfloat16
            sets = sets_for(2 * n * k) if not place.tiny else 1
            weights = [place.randn(n, k, scale=k**-0.5) for _ in range(sets)]
            x = place.randn(rows, k)

            def run(x: Tensor, w: Tensor, kind: torch.dtype = kind, parts: int = parts) -> Tensor:
                return ops.linear(x, w, program=place.ours, out_dtype=kind, k_parts=parts)

            ours: dict[str, Call] = {"aligned": lambda i, x=x, w=weights, run=run: run(x, w[i])}
            others: dict[str, Call] = {}
            for provider in CONTRACTS["linear"].providers:
                if provider.device != place.device.type or not provider.installed() or not provider.serves(n, k, parts):
                    continue
                group = ours if provider.byte_class == place.ours.byte_class("linear") else others
                group[provider.name] = _by(provider.functions.forward, x, weights, kind, parts)
            yield Work(
                "linear",
                f"{model} {name} {n}x{k}" + (" fp32" if wide else ""),
                rows,
                ours,
                others,
                flops=2.0 * rows * n * k,
                nbytes=2.0 * n * k + 2.0 * rows * k + rows * n * kind.itemsize,
                law=subset_law(
                    lambda x=x, w=weights, run=run: run(x, w[0]),
                    lambda i, x=x, w=weights, run=run: run(x[i], w[0]),
                    rows,
                    place.device,
                ),
                exact=lambda x=x, w=weights: x[:64].double() @ w[0].double().T,
                picked=lambda out: out[:64],
                sets=sets,
                targets=(Target("linear", (n, k, parts)),),
            )


def experts(place: Place, rows: int) -> Iterator[Work]:
    for model, (count, hidden, intermediate, top_k) in MIXTURES.items():
        count, hidden, intermediate, top_k = (place.size(a, b) for a, b in zip((count, hidden, intermediate, top_k), (8, 64, 32, 2)))
        gate_up = place.randn(count, 2 * intermediate, hidden, scale=hidden**-0.5)
        down = place.randn(count, hidden, intermediate, scale=intermediate**-0.5)
        x = place.randn(rows, hidden)
        sets = 8  # other experts each time
        chosen = [torch.rand(rows, count, device=place.device).argsort(1)[:, :top_k].contiguous() for _ in range(sets)]
        touched = int(chosen[0].unique().numel())

        def run(x: Tensor, picks: Tensor, program: Program, w: tuple[Tensor, Tensor] = (gate_up, down)) -> Tensor:
            return ops.experts(x, picks, *w, program=program)

        def exact(x: Tensor = x, picks: Tensor = chosen[0], w: tuple[Tensor, Tensor] = (gate_up, down)) -> Tensor:
            gates = torch.einsum("rd,rkfd->rkf", x[:4].double(), w[0][picks[:4]].double())
            gate, up = gates.chunk(2, 2)
            return torch.einsum("rkf,rkdf->rkd", gate / (1 + (-gate).exp()) * up, w[1][picks[:4]].double())

        theirs = place.theirs
        yield Work(
            "experts",
            f"{model} {count}x{hidden}x{intermediate} top {top_k}",
            rows,
            {"aligned": lambda i, run=run, x=x, c=chosen: run(x, c[i], place.ours)},
            {} if theirs is None else {"torch._grouped_mm": lambda i, run=run, x=x, c=chosen, p=theirs: run(x, c[i], p)},
            flops=6.0 * rows * top_k * hidden * intermediate,
            nbytes=6.0 * touched * hidden * intermediate + 2.0 * rows * hidden * (1 + top_k),
            law=subset_law(
                lambda run=run, x=x, c=chosen: run(x, c[0], place.ours),
                lambda i, run=run, x=x, c=chosen: run(x[i], c[0][i], place.ours),
                rows,
                place.device,
            ),
            exact=exact,
            picked=lambda out: out[:4],
            sets=sets,
            targets=(Target("experts", (count, hidden, intermediate)),),
        )


def packed_experts(place: Place, rows: int) -> Iterator[Work]:
    """MXFP4, against the same experts in BF16: weights that are dequantised before, and not in the time."""
    for model, (count, hidden, intermediate, top_k, limit) in PACKED_MIXTURES.items():
        count, hidden, intermediate, top_k = (place.size(a, b) for a, b in zip((count, hidden, intermediate, top_k), (8, 64, 32, 2)))
        gate_up = quantised(place.randn(count, 2 * intermediate, hidden, scale=hidden**-0.5))
        down = quantised(place.randn(count, hidden, intermediate, scale=intermediate**-0.5))
        x = place.randn(rows, hidden)
        sets = 8  # other experts each time
        chosen = [torch.rand(rows, count, device=place.device).argsort(1)[:, :top_k].contiguous() for _ in range(sets)]
        touched = int(chosen[0].unique().numel())
        dense = tuple(dequantised(*pair, torch.bfloat16) for pair in (gate_up, down))

        def run(x: Tensor, picks: Tensor, w: tuple[Tensor, ...] = (*gate_up, *down), limit: float = limit) -> Tensor:
            return ops.packed_experts(x, picks, *w, program=place.ours, limit=limit)

        def rival(x: Tensor, picks: Tensor, program: Program, w: tuple[Tensor, ...] = dense, limit: float = limit) -> Tensor:
            return ops.experts(x, picks, w[0], w[1], program=program, limit=limit)

        def exact(x: Tensor = x, picks: Tensor = chosen[0], w: tuple[Tensor, ...] = dense, limit: float = limit) -> Tensor:
            gates = torch.einsum("rd,rkfd->rkf", x[:4].double(), w[0][picks[:4]].double())
            gate, up = gates.chunk(2, 2)
            gate = gate.clamp(max=limit)
            return torch.einsum("rkf,rkdf->rkd", gate / (1 + (-gate).exp()) * up.clamp(-limit, limit), w[1][picks[:4]].double())

        theirs = place.theirs
        others = {} if theirs is None else {"torch._grouped_mm in BF16": lambda i, f=rival, x=x, c=chosen, p=theirs: f(x, c[i], p)}
        yield Work(
            "packed_experts",
            f"{model} {count}x{hidden}x{intermediate} top {top_k}",
            rows,
            {"aligned": lambda i, run=run, x=x, c=chosen: run(x, c[i])},
            {"the experts op in BF16": lambda i, f=rival, x=x, c=chosen: f(x, c[i], place.ours), **others},
            flops=6.0 * rows * top_k * hidden * intermediate,
            nbytes=(3.0 / 2 + 3.0 / 32) * touched * hidden * intermediate + 2.0 * rows * hidden * (1 + top_k),
            law=subset_law(
                lambda run=run, x=x, c=chosen: run(x, c[0]),
                lambda i, run=run, x=x, c=chosen: run(x[i], c[0][i]),
                rows,
                place.device,
            ),
            exact=exact,
            picked=lambda out: out[:4],
            sets=sets,
            targets=(Target("packed_experts", (count, hidden, intermediate)),),
        )


def route(place: Place, rows: int) -> Iterator[Work]:
    for model, (count, _, _, top_k) in MIXTURES.items():
        if model in BIASED:
            continue
        logits = place.randn(rows, count, dtype=torch.float32, scale=2.0)

        def run(x: Tensor, k: int = top_k) -> Any:
            return ops.route(x, k, True, program=place.ours)

        yield Work(
            "route",
            f"{model} top {top_k} of {count}",
            rows,
            {"aligned": lambda i, run=run, x=logits: run(x)},
            {
                "compiled": lambda i, a=(logits, top_k): rivals.compiled(rivals.route)(*a),
                "torch": lambda i, a=(logits, top_k): rivals.route(*a),
            },
            flops=0.0,
            nbytes=4.0 * logits.numel(),
            law=subset_law(lambda run=run, x=logits: run(x), lambda i, run=run, x=logits: run(x[i]), rows, place.device),
            exact=lambda a=(logits, top_k): rivals.route(a[0].double(), a[1])[0],
        )


def combine(place: Place, rows: int) -> Iterator[Work]:
    for model, (count, hidden, _, top_k) in MIXTURES.items():
        hidden = place.size(hidden, 64)
        slots = place.randn(rows, top_k, hidden)
        weights = torch.softmax(place.randn(rows, top_k, dtype=torch.float32), 1)
        chosen = torch.rand(rows, count, device=place.device).argsort(1)[:, :top_k].contiguous()

        program = replace(place.ours, contributors=16) if model in BIASED else place.ours

        def run(s: Tensor, w: Tensor, c: Tensor, count: int = count, program: Program = program) -> Tensor:
            return ops.combine(s, w, c, count, program=program)

        whole = (slots, weights, chosen)
        yield Work(
            "combine",
            f"{model} {top_k} of {hidden}",
            rows,
            {"aligned": lambda i, run=run, a=whole: run(*a)},
            {"compiled": lambda i, a=(slots, weights): rivals.compiled(rivals.combine)(*a)},
            flops=0.0,
            nbytes=2.0 * rows * hidden * (top_k + 1),
            law=subset_law(lambda run=run, a=whole: run(*a), lambda i, run=run, a=whole: run(*(t[i] for t in a)), rows, place.device),
            exact=lambda a=whole: (a[0].double() * a[1].double()[..., None]).sum(1),
        )


def log_prob(place: Place, rows: int) -> Iterator[Work]:
    for model, (vocabulary, hidden) in HEADS_OF_VOCABULARY.items():
        vocabulary = place.size(vocabulary, 512)
        hidden = place.size(hidden, 64)
        x = place.randn(rows, hidden)
        w = place.randn(vocabulary, hidden, scale=2.5 * hidden**-0.5)
        targets = place.below(vocabulary, rows)

        def run(x: Tensor, t: Tensor, w: Tensor = w) -> Tensor:
            return ops.log_prob(x, w, t, program=place.ours).log_prob_R

        shapes = {vocabulary, min(vocabulary, VOCABULARY_CHUNK), vocabulary % VOCABULARY_CHUNK or VOCABULARY_CHUNK}
        yield Work(
            "log_prob",
            f"{model} {vocabulary}x{hidden}",
            rows,
            {"aligned": lambda i, run=run, a=(x, targets): run(*a)},
            {
                "torch": lambda i, a=(x, w, targets): rivals.log_prob(*a),
                "compiled cross entropy": lambda i, a=(x, w, targets): rivals.log_prob_compiled(*a),
            },
            flops=2.0 * rows * vocabulary * hidden,
            nbytes=2.0 * vocabulary * hidden,
            law=subset_law(
                lambda run=run, a=(x, targets): run(*a),
                lambda i, run=run, a=(x, targets): run(a[0][i], a[1][i]),
                rows,
                place.device,
            ),
            exact=lambda a=(x, w, targets): torch.log_softmax(a[0][:4].double() @ a[1].double().T, 1).gather(1, a[2][:4, None])[:, 0],
            picked=lambda out: out[:4],
            targets=tuple(Target("linear", (n, hidden, 1)) for n in shapes),
        )
