"""Cases of sparse_attention: packed documents with lists of positions, and the same pushed through paged memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.common.history import TokenRows
from zoo.common.ops.attention.cases import PagePlace, empty_pages, laid_out, write, written
from zoo.common.ops.cases import Case, Documents, Draw, Product, Trial, pushes, repeat, starts_of
from zoo.common.ops.contract import Provider
from zoo.common.ops.sparse_attention import Functions
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import (
    Args,
    Plan,
    assert_place_law,
    assert_row_law,
    assert_same_bytes,
    assert_shard_law,
    assert_split_law,
    split_plans,
)

PLACES = {
    "pages in order": PagePlace(64, fill=0.0, spare=1),
    "dead pages of NaN": PagePlace(64),
    "shuffled pages of 16": PagePlace(16, order=1, spare=9),
    "shuffled pages of 80": PagePlace(80, order=3, fill=torch.inf),
    "reversed pages of 128, wide table": PagePlace(128, order=-1, columns=7, fill=-3e38),
}
Step = Callable[[TokenRows, Rows, Tensor], Tensor]


def packed_rows(args: Args, name: str) -> Rows:
    return Rows.packed(torch.tensor(starts_of(args["lengths"]), device=args[name].device))


def push(lengths: list[int], row_RE: Tensor, plan: Plan, place: PagePlace, step: Step) -> dict[str, Any]:
    """Documents pushed by `plan` into pages at `place`: outputs in packed order and the cached rows of each document.

    `step(history, rows, where)` returns the outputs of rows that lie at `where` among the packed ones and are in the history.
    """
    total, owned, table = laid_out(lengths, place)
    pages = empty_pages(row_RE, total, owned, place)
    outputs: list[tuple[Tensor, Tensor]] = []
    for live, rows, where in pushes(plan, lengths, row_RE.device):
        table_NB = table[live].to(row_RE.device)
        write(pages, row_RE[where], table_NB, rows)
        outputs.append((where, step(TokenRows(pages, table_NB), rows, where)))
    order = torch.cat([where for where, _ in outputs]).argsort()
    cached = {f"document {n}": written(pages, mine, length) for n, (mine, length) in enumerate(zip(owned, lengths, strict=True))}
    return {"out": torch.cat([out for _, out in outputs])[order], "cached": cached}


def lists(lengths: list[int], top_k: int, seed: int) -> Tensor:
    """positions_RK of random choices: a row takes all of what it sees, or `top_k` of it, and a few rows less."""
    draw = random.Random(seed)
    out = torch.full((sum(lengths), top_k), -1, dtype=torch.int32)
    for begin, length in zip(starts_of(lengths), lengths, strict=False):
        for p in range(length):
            count = min(p + 1, top_k) if draw.random() < 0.8 else draw.randint(1, min(p + 1, top_k))
            out[begin + p, :count] = torch.tensor(sorted(draw.sample(range(p + 1), count)), dtype=torch.int32)
    return out


def _attend(t: Trial, args: Args, latent: TokenRows, rows: Rows, where: Tensor | None = None) -> Tensor:
    q, positions = (args[name] if where is None else args[name][where] for name in ("q_RHC", "positions_RK"))
    out: Tensor = t.op("sparse_attention")(q, latent, positions, rows, args["values"], args["scale"], program=t.program)
    return out


def _call(t: Trial, args: Args) -> Any:
    """The packed call, as training makes it."""
    return _attend(t, args, TokenRows(args["latent_RC"]), packed_rows(args, "q_RHC"))


def _push(t: Trial, plan: Plan, place: PagePlace) -> dict[str, Any]:
    latent = t.args["latent_RC"]
    args = t.args

    def step(history: TokenRows, rows: Rows, where: Tensor) -> Tensor:
        return _attend(t, args, history, rows, where)

    return push(args["lengths"], latent, plan, place, step)


def _row(t: Trial) -> None:
    assert_row_law(t.call, t.args, Documents("q_RHC", "latent_RC", "positions_RK"), seed=t.seed)


def _split(t: Trial) -> None:
    plans = split_plans(t.args["lengths"], (16, 64), t.seed)
    assert_split_law(lambda plan: _push(t, plan, PagePlace(64)), plans)
    assert_same_bytes(_push(t, plans["whole"], PagePlace(64))["out"], t.call(), "split law: pages against packed rows")


def _place(t: Trial) -> None:
    plan = split_plans(t.args["lengths"], (), t.seed)["at random"]
    assert_place_law(lambda place: _push(t, plan, place), PLACES)


def _shard(t: Trial) -> None:
    heads = t.args["q_RHC"].shape[1]

    def at_degree(degree: int) -> Any:
        return torch.cat([t.call({**t.args, "q_RHC": part.contiguous()}) for part in t.args["q_RHC"].chunk(degree, 1)], 1)

    assert_shard_law(at_degree, [d for d in range(1, heads + 1) if heads % d == 0])


def _case(
    name: str,
    lengths: list[int],
    heads: int,
    width: int,
    values: int,
    top_k: int,
    kind: str = "normal",
    laws: tuple[str, ...] = ("row", "split", "place", "shard", "repeat"),
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        rows = sum(lengths)
        return {
            "q_RHC": draw.floats(rows, heads, width, kind=kind, scale=2.0),
            "latent_RC": draw.floats(rows, width, kind=kind),
            "positions_RK": lists(lengths, top_k, seed).to(device),
            "lengths": lengths,
            "values": values,
            "scale": width**-0.5,
        }

    checks = {"row": _row, "split": _split, "place": _place, "shard": _shard, "repeat": repeat}
    chosen = {law: checks[law] for law in laws}
    return Case(name, "sparse_attention", make, _call, chosen, ("q_RHC", "latent_RC"), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one row", [1], 1, 8, 8, 4, laws=("row", "place", "repeat")),
        _case("wide", [17, 1, 66], 2, 16, 12, 16, "wide"),
        _case("all of what they see", [65, 2, 30], 4, 40, 32, 80),
        _case("odd heads and widths", [7, 80], 3, 13, 7, 65),
        _case("more heads than a panel", [33, 5], 18, 24, 16, 20, "cancel"),
        _case("subnormal", [31, 2], 2, 32, 24, 8, "subnormal"),
        _case("lists of 130", [140], 1, 16, 16, 130, laws=("row", "split", "repeat")),
        _case("glm-5.2, 700 and 5", [700, 5], 64, 576, 512, 2048, laws=("row", "place", "shard", "repeat"), device_sized=True),
        _case("glm-5.2, 4096", [4096], 64, 576, 512, 2048, laws=("row", "repeat"), device_sized=True),
    ]


def products() -> list[Product]:
    """Widths of GLM-5.2 and narrow ones, over several tiles of a list, forward and backward."""

    def run(provider: Provider[Functions], args: Args) -> Any:
        operands = (args["q_RHC"], args["latent_RC"], None, args["positions_RK"], packed_rows(args, "q_RHC"))
        return provider.functions.forward(*operands, args["values"], args["scale"])[0]

    def backward(provider: Provider[Functions], args: Args) -> Any:
        q, latent, positions = (args[name] for name in ("q_RHC", "latent_RC", "positions_RK"))
        rows = packed_rows(args, "q_RHC")
        out, lse = provider.functions.forward(q, latent, None, positions, rows, args["values"], args["scale"])
        return provider.functions.backward(out.roll(1, 0), q, latent, positions, out, lse, rows, args["scale"])

    shapes = ((32, 576, 512), (64, 576, 512), (3, 40, 32))  # 64 heads are a wgmma's rows in the backward
    found = []
    for heads, width, values in shapes:
        made = _case("", [80, 5], heads, width, values, 80).make
        found.append(Product(f"{heads} heads of {width}", "sparse_attention", made, run))
        found.append(Product(f"backward, {heads} heads of {width}", "sparse_attention", made, backward))
    return found
