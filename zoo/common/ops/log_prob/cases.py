"""Cases of log_prob, logits and log_prob_of_logits.

Rows of up to 2^26 logits hold them whole, more rows take them by chunks of columns; a test lowers the bound for the CPU's cases.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law, assert_shard_law

DEGREES = (1, 2, 4, 8, 16)


def case(
    name: str,
    rows: int,
    vocabulary: int,
    width: int,
    kind: str = "normal",
    temperature: bool = False,
    device_sized: bool = False,
    *,
    group: int,
    only: tuple[str, ...] = (),
) -> Case:
    """`only`: the laws that the case is for; all by default, with gradients."""
    groups = -(-vocabulary // group)

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        scale = 2.0**10 if kind == "subnormal" else 3.0 * width**-0.5
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return {
            "hidden_RD": draw.floats(rows, width, kind=kind),
            "weight_VD": draw.floats(vocabulary, width, scale=scale),
            "targets_R": draw.integers(rows, below=vocabulary),
            "inverse_temperature_R": draw.floats(rows, dtype=wide).abs() + 0.5 if temperature else None,
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("log_prob")(
            args["hidden_RD"],
            args["weight_VD"],
            args["targets_R"],
            program=t.program,
            inverse_temperature_R=args["inverse_temperature_R"],
        )

    def logits(t: Trial, weight: Tensor) -> Tensor:
        return t.op("logits")(t.args["hidden_RD"], weight, program=t.program, inverse_temperature_R=t.args["inverse_temperature_R"])

    def fusion(t: Trial) -> None:
        def composed() -> Any:
            return t.op("log_prob_of_logits")(logits(t, t.args["weight_VD"]), t.args["targets_R"], program=t.program)

        assert_fusion_law(t.call, composed)

    def shard(t: Trial) -> None:
        def at_degree(degree: int) -> Any:
            if degree == 1:
                return t.call()
            # each rank makes the logits of its columns, cut on the group's grid, some ranks with a group more; they meet in rank order
            ends = [groups * rank // degree * t.program.vocab_group for rank in range(1, degree)]
            parts = [logits(t, part.contiguous()) for part in t.args["weight_VD"].tensor_split(ends)]
            return t.op("log_prob_of_logits")(torch.cat(parts, 1), t.args["targets_R"], program=t.program)

        assert_shard_law(at_degree, [d for d in DEGREES if d <= groups])

    laws = {**row_laws("hidden_RD", "targets_R", "inverse_temperature_R"), "fusion": fusion}
    laws |= {"shard": shard} if groups > 1 else {}
    graded = () if only else ("hidden_RD", "weight_VD")
    return Case(name, "log_prob", make, call, {law: laws[law] for law in only or laws}, graded, device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    group = program.vocab_group
    made = functools.partial(case, group=group)
    return [
        made("one token", 1, 1, 8),
        made("one short of a group", 7, group - 1, 33, temperature=True),
        made("a group", 17, group, 64),
        made("one over a group", 33, group + 1, 64, "wide"),
        made("five groups, the last of one", 17, 4 * group + 1, 64, "cancel", temperature=True),
        made("K 1024", 5, 2 * group, 1024),
        made("subnormal", 2, 300, 128, "subnormal"),
        made("more columns than a chunk", 3, 16384 + group + 1, 16),
        # 605 groups: 37 or 38 a rank at degree 16
        made("glm-5.2, 5 rows", 5, 154880, 6144, device_sized=True, only=("row", "shard", "repeat")),
        made("qwen3-8b, 1 row", 1, 151936, 4096, device_sized=True),
        made("qwen3-8b, 257 rows", 257, 151936, 4096, temperature=True, device_sized=True),
        made("qwen3-8b, 450 rows, by chunks", 450, 151936, 4096, temperature=True, device_sized=True),
        made("qwen3-30b-a3b, 64 rows", 64, 151936, 2048, device_sized=True),
    ]
