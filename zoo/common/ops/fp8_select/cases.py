"""Cases of fp8_select: packed documents, and the same pushed through paged memory of codes and scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.common.history import CodedRows
from zoo.common.ops.attention.cases import PagePlace, empty_pages, laid_out, write, written
from zoo.common.ops.cases import Case, Documents, Draw, Product, Trial, pushes, repeat
from zoo.common.ops.contract import Provider
from zoo.common.ops.fp8_quantise import FP32_SCALES
from zoo.common.ops.fp8_quantise.reference import LARGEST, fp8_quantise
from zoo.common.ops.fp8_select import CONTRACT, Functions
from zoo.common.ops.sparse_attention.cases import PLACES, packed_rows
from zoo.common.program import Program
from zoo.testing import Args, Plan, assert_place_law, assert_row_law, assert_same_bytes, assert_split_law, split_plans

INPUTS = ("q_RHE", "weights_RH", "key_RE")


def coded(args: Args) -> tuple[Tensor, Tensor]:
    """A key's codes and scale, alike on every device; `least` is the least that its largest value counts for."""
    key_RE = args["key_RE"]
    codes_RE, scales_R1 = fp8_quantise(key_RE.cpu(), args["least"], False)
    return codes_RE.to(key_RE.device), scales_R1.to(key_RE.device)


def _call(t: Trial, args: Args) -> Any:
    """The packed call, as training makes it."""
    rows = packed_rows(args, "q_RHE")
    return t.op("fp8_select")(args["q_RHE"], args["weights_RH"], CodedRows(*coded(args)), rows, args["top_k"], program=t.program)


def _push(t: Trial, plan: Plan, place: PagePlace) -> dict[str, Any]:
    """Documents pushed by `plan` into pages at `place`: choices in packed order and the cached rows of each document."""
    q = t.args["q_RHE"]
    weights = t.args["weights_RH"]
    codes, scales = coded(t.args)
    lengths = t.args["lengths"]
    total, owned, table = laid_out(lengths, place)
    pages = (empty_pages(codes.float(), total, owned, place).to(codes.dtype), empty_pages(scales, total, owned, place))
    outputs: list[tuple[Tensor, Tensor]] = []
    for live, rows, where in pushes(plan, lengths, q.device):
        table_NB = table[live].to(q.device)
        for page, new in zip(pages, (codes, scales), strict=True):
            write(page, new[where], table_NB, rows)
        keys = CodedRows(*pages, table_NB)
        outputs.append((where, t.op("fp8_select")(q[where], weights[where], keys, rows, t.args["top_k"], program=t.program)))
    order = torch.cat([where for where, _ in outputs]).argsort()
    cached = {
        f"document {n}": [written(page, mine, length) for page in pages]
        for n, (mine, length) in enumerate(zip(owned, lengths, strict=True))
    }
    return {"out": torch.cat([out for _, out in outputs])[order], "cached": cached}


def _row(t: Trial) -> None:
    assert_row_law(t.call, t.args, Documents(*INPUTS), seed=t.seed)


def _split(t: Trial) -> None:
    plans = split_plans(t.args["lengths"], (16, 64), t.seed)
    assert_split_law(lambda plan: _push(t, plan, PagePlace(64)), plans)
    assert_same_bytes(_push(t, plans["whole"], PagePlace(64))["out"], t.call(), "split law: pages against packed rows")


def _place(t: Trial) -> None:
    plan = split_plans(t.args["lengths"], (), t.seed)["at random"]
    assert_place_law(lambda place: _push(t, plan, place), PLACES)


def case(
    name: str,
    lengths: list[int],
    heads: int,
    width: int,
    top_k: int,
    kind: str = "normal",
    laws: tuple[str, ...] = ("row", "split", "place", "repeat"),
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        rows = sum(lengths)
        return {
            "q_RHE": draw.floats(rows, heads, width, kind=kind),
            "weights_RH": draw.floats(rows, heads, kind="ties" if kind == "ties" else "normal"),
            "key_RE": draw.floats(rows, width, kind=kind),
            "least": LARGEST if kind == "ties" else FP32_SCALES.floor,  # ties: one scale for all, 1
            "lengths": lengths,
            "top_k": top_k,
        }

    checks = {"row": _row, "split": _split, "place": _place, "repeat": repeat}
    return Case(name, "fp8_select", make, _call, {law: checks[law] for law in laws}, (), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        case("one row", [1], 1, 8, 4, laws=("row", "place", "repeat")),
        case("the best one", [5, 18], 2, 8, 1),
        case("ties", [70, 1, 33], 3, 4, 16, "ties"),
        case("32 heads", [66, 20], 32, 32, 16),
        case("odd heads and widths", [65, 17], 5, 13, 7, "cancel"),
        case("no row sees more than it takes", [33, 5], 4, 16, 64),
        case("glm-5.2, 2100 and 5", [2100, 5], 32, 128, 2048, device_sized=True, laws=("row", "place", "repeat")),
        case("glm-5.2, 4096", [4096], 32, 128, 2048, device_sized=True, laws=("row", "repeat")),
    ]


def products() -> list[Product]:
    """Geometries that DeepGEMM has no kernel for, whose products are ours. No whole numbers: folded weights are rounded, so ties would
    be broken by the order of additions."""

    def run(provider: Provider[Functions], args: Args) -> Any:
        keys = CodedRows(*coded(args))
        ours = [p for p in CONTRACT.providers if p.device == provider.device and not p.needs]
        return ours[0].functions.forward(args["q_RHE"], args["weights_RH"], keys, packed_rows(args, "q_RHE"), args["top_k"])

    shapes = ((16, 128), (5, 40))
    return [Product(f"{heads} heads of {width}", "fp8_select", case("", [150, 5], heads, width, 64).make, run) for heads, width in shapes]
