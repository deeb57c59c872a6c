"""Cases of attention: packed documents, and the same documents pushed through paged memory in any pieces and places."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.common.history import KeyValues
from zoo.common.ops.attention.reference import KEY_TILE
from zoo.common.ops.cases import Case, Documents, Draw, Trial, pushes, repeat, starts_of
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

# FlashAttention 4's, which beyond heads of 128 is the only page size that it takes
FA4_KEY_TILE = 128
FA4_WIDE_TILE = 80
QKV = ("q_RHE", "k_RGE", "v_RGE")


@dataclass(frozen=True)
class PagePlace:
    """Where sequences live: page size, order of pages, spare pages, what dead memory holds, unused table columns."""

    page_size: int = 128
    order: int | None = None
    spare: int = 3
    fill: float = torch.nan
    columns: int = 0


PLACES = {
    "pages in order": PagePlace(fill=0.0, spare=1),
    "dead pages of NaN": PagePlace(),
    "shuffled pages of 16": PagePlace(16, order=1, spare=9),
    "shuffled pages of 64": PagePlace(64, order=2, fill=torch.inf),
    "pages of 80": PagePlace(80, order=3, columns=3),
    "reversed pages of 128, wide table": PagePlace(128, order=-1, columns=7, fill=-3e38),
}
WIDE_PLACES = {
    "pages in order": PagePlace(FA4_WIDE_TILE, fill=0.0, spare=1),
    "dead pages of NaN": PagePlace(FA4_WIDE_TILE),
    "shuffled, wide table": PagePlace(FA4_WIDE_TILE, order=3, spare=9, columns=3),
    "reversed, wider table": PagePlace(FA4_WIDE_TILE, order=-1, columns=7, fill=-3e38),
}


def page_of(width: int) -> int:
    """The page size that heads of `width` are served with."""
    return FA4_KEY_TILE if width <= 128 else FA4_WIDE_TILE


def edge_lengths(program: Program, width: int) -> list[int]:
    """Lengths at each tile, page and segment edge of the program for heads of `width`."""
    page = page_of(width)
    segment = program.key_segment(width)
    tile = KEY_TILE if program.device == "cpu" else page
    edges = [16, tile, 2 * tile, page] + ([] if segment is None else [segment])
    return sorted({1, 2 if segment is None else 2 * segment + 1} | {edge + off for edge in edges for off in (-1, 0, 1)})


def attend(t: Trial, args: Args) -> Any:
    """The packed call, as training makes it."""
    rows = Rows.packed(torch.tensor(starts_of(args["lengths"]), device=args["q_RHE"].device))
    return t.op("attention")(args["q_RHE"], KeyValues(args["k_RGE"], args["v_RGE"]), rows, args["scale"], program=t.program)


def laid_out(lengths: list[int], place: PagePlace) -> tuple[int, list[list[int]], Tensor]:
    """(pages in all, those of each document, int32 page table) of documents at `place`."""
    needed = [-(-length // place.page_size) for length in lengths]
    total = 1 + sum(needed) + place.spare
    free = list(range(1, total))
    if place.order is not None:
        free = free[::-1] if place.order < 0 else random.Random(place.order).sample(free, len(free))
    owned = [[free.pop(0) for _ in range(count)] for count in needed]
    width = max(needed) + place.columns
    # a column that a sequence does not use points at a dead page, or at the reserved one
    spare = free[0] if place.columns and free else 0
    return total, owned, torch.tensor([pages + [spare] * (width - len(pages)) for pages in owned], dtype=torch.int32)


def empty_pages(like_R: Tensor, total: int, owned: list[list[int]], place: PagePlace) -> Tensor:
    """[P, page, ...] for rows like those: zeros where a document owns the page, elsewhere what the place says."""
    pages_PS = like_R.new_full((total, place.page_size, *like_R.shape[1:]), place.fill)
    pages_PS[[page for pages in owned for page in pages]] = 0
    return pages_PS


def write(pages_PS: Tensor, new_R: Tensor, table_NB: Tensor, rows: Rows) -> None:
    """Each row into its sequence's page at its position."""
    page_size = pages_PS.shape[1]
    page_R = table_NB[rows.sequence_R, rows.positions_R // page_size].long()
    pages_PS.view(-1, *pages_PS.shape[2:])[page_R * page_size + rows.positions_R % page_size] = new_R


def written(pages_PS: Tensor, owned: list[int], length: int) -> Tensor:
    """The cached rows of a document."""
    return pages_PS[owned].flatten(0, 1)[:length]


def push(t: Trial, args: Args, plan: Plan, place: PagePlace) -> dict[str, Any]:
    """The same documents pushed by `plan` into pages at `place`: outputs in packed order, cached bytes per document."""
    q, k, v = (args[name] for name in QKV)
    lengths = args["lengths"]
    device = args["q_RHE"].device
    total, owned, table = laid_out(lengths, place)
    keys, values = (empty_pages(rows, total, owned, place) for rows in (k, v))
    out = torch.full_like(q, torch.nan)
    for live, rows, index in pushes(plan, lengths, device):
        table_NB = table[live].to(device)
        write(keys, k[index], table_NB, rows)
        write(values, v[index], table_NB, rows)
        out[index] = t.op("attention")(q[index], KeyValues(keys, values, table_NB), rows, args["scale"], program=t.program)
    cached = [[written(pages, mine, length) for pages in (keys, values)] for mine, length in zip(owned, lengths, strict=True)]
    return {"out": out, "cached": cached}


class Sequences(Documents):
    """Documents beside finite neighbours on CUDA, as the contract has it."""

    def __init__(self) -> None:
        super().__init__(*QKV)

    def spoil(self, args: Args, kept: Tensor, value: float) -> Args:
        return super().spoil(args, kept, 3e38 if args["q_RHE"].is_cuda and not math.isfinite(value) else value)


def _row(t: Trial) -> None:
    assert_row_law(t.call, t.args, Sequences(), seed=t.seed)
    whole = t.call()
    lengths = t.args["lengths"]
    starts = starts_of(t.args["lengths"])
    # a document cut short keeps its rows, and a finite extreme in a row's own future moves nothing before it
    cut = [max(1, length - 1 - length // 3) for length in lengths]
    kept = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, cut, strict=False)]).to(whole.device)
    short = {**t.args, **{name: t.args[name].index_select(0, kept) for name in QKV}, "lengths": cut}
    assert_same_bytes(t.call(short), whole.index_select(0, kept), "row law: documents cut short")
    future = {name: torch.full_like(t.args[name], 1e30).index_copy_(0, kept, t.args[name].index_select(0, kept)) for name in QKV}
    assert_same_bytes(t.call({**t.args, **future}).index_select(0, kept), whole.index_select(0, kept), "row law: an extreme future")


def _split(t: Trial) -> None:
    page = page_of(t.args["q_RHE"].shape[2])
    segment = t.program.key_segment(t.args["q_RHE"].shape[2])
    edges = (16, KEY_TILE, page) + (() if segment is None else (segment,))
    plans = split_plans(t.args["lengths"], edges, t.seed)
    assert_split_law(lambda plan: push(t, t.args, plan, PagePlace(page)), plans)
    whole = push(t, t.args, plans["whole"], PagePlace(page))["out"]
    assert_same_bytes(whole, t.call(), "split law: pages against packed rows")


def _place(t: Trial) -> None:
    width = t.args["q_RHE"].shape[2]
    plan = split_plans(t.args["lengths"], (), t.seed)["at random"]
    segment = t.program.key_segment(width)
    if page_of(width) == FA4_WIDE_TILE:
        places = WIDE_PLACES
    elif t.program.device == "cpu" or segment is None or max(t.args["lengths"]) <= segment:
        places = PLACES
    else:  # CUDA kernels take a segment as whole pages
        places = {name: place for name, place in PLACES.items() if segment % place.page_size == 0}
    assert_place_law(lambda place: push(t, t.args, plan, place), places)


def _shard(t: Trial) -> None:
    heads = t.args["q_RHE"].shape[1]
    groups = t.args["k_RGE"].shape[1]

    def at_degree(degree: int) -> Any:
        parts = []
        # a rank holds heads / degree queries and the keys they read, replicated where there are too few
        for rank in range(degree):
            mine = slice(rank * heads // degree, (rank + 1) * heads // degree)
            first = mine.start * groups // heads
            keys = slice(first, first + max(groups // degree, 1))
            local = {"q_RHE": t.args["q_RHE"][:, mine], "k_RGE": t.args["k_RGE"][:, keys], "v_RGE": t.args["v_RGE"][:, keys]}
            parts.append(t.call({**t.args, **{name: part.contiguous() for name, part in local.items()}}))
        return torch.cat(parts, 1)

    fits = [d for d in range(1, heads + 1) if heads % d == 0 and (groups % d == 0 or d % groups == 0)]
    assert_shard_law(at_degree, fits)


def case(
    name: str,
    lengths: list[int],
    heads: int,
    groups: int,
    width: int,
    kind: str = "normal",
    laws: tuple[str, ...] = ("row", "split", "place", "shard", "repeat"),
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        rows = sum(lengths)
        # the contract's bound on CUDA, 2^30: a score of wide operands times scale times log2(e) would reach 2^49
        most = 2.0**-24 if kind == "wide" and torch.device(device).type == "cuda" else 1.0
        return {
            "q_RHE": draw.floats(rows, heads, width, kind=kind, scale=2.0 * most),
            "k_RGE": draw.floats(rows, groups, width, kind=kind),
            "v_RGE": draw.floats(rows, groups, width, kind=kind),
            "lengths": lengths,
            "scale": width**-0.5,
        }

    checks = {"row": _row, "split": _split, "place": _place, "shard": _shard, "repeat": repeat}
    devices = ("cpu", "cuda") if width in (64, 128, 256) else ("cpu",)  # FlashAttention 4's head dims
    return Case(name, "attention", make, attend, {law: checks[law] for law in laws}, QKV, device_sized, devices, kind)


def cases(program: Program) -> list[Case]:
    segment = program.key_segment(64)
    wide = program.key_segment(256)
    small = [
        case("one row", [1], 1, 1, 8, laws=("row", "place", "repeat")),
        case("ratio 1, wide", [17, 1, 66], 2, 2, 16, "wide"),
        case("ratio 2, cancelling", [65, 2, 64], 4, 2, 32, "cancel"),
        case("ratio 3", [7, 130], 3, 1, 8),
        case("ratio 7, odd head", [63, 1, 16], 7, 1, 7),
        case("ratio 8, heads of 64", [129, 5, 15], 8, 1, 64),
        case("ratio 4, heads of 128", [70, 33], 4, 1, 128, "wide"),
        case("subnormal", [31, 2], 2, 1, 64, "subnormal"),
        case("edges", edge_lengths(program, 64), 1, 1, 64, laws=("row", "place", "repeat")),
        case("a segment and more", [260 if segment is None else segment + 2, 70], 1, 1, 64, laws=("split",)),
        case("a segment and more, subnormal", [260 if segment is None else segment + 2], 1, 1, 64, "subnormal", laws=("row", "split")),
        case("ratio 2, heads of 256", [81, 1, 160], 4, 2, 256),
        case("heads of 256, edges", edge_lengths(program, 256), 1, 1, 256, laws=("row", "place", "repeat")),
        case("heads of 256, a segment and more", [163 if wide is None else wide + 2], 1, 1, 256, laws=("split",)),
    ]
    published = [("qwen3-8b", 32, 8), ("qwen3-30b-a3b", 32, 4)]
    return small + [
        case(f"{name}, {what}", lengths, heads, groups, 128, device_sized=True, laws=laws)
        for name, heads, groups in published
        for what, lengths, laws in (
            ("edges and 593", [*edge_lengths(program, 128), 592, 593, 594], ("row", "place", "shard", "repeat")),
            ("700 a row at a time", [700, 257], ("split",)),
            ("4096", [4096], ("row", "shard", "repeat")),
        )
    ]
