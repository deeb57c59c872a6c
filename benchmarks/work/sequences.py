"""What reads a sequence's past: attention and the gated delta rule, decode of many sequences and prefill of one document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from benchmarks.common import sets_for
from benchmarks.work.cases import Place, Work, subset_law
from benchmarks.work.shapes import DELTA, HEADS, PREFILL, SHORT
from zoo.common import ops
from zoo.common.history import KeyValues
from zoo.common.memory import DeltaSlots
from zoo.common.ops.gated_delta.slots import CHUNK
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import assert_same_bytes


def attention(place: Place, rows: int) -> Iterator[Work]:
    for model, (heads, groups, width) in HEADS.items():
        if place.tiny:
            heads = 4
            groups = 2
            width = 16
        if rows >= PREFILL:
            yield _prefill_attention(place, model, heads, groups, width, rows)
            continue
        for context in place.contexts:
            yield _decode_attention(place, model, heads, groups, width, rows, context)


def _decode_attention(place: Place, model: str, heads: int, groups: int, width: int, rows: int, context: int) -> Work:
    page = 80 if width > 128 else 128
    pages = -(-context // page)
    sets = 1 if place.tiny else min(16, sets_for(4 * rows * context * groups * width))
    k_LPSGE, v_LPSGE = (place.randn(sets, rows * pages + 1, page, groups, width) for _ in range(2))
    q = place.randn(rows, heads, width)
    scale = width**-0.5
    page_table = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=place.device).view(rows, pages)
    at = Rows.pushed([1] * rows, [context - 1] * rows, place.device)

    def run(i: int, program: Program, index: Tensor | None = None) -> Tensor:
        mine = q
        some = at
        pages_NB = page_table
        if index is not None:
            mine = q[index]
            pages_NB = page_table[index]
            some = Rows.pushed([1] * len(index), [context - 1] * len(index), place.device)
        return ops.attention(mine, KeyValues(k_LPSGE[i], v_LPSGE[i], pages_NB), some, scale, program=program)

    def contiguous(pool: Tensor, i: int, count: int = rows) -> Tensor:
        return pool[i, 1:].view(rows, pages * page, groups, width)[:count, :context].transpose(1, 2)

    def sdpa(i: int) -> Tensor:
        keys, values = (contiguous(pool, i) for pool in (k_LPSGE, v_LPSGE))
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]

    def exact() -> Tensor:
        keys, values = (contiguous(pool, 0, 4).double().repeat_interleave(heads // groups, 1) for pool in (k_LPSGE, v_LPSGE))
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


def _delta_operands(place: Place, *lead: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """q, k, v, log decay and beta of `lead` tokens."""
    key_heads, value_heads, key_dim, value_dim = sizes
    q, k = (torch.nn.functional.normalize(place.randn(*lead, key_heads, key_dim), dim=-1) for _ in range(2))
    v = place.randn(*lead, value_heads, value_dim)
    decay = -0.05 * place.randn(*lead, value_heads, dtype=torch.float32).exp()
    return q, k, v, decay, torch.sigmoid(place.randn(*lead, value_heads, dtype=torch.float32))


def gated_delta(place: Place, rows: int) -> Iterator[Work]:
    for model, sizes in DELTA.items():
        if place.tiny:
            sizes = (1, 2, 16, 16)
        key_heads, value_heads, key_dim, value_dim = sizes
        operands = _delta_operands(place, rows, sizes=sizes)
        name = f"{model} {key_heads}/{value_heads} heads of {key_dim}"
        flops = 4.0 * rows * value_heads * key_dim * value_dim
        state_bytes = 4.0 * rows * value_heads * key_dim * value_dim
        if rows >= PREFILL:
            for length in (rows, SHORT) if rows > SHORT else (rows,):
                yield _prefill_delta(place, name, operands, flops, length)
            continue
        memory = DeltaSlots(1, rows + 1, key_heads, value_heads, key_dim, value_dim, torch.bfloat16, place.device)
        layer = memory.layer(0, torch.arange(1, rows + 1, device=place.device))
        # every position of one chunk, in order: the closing of the chunk is in the mean
        steps = [Rows.pushed([1] * rows, [CHUNK + j] * rows, place.device) for j in range(CHUNK)]
        state = torch.zeros(rows, value_heads, key_dim, value_dim, device=place.device)

        def run(i: int, a: tuple[Tensor, ...] = operands, layer: Any = layer, steps: list[Rows] = steps) -> Tensor:
            return ops.gated_delta(*a, layer, steps[i], program=place.ours)

        def law(a: tuple[Tensor, ...] = operands, keys: tuple[int, ...] = sizes, n: int = rows) -> None:
            outs = []
            many = torch.arange(max(n, 65)) % n  # the last of fewer than 65 is a sequence again, beside others of its kind
            for index in (many, many[-1:]):
                fresh = DeltaSlots(1, len(index) + 1, *keys, torch.bfloat16, place.device)
                view = fresh.layer(0, torch.arange(1, len(index) + 1, device=place.device))
                mine = tuple(t[index.to(place.device)] for t in a)
                outs.append(
                    [
                        ops.gated_delta(*mine, view, Rows.pushed([1] * len(index), [j] * len(index), place.device), program=place.ours)[-1:]
                        for j in range(CHUNK + 1)
                    ]
                )
            assert_same_bytes(outs[0], outs[1], f"row law, the last of {len(many)} sequences over a chunk")

        # its error is that of the first token after a chunk: the state and a cached row are in it
        some = _delta_operands(place, CHUNK + 1, min(rows, 8), sizes=sizes)

        nothing = torch.zeros(some[0].shape[1], *sizes[1:], device=place.device)

        def ours(a: tuple[Tensor, ...] = some, keys: tuple[int, ...] = sizes) -> Tensor:
            count = a[0].shape[1]
            slots = DeltaSlots(1, count + 1, *keys, torch.bfloat16, place.device)
            view = slots.layer(0, torch.arange(1, count + 1, device=place.device))
            at = [Rows.pushed([1] * count, [j] * count, place.device) for j in range(CHUNK + 1)]
            return [ops.gated_delta(*(t[j] for t in a), view, at[j], program=place.ours) for j in range(CHUNK + 1)][-1]

        yield Work(
            "gated_delta",
            f"{name} decode",
            rows,
            {"aligned": run},
            {
                "fla recurrent": lambda i, a=operands, s=state: rivals.fla_recurrent(*(t[:, None] for t in a), s),
                "triton recurrent": lambda i, a=operands, s=state: rivals.recurrent_step(*a, s),
            },
            flops=flops,
            nbytes=2 * state_bytes,
            law=law,
            exact=lambda a=some: rivals.delta_exact(*a),
            last={
                "aligned": ours,
                "triton recurrent": lambda a=some, s=nothing: rivals.recurrent_steps(*a, s.clone()),
                "fla recurrent": lambda a=some, s=nothing: rivals.fla_recurrent(*(t.transpose(0, 1) for t in a), s),
            },
            sets=CHUNK,
        )


def _prefill_delta(place: Place, name: str, operands: tuple[Tensor, ...], flops: float, length: int) -> Work:
    """Documents of `length` tokens, the last one of what is left."""
    rows = operands[0].shape[0]
    repeat = operands[2].shape[1] // operands[0].shape[1]
    wide = tuple(t.repeat_interleave(repeat, 1) for t in operands[:2])
    starts = torch.tensor([*range(0, rows, length), rows], device=place.device)
    packed = Rows.packed(starts)
    last = int(starts[-2])

    def law() -> None:
        full = ops.gated_delta(*operands, None, packed, program=place.ours)[last:]
        for some in (1, min(129, rows - last), max(1, rows - last - 1)):
            alone = Rows.packed(torch.tensor([0, some], device=place.device))
            part = ops.gated_delta(*(t[last : last + some] for t in operands), None, alone, program=place.ours)
            assert_same_bytes(part, full[:some], f"row law, the first {some} of the last {rows - last} rows")

    return Work(
        "gated_delta",
        f"{name} prefill" + ("" if length == rows else f", documents of {length}"),
        rows,
        {"aligned": lambda i: ops.gated_delta(*operands, None, packed, program=place.ours)},
        {"fla chunk": lambda i: rivals.fla_chunk(*wide, *operands[2:], starts)},
        flops=flops,
        nbytes=float(sum(t.nbytes for t in operands)),
        law=law,
        exact=lambda: rivals.delta_exact(*(t[last:] for t in operands)),
        picked=lambda out: out[-1],
        eager=True,
    )
