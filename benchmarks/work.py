"""The work of `benchmarks.ops`: each op's operands, rivals, row law and FP64 result at the published models' shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from benchmarks.common import sets_for
from zoo.common import ops
from zoo.common.delta_memory import CHUNK, DeltaMemory
from zoo.common.memory import KeyValues, PagedMemory
from zoo.common.ops import CONTRACTS
from zoo.common.ops.log_prob import VOCABULARY_CHUNK
from zoo.common.program import Program, narrow_parts
from zoo.common.rows import Rows
from zoo.common.sampling import RowSampling, SamplingParams
from zoo.testing import assert_same_bytes
from zoo.verify.qualify import Target

PREFILL = 257  # rows from which attention and gated_delta mean one long document, not one row of each sequence
EPS = 1e-6
Call = Callable[[int], Any]

# per model: name -> (N, K, FP32 out)
LINEARS = {
    "qwen3-8b": {
        "qkv": (6144, 4096, False), "o": (4096, 4096, False), "gate_up": (24576, 4096, False), "down": (4096, 12288, False),
        "head": (151936, 4096, True), "head chunk": (16384, 4096, True),
    },
    "qwen3-30b-a3b": {"qkv": (5120, 2048, False), "o": (2048, 4096, False), "router": (128, 2048, True)},
    "qwen3.5-35b-a3b": {
        "qkvzba": (12352, 2048, False), "qkv": (9216, 2048, False), "out": (2048, 4096, False),
        "shared gate_up": (1024, 2048, False),
        "shared down": (2048, 512, False), "router": (256, 2048, True), "shared gate": (1, 2048, True),
    },
    "qwen3.5-4b": {"qkvzba": (12352, 2560, False), "gate_up": (18432, 2560, False), "down": (2560, 9216, False)},
}  # fmt: skip
WIDTHS = {"qwen3-8b": 4096, "qwen3-30b-a3b": 2048, "qwen3.5-4b": 2560}
HEADS = {"qwen3-8b": (32, 8, 128), "qwen3-30b-a3b": (32, 4, 128), "qwen3.5-35b-a3b": (16, 2, 256)}
INNER = {"qwen3-8b": 12288, "qwen3.5-4b": 9216}
# X, D, F, K
MIXTURES = {"qwen3-30b-a3b": (128, 2048, 768, 8), "qwen3.5-35b-a3b": (256, 2048, 512, 8)}
HEADS_OF_VOCABULARY = {"qwen3-8b": (151936, 4096), "qwen3-30b-a3b": (151936, 2048)}
DELTA = {"qwen3.5-35b-a3b": (16, 32, 128, 128)}
CONTEXTS = (600, 4096)


@dataclass
class Work:
    """One op at one shape and row count. Calls take the number of a set of rotated operands.

    ours    the op as the program runs it first, then named providers of its class
    law     raises LawBroken if a subset of rows gives other bytes
    exact   float64 result for `picked` of an output, None where there is none
    """

    op: str
    shape: str
    rows: int
    ours: dict[str, Call]
    rivals: dict[str, Call]
    flops: float
    nbytes: float
    law: Callable[[], None]
    exact: Callable[[], Tensor] | None = None
    picked: Callable[[Any], Tensor] = lambda out: out[0] if isinstance(out, tuple) else out
    sets: int = 1
    eager: bool = False
    targets: tuple[Target, ...] = field(default=())


@dataclass(frozen=True)
class Place:
    """Where and by which programs. `tiny`: smoke runs, whose shapes `size` caps."""

    device: torch.device
    ours: Program
    theirs: Program | None
    contexts: tuple[int, ...] = CONTEXTS
    tiny: bool = False

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype) * scale

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device)

    def size(self, full: int, tiny: int) -> int:
        return min(full, tiny) if self.tiny else full


def subset_law(whole: Callable[[], Any], part: Callable[[Tensor], Any], rows: int, device: torch.device) -> Callable[[], None]:
    """Row law in a hurry: one row, seven and (of many) 64 rows from all over the batch give the bytes that they have in it.

    A batch of fewer than 64 rows is also put, row for row, into one that repeats it up to 129 rows: never a call against itself.
    """

    def law() -> None:
        full = whole()
        for count in (1, 7, 64):
            if count < rows:
                index = torch.randperm(rows, generator=torch.Generator().manual_seed(count))[:count].to(device)
                assert_same_bytes(part(index), _taken(full, index), f"row law, {count} of {rows} rows")
        if rows < 64:
            index = (torch.arange(129) % rows).to(device)
            assert_same_bytes(part(index), _taken(full, index), f"row law, {rows} rows inside 129")

    return law


def _taken(value: Any, index: Tensor) -> Any:
    return tuple(_taken(v, index) for v in value) if isinstance(value, tuple) else value.index_select(0, index)


def _by(function: Callable[..., Tensor], x: Tensor, weights: list[Tensor], kind: torch.dtype, parts: int) -> Call:
    return lambda i: function(x, weights[i], kind, parts)


def linear(place: Place, rows: int) -> Iterator[Work]:
    for model, shapes in LINEARS.items():
        for name, (n, k, wide) in shapes.items():
            if (name == "head" and rows > 256) or (name == "head chunk" and rows <= 256):
                continue
            n, k = place.size(n, 96), place.size(k, 64)
            parts = narrow_parts(n, k)
            kind = torch.float32 if wide else torch.bfloat16
            sets = sets_for(2 * n * k) if not place.tiny else 1
            weights, x = [place.randn(n, k, scale=k**-0.5) for _ in range(sets)], place.randn(rows, k)

            def run(x: Tensor, w: Tensor, kind: torch.dtype = kind, parts: int = parts) -> Tensor:
                return ops.linear(x, w, program=place.ours, out_dtype=kind, k_parts=parts)

            ours: dict[str, Call] = {"aligned": lambda i, x=x, w=weights, run=run: run(x, w[i])}
            others: dict[str, Call] = {}
            for provider in CONTRACTS["linear"].providers:
                if provider.device != place.device.type or not provider.installed() or not provider.serves(n, k, parts):
                    continue
                group = ours if provider.byte_class == place.ours.byte_class("linear") else others
                group[provider.name] = _by(provider.function("forward"), x, weights, kind, parts)
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


def rms_norm(place: Place, rows: int) -> Iterator[Work]:
    for model, width in WIDTHS.items():
        width = place.size(width, 64)
        x, residual, weight = place.randn(rows, width), place.randn(rows, width, scale=3.0), 1 + place.randn(width, scale=0.1)

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
        qkv, positions = place.randn(rows, (heads + 2 * kv_heads) * width), place.below(4096, rows)
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
    x, positions, turn = (
        place.randn(rows, place.size(40, 2), 128),
        place.below(4096, rows),
        ops.rope_table(4096, 128, 1e6).to(place.device),
    )

    def run(x: Tensor, at: Tensor) -> Tensor:
        return ops.rope(x, turn, at, program=place.ours)

    yield Work(
        "rope",
        f"{x.shape[1]} heads of 128",
        rows,
        {"aligned": lambda i: run(x, positions)},
        {"compiled": lambda i: rivals.compiled(rivals.rope)(x, turn, positions)},
        flops=0.0,
        nbytes=4.0 * x.numel(),
        law=subset_law(lambda: run(x, positions), lambda i: run(x[i], positions[i]), rows, place.device),
    )


def swiglu(place: Place, rows: int) -> Iterator[Work]:
    for model, inner in INNER.items():
        x = place.randn(rows, 2 * place.size(inner, 64))

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


def attention(place: Place, rows: int) -> Iterator[Work]:
    for model, (heads, groups, width) in HEADS.items():
        if place.tiny:
            heads, groups, width = 4, 2, 16
        if rows >= PREFILL:
            yield _prefill_attention(place, model, heads, groups, width, rows)
            continue
        for context in place.contexts:
            yield _decode_attention(place, model, heads, groups, width, rows, context)


def _decode_attention(place: Place, model: str, heads: int, groups: int, width: int, rows: int, context: int) -> Work:
    page = 80 if width > 128 else 128
    pages = -(-context // page)
    sets = 1 if place.tiny else min(16, sets_for(4 * rows * context * groups * width))
    memory = PagedMemory(sets, rows * pages + 1, page, groups, width, torch.bfloat16, place.device)
    for pool in (memory.k_LPSGE, memory.v_LPSGE):
        pool.normal_()
    q, scale = place.randn(rows, heads, width), width**-0.5
    page_table = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=place.device).view(rows, pages)
    at = Rows.pushed([1] * rows, [context - 1] * rows, place.device)

    def run(i: int, program: Program, index: Tensor | None = None) -> Tensor:
        mine, some, pages_NB = q, at, page_table
        if index is not None:
            mine, pages_NB = q[index], page_table[index]
            some = Rows.pushed([1] * len(index), [context - 1] * len(index), place.device)
        return ops.attention(mine, KeyValues(memory.k_LPSGE[i], memory.v_LPSGE[i], pages_NB), some, scale, program=program)

    def contiguous(pool: Tensor, i: int, count: int = rows) -> Tensor:
        return pool[i, 1:].view(rows, pages * page, groups, width)[:count, :context].transpose(1, 2)

    def sdpa(i: int) -> Tensor:
        keys, values = (contiguous(pool, i) for pool in (memory.k_LPSGE, memory.v_LPSGE))
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]

    def exact() -> Tensor:
        keys, values = (contiguous(pool, 0, 4).double().repeat_interleave(heads // groups, 1) for pool in (memory.k_LPSGE, memory.v_LPSGE))
        scores = (q[:4, :, None].double() @ keys.transpose(2, 3)) * scale
        return (torch.softmax(scores, -1) @ values)[:, :, 0]

    theirs = place.theirs
    return Work(
        "attention",
        f"{model} {heads}/{groups}x{width} decode at {context}",
        rows,
        {"aligned": lambda i: run(i, place.ours)},
        {**({} if theirs is None else {"split-KV": lambda i: run(i, theirs)}), "SDPA": sdpa},
        flops=4.0 * rows * context * heads * width,
        nbytes=4.0 * rows * context * groups * width,
        law=subset_law(lambda: run(0, place.ours), lambda index: run(0, place.ours, index), rows, place.device),
        exact=exact,
        picked=lambda out: out[:4],
        sets=sets,
    )


def _prefill_attention(place: Place, model: str, heads: int, groups: int, width: int, rows: int) -> Work:
    q, k, v = (place.randn(rows, count, width) for count in (heads, groups, groups))
    scale = width**-0.5

    def run(program: Program, length: int = rows) -> Tensor:
        at = whole if length == rows else Rows.packed(torch.tensor([0, length], device=place.device))
        return ops.attention(q[:length], KeyValues(k[:length], v[:length]), at, scale, program=program)

    whole = Rows.packed(torch.tensor([0, rows], device=place.device))

    def sdpa() -> Tensor:
        each = (t.transpose(0, 1)[None] for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    def law() -> None:
        for length in (1, 129, rows - 1):
            assert_same_bytes(run(place.ours, length), run(place.ours)[:length], f"row law, the first {length} of {rows} rows")

    def exact() -> Tensor:
        keys, values = (t.double().repeat_interleave(heads // groups, 1) for t in (k, v))
        scores = torch.softmax(torch.einsum("he,the->ht", q[-1].double(), keys) * scale, -1)
        return torch.einsum("ht,the->he", scores, values)

    theirs = place.theirs
    return Work(
        "attention",
        f"{model} {heads}/{groups}x{width} prefill",
        rows,
        {"aligned": lambda i: run(place.ours)},
        {**({} if theirs is None else {"FA4 in one pass": lambda i: run(theirs)}), "SDPA": lambda i: sdpa()},
        flops=2.0 * rows * rows * heads * width,
        nbytes=4.0 * rows * (heads + groups) * width,
        law=law,
        exact=exact,
        picked=lambda out: out[-1],
        eager=True,
    )


def experts(place: Place, rows: int) -> Iterator[Work]:
    for model, (count, hidden, inner, top_k) in MIXTURES.items():
        count, hidden, inner, top_k = (place.size(a, b) for a, b in zip((count, hidden, inner, top_k), (8, 64, 32, 2)))
        gate_up, down = (
            place.randn(count, 2 * inner, hidden, scale=hidden**-0.5),
            place.randn(count, hidden, inner, scale=inner**-0.5),
        )
        x, sets = place.randn(rows, hidden), 8  # other experts each time
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
            f"{model} {count}x{hidden}x{inner} top {top_k}",
            rows,
            {"aligned": lambda i, run=run, x=x, c=chosen: run(x, c[i], place.ours)},
            {} if theirs is None else {"torch._grouped_mm": lambda i, run=run, x=x, c=chosen, p=theirs: run(x, c[i], p)},
            flops=6.0 * rows * top_k * hidden * inner,
            nbytes=6.0 * touched * hidden * inner + 2.0 * rows * hidden * (1 + top_k),
            law=subset_law(
                lambda run=run, x=x, c=chosen: run(x, c[0], place.ours),
                lambda i, run=run, x=x, c=chosen: run(x[i], c[0][i], place.ours),
                rows,
                place.device,
            ),
            exact=exact,
            picked=lambda out: out[:4],
            sets=sets,
            targets=(Target("experts", (count, hidden, inner)),),
        )


def route(place: Place, rows: int) -> Iterator[Work]:
    for model, (count, _, _, top_k) in MIXTURES.items():
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
        slots, weights = place.randn(rows, top_k, hidden), torch.softmax(place.randn(rows, top_k, dtype=torch.float32), 1)
        chosen = torch.rand(rows, count, device=place.device).argsort(1)[:, :top_k].contiguous()

        def run(s: Tensor, w: Tensor, c: Tensor, count: int = count) -> Tensor:
            return ops.combine(s, w, c, count, program=place.ours)

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
        vocabulary, hidden = place.size(vocabulary, 512), place.size(hidden, 64)
        x, w, targets = (
            place.randn(rows, hidden),
            place.randn(vocabulary, hidden, scale=2.5 * hidden**-0.5),
            place.below(vocabulary, rows),
        )

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


def sample(place: Place, rows: int) -> Iterator[Work]:
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


def gated_delta(place: Place, rows: int) -> Iterator[Work]:
    for model, (key_heads, value_heads, key_dim, value_dim) in DELTA.items():
        if place.tiny:
            key_heads, value_heads, key_dim, value_dim = 1, 2, 16, 16
        q, k = (torch.nn.functional.normalize(place.randn(rows, key_heads, key_dim), dim=-1) for _ in range(2))
        v, decay = place.randn(rows, value_heads, value_dim), -0.05 * place.randn(rows, value_heads, dtype=torch.float32).exp()
        operands = (q, k, v, decay, torch.sigmoid(place.randn(rows, value_heads, dtype=torch.float32)))
        name = f"{model} {key_heads}/{value_heads} heads of {key_dim}"
        flops, state_bytes = 4.0 * rows * value_heads * key_dim * value_dim, 4.0 * rows * value_heads * key_dim * value_dim
        if rows >= PREFILL:
            yield _prefill_delta(place, name, operands, flops)
            continue
        memory = DeltaMemory(1, rows + 1, key_heads, value_heads, key_dim, value_dim, 8, torch.bfloat16, place.device)
        layer = memory.view(torch.arange(1, rows + 1, device=place.device))[0].state
        # every position of one chunk, in order: the closing of the chunk is in the mean
        steps = [Rows.pushed([1] * rows, [CHUNK + j] * rows, place.device) for j in range(CHUNK)]
        state = torch.zeros(rows, value_heads, key_dim, value_dim, device=place.device)

        def run(i: int, a: tuple[Tensor, ...] = operands, layer: Any = layer, steps: list[Rows] = steps) -> Tensor:
            return ops.gated_delta(*a, layer, steps[i], program=place.ours)

        def law(
            a: tuple[Tensor, ...] = operands, keys: tuple[int, ...] = (key_heads, value_heads, key_dim, value_dim), n: int = rows
        ) -> None:
            outs = []
            many = torch.arange(max(n, 65)) % n  # the last of fewer than 65 is a sequence again, beside others of its kind
            for index in (many, many[-1:]):
                fresh = DeltaMemory(1, len(index) + 1, *keys, 8, torch.bfloat16, place.device)
                view = fresh.view(torch.arange(1, len(index) + 1, device=place.device))[0].state
                mine = tuple(t[index.to(place.device)] for t in a)
                outs.append(
                    [
                        ops.gated_delta(*mine, view, Rows.pushed([1] * len(index), [j] * len(index), place.device), program=place.ours)[-1:]
                        for j in range(CHUNK + 1)
                    ]
                )
            assert_same_bytes(outs[0], outs[1], f"row law, the last of {len(many)} sequences over a chunk")

        yield Work(
            "gated_delta",
            f"{name} decode",
            rows,
            {"aligned": run},
            {
                "fla recurrent": lambda i, a=operands, s=state: rivals.fla_recurrent(*a, s),
                "triton recurrent": lambda i, a=operands, s=state: rivals.recurrent_step(*a, s),
            },
            flops=flops,
            nbytes=2 * state_bytes,
            law=law,
            sets=CHUNK,
        )


def _prefill_delta(place: Place, name: str, operands: tuple[Tensor, ...], flops: float) -> Work:
    rows, repeat = operands[0].shape[0], operands[2].shape[1] // operands[0].shape[1]
    wide = tuple(t.repeat_interleave(repeat, 1) for t in operands[:2])
    whole = Rows.packed(torch.tensor([0, rows], device=place.device))

    def law() -> None:
        full = ops.gated_delta(*operands, None, whole, program=place.ours)
        for length in (1, 129, rows - 1):
            short = Rows.packed(torch.tensor([0, length], device=place.device))
            part = ops.gated_delta(*(t[:length] for t in operands), None, short, program=place.ours)
            assert_same_bytes(part, full[:length], f"row law, the first {length} of {rows} rows")

    return Work(
        "gated_delta",
        f"{name} prefill",
        rows,
        {"aligned": lambda i: ops.gated_delta(*operands, None, whole, program=place.ours)},
        {"fla chunk": lambda i: rivals.fla_chunk(*wide, *operands[2:])},
        flops=flops,
        nbytes=float(sum(t.nbytes for t in operands)),
        law=law,
        eager=True,
    )


OPS: dict[str, Callable[[Place, int], Iterator[Work]]] = {
    "linear": linear, "rms_norm": rms_norm, "norm_rope": norm_rope, "rope": rope, "swiglu": swiglu, "attention": attention,
    "experts": experts, "route": route, "combine": combine, "log_prob": log_prob, "sample": sample, "gated_delta": gated_delta,
}  # fmt: skip
