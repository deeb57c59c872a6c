"""Cases of hash_route."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args


def _case(name: str, rows: int, vocabulary: int, experts: int, top_k: int, kind: str = "normal", device_sized: bool = False) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, torch.float64 if dtype == torch.float64 else torch.float32)
        return {
            "logits_RX": draw.floats(rows, experts, kind=kind, scale=2.0),
            "ids_R": draw.integers(rows, below=vocabulary),
            "table_VK": draw.choices(vocabulary, top_k, experts),
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("hash_route")(args["logits_RX"], args["ids_R"], args["table_VK"], 1.5, program=t.program)

    return Case(name, "hash_route", make, call, row_laws("logits_RX", "ids_R"), ("logits_RX",), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one of 2", 1, 3, 2, 1),
        _case("all of 5", 7, 11, 5, 5),
        _case("257 experts", 33, 300, 257, 6, "cancel"),
        _case("subnormal", 2, 9, 64, 6, "subnormal"),
        _case("deepseek-v4-flash, 4096 rows", 4096, 129280, 256, 6, device_sized=True),
    ]
