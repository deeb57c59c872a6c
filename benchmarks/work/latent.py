"""GLM-5's own ops: the index's norm, choice of tokens, attention over them, the products of heads, and routing by biased scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from benchmarks.common import sets_for
from benchmarks.work.cases import Place, Work, subset_law
from benchmarks.work.shapes import BIASED, HEAD_LINEARS, INDEX, LATENT, MIXTURES, PREFILL
from zoo.common import ops
from zoo.common.history import TokenRows
from zoo.common.rows import Rows
from zoo.testing import assert_same_bytes

EPS = 1e-6
PAGE = 64


def layer_norm(place: Place, rows: int) -> Iterator[Work]:
    for model, (heads, width, _) in INDEX.items():
        # leading columns of one product's rows, as the model has them
        x = place.randn(rows, width + heads)[:, :width]
        weight = 1 + place.randn(width, scale=0.1)
        bias = place.randn(width, scale=0.3)

        def run(x: Tensor, w: Tensor = weight, b: Tensor = bias) -> Tensor:
            return ops.layer_norm(x, w, b, EPS, program=place.ours)

        yield Work(
            "layer_norm",
            f"{model} index keys, {width}",
            rows,
            {"aligned": lambda i, run=run, x=x: run(x)},
            {"compiled": lambda i, a=(x, weight, bias, EPS): rivals.compiled(rivals.layer_norm)(*a)},
            flops=0.0,
            nbytes=4.0 * rows * width,
            law=subset_law(lambda run=run, x=x: run(x), lambda i, run=run, x=x: run(x[i]), rows, place.device),
            exact=lambda a=(x, weight, bias): rivals.layer_norm(*(t.double() for t in a), EPS),
        )


def head_linear(place: Place, rows: int) -> Iterator[Work]:
    for model, shapes in HEAD_LINEARS.items():
        for name, (heads, columns, depth) in shapes.items():
            heads, columns, depth = (place.size(a, b) for a, b in zip((heads, columns, depth), (2, 48, 32)))
            sets = sets_for(2 * heads * columns * depth) if not place.tiny else 1
            x = place.randn(rows, heads, depth)
            up = columns > depth
            # keys are read transposed where they lie
            weights = [place.randn(heads, *((depth, columns) if up else (columns, depth)), scale=depth**-0.5) for _ in range(sets)]
            weights = [w.transpose(1, 2) if up else w for w in weights]

            def run(x: Tensor, w: Tensor) -> Tensor:
                return ops.head_linear(x, w, program=place.ours)

            yield Work(
                "head_linear",
                f"{model} {name} {heads}x{columns}x{depth}",
                rows,
                {"aligned": lambda i, run=run, x=x, w=weights: run(x, w[i])},
                {"torch.bmm": lambda i, x=x, w=weights: torch.bmm(x.transpose(0, 1), w[i].transpose(1, 2)).transpose(0, 1)},
                flops=2.0 * rows * heads * columns * depth,
                nbytes=2.0 * heads * (columns * depth + rows * (columns + depth)),
                law=subset_law(
                    lambda run=run, x=x, w=weights: run(x, w[0]), lambda i, run=run, x=x, w=weights: run(x[i], w[0]), rows, place.device
                ),
                exact=lambda x=x, w=weights: torch.einsum("rhk,hnk->rhn", x[:64].double(), w[0].double()),
                picked=lambda out: out[:64],
                sets=sets,
            )


def biased_route(place: Place, rows: int) -> Iterator[Work]:
    for model, choice in BIASED.items():
        count = MIXTURES[model][0]
        logits, bias = (place.randn(*shape, dtype=torch.float32, scale=s) for shape, s in (((rows, count), 2.0), ((count,), 0.1)))

        def run(x: Tensor, b: Tensor = bias, c: Any = choice) -> Any:
            return ops.biased_route(x, b, c, program=place.ours)

        plain = (logits, bias, choice.top_k, choice.scale)
        yield Work(
            "biased_route",
            f"{model} top {choice.top_k} of {count}",
            rows,
            {"aligned": lambda i, run=run, x=logits: run(x)},
            {"compiled": lambda i, a=plain: rivals.compiled(rivals.biased_route)(*a), "torch": lambda i, a=plain: rivals.biased_route(*a)},
            flops=0.0,
            nbytes=4.0 * logits.numel(),
            law=subset_law(lambda run=run, x=logits: run(x), lambda i, run=run, x=logits: run(x[i]), rows, place.device),
            exact=lambda a=plain: rivals.biased_route(a[0].double(), a[1].double(), *a[2:])[0],
        )


class Past:
    """Token rows of a width behind `rows` queries: one long document, or a sequence of `context` tokens each, in pages.

    law(run)   `run(rows' indices or None, set)` gives a subset's bytes
    first(n)   the document's first n rows
    """

    def __init__(self, place: Place, rows: int, width: int, context: int | None) -> None:
        self.place = place
        self.rows = rows
        self.context = context
        self.length = rows if context is None else context
        self.sets = 1
        if context is None:
            self.packed = place.randn(rows, width)
            return
        pages = -(-context // PAGE)
        self.sets = 1 if place.tiny else min(16, sets_for(2 * rows * context * width))
        self.pools = [place.randn(rows * pages + 1, PAGE, width) for _ in range(self.sets)]
        self.table = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=place.device).view(rows, pages)

    def at(self, index: Tensor | None, i: int) -> tuple[TokenRows, Rows]:
        if self.context is None:
            count = self.rows if index is None else len(index)
            return TokenRows(self.packed[:count]), Rows.packed(torch.tensor([0, count], device=self.place.device))
        table = self.table if index is None else self.table[index]
        return TokenRows(self.pools[i], table), Rows.pushed([1] * len(table), [self.context - 1] * len(table), self.place.device)

    def of(self, n: int) -> Tensor:
        """The token rows that query n may read, of the first set."""
        return self.packed[: n + 1] if self.context is None else self.pools[0][self.table[n].long()].flatten(0, 1)[: self.context]

    def law(self, run: Callable[[Tensor | None, int], Tensor]) -> Callable[[], None]:
        if self.context is not None:
            return subset_law(lambda: run(None, 0), lambda index: run(index, 0), self.rows, self.place.device)

        def first() -> None:
            for count in (1, min(129, self.rows), self.rows - 1):
                index = torch.arange(count, device=self.place.device)
                assert_same_bytes(run(index, 0), run(None, 0)[:count], f"row law, the first {count} of {self.rows} rows")

        return first


def _pasts(place: Place, rows: int, width: int, least: int) -> Iterator[tuple[str, Past]]:
    """Prefill of one document, or decode at each context beyond `least`."""
    if rows >= PREFILL:
        yield "prefill", Past(place, rows, width, None)
        return
    for context in place.contexts:
        if context > least:
            yield f"decode at {context}", Past(place, rows, width, context)


def select(place: Place, rows: int) -> Iterator[Work]:
    """No float64 result: a choice is integers."""
    for model, sizes in INDEX.items():
        heads, width, top_k = (place.size(a, b) for a, b in zip(sizes, (2, 16, 8)))
        q = place.randn(rows, heads, width)
        weights = place.randn(rows, heads)
        for name, past in _pasts(place, rows, width, top_k):

            def run(index: Tensor | None, i: int, past: Past = past, q: Tensor = q, w: Tensor = weights, k: int = top_k) -> Tensor:
                some = slice(None) if index is None else index
                return ops.select(q[some], w[some], *past.at(index, i), k, program=place.ours)

            seen = rows * past.length / (2 if past.context is None else 1)
            yield Work(
                "select",
                f"{model} {heads} heads of {width}, top {top_k}, {name}",
                rows,
                {"aligned": lambda i, run=run: run(None, i)},
                {"torch": lambda i, a=(q, weights, past, top_k): rivals.select(*a)},
                flops=2.0 * seen * heads * width,
                nbytes=2.0 * (past.length if past.context is None else seen) * width,
                law=past.law(run),
                sets=past.sets,
                eager=past.context is None,
            )


def listed(rows: int, length: int, top_k: int, device: torch.device, future: bool) -> Tensor:
    """Random positions [rows, top_k], ascending and -1 behind the last; without the `future` row r sees r + 1 tokens."""
    out = torch.full((rows, top_k), length, dtype=torch.int64, device=device)
    for first in range(0, rows, 512):
        block = slice(first, min(first + 512, rows))
        draw = torch.rand(block.stop - first, length, device=device)
        if not future:
            draw.masked_fill_(torch.arange(length, device=device) > torch.arange(first, block.stop, device=device)[:, None], -1.0)
        best = draw.topk(min(top_k, length), 1)
        out[block, : best.indices.shape[1]] = torch.where(best.values < 0, length, best.indices).sort(1).values
    return torch.where(out == length, -1, out).to(torch.int32)


def sparse_attention(place: Place, rows: int) -> Iterator[Work]:
    for model, sizes in LATENT.items():
        heads, width, values, top_k, head_dim = (place.size(a, b) for a, b in zip(sizes, (2, 32, 16, 8, 16)))
        q = place.randn(rows, heads, width)
        scale = head_dim**-0.5
        for name, past in _pasts(place, rows, width, 0):
            lists = listed(rows, past.length, top_k, place.device, future=past.context is not None)

            def run(index: Tensor | None, i: int, past: Past = past, q: Tensor = q, lists: Tensor = lists, v: int = values) -> Tensor:
                some = slice(None) if index is None else index
                latent, at = past.at(index, i)
                return ops.sparse_attention(q[some], latent, lists[some], at, v, scale, program=place.ours)

            some = list(range(rows))[-4:]

            def exact(past: Past = past, q: Tensor = q, lists: Tensor = lists, v: int = values, some: list[int] = some) -> Tensor:
                out = []
                for n in some:
                    chosen = past.of(n)[lists[n][lists[n] >= 0].long()].double()
                    out.append(torch.softmax(q[n].double() @ chosen.T * scale, -1) @ chosen[:, :v])
                return torch.stack(out)

            read = float((lists >= 0).sum())
            flat = (q, past, lists, values, scale)
            yield Work(
                "sparse_attention",
                f"{model} {heads} heads of {width}/{values}, top {top_k}, {name}",
                rows,
                {"aligned": lambda i, run=run: run(None, i)},
                {"FlashMLA": lambda i, a=flat: rivals.flash_mla(*a, i), "torch": lambda i, a=flat: rivals.sparse_attention(*a, i)},
                flops=2.0 * read * heads * (width + values),
                nbytes=2.0 * read * width,
                law=past.law(run),
                exact=exact,
                picked=lambda out: out[-4:],
                sets=past.sets,
                eager=past.context is None,
            )
