"""Cases of embed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Along, Args, assert_row_law


class _Tokens(Along):
    """Rows of ids; spoiling the neighbours spoils the table rows that only they read."""

    def __init__(self) -> None:
        super().__init__("ids_R")

    def spoil(self, args: Args, kept: Tensor, value: float) -> Args:
        table = torch.full_like(args["weight_VD"], value)
        mine = args["ids_R"][kept.to(args["ids_R"].device)]
        return {**args, "weight_VD": table.index_copy_(0, mine, args["weight_VD"].index_select(0, mine))}


def _case(name: str, rows: int, vocabulary: int, width: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        return {"ids_R": draw.integers(rows, below=vocabulary), "weight_VD": draw.floats(vocabulary, width, kind=kind)}

    def call(t: Trial, args: Args) -> Any:
        return t.op("embed")(args["ids_R"], args["weight_VD"], program=t.program)

    def row(t: Trial) -> None:
        assert_row_law(t.call, t.args, _Tokens(), seed=t.seed)

    laws = {**row_laws("ids_R"), "row": row}
    return Case(name, "embed", make, call, laws, ("weight_VD",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one row", 1, 5, 7),
        _case("odd", 17, 31, 33, "wide"),
        _case("repeated tokens", 257, 3, 65, "subnormal"),
        _case("wide rows", 65, 100, 1024),
        _case("qwen3-8b", 4096, 151936, 4096, device_sized=True),
        _case("qwen3-30b-a3b", 257, 151936, 2048, device_sized=True),
    ]
