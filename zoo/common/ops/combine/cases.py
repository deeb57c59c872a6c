"""Cases of combine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.common.ops.cases import Case, Draw, Trial, row_laws
from zoo.common.ops.combine.reference import contributor_tree, round_double
from zoo.common.program import Program
from zoo.testing import Args, assert_fusion_law, assert_shard_law, cut_points


def _case(
    name: str,
    rows: int,
    width: int,
    count: int,
    top_k: int,
    kind: str = "normal",
    shared: bool = False,
    device_sized: bool = False,
) -> Case:
    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        weights = draw.floats(rows, top_k, dtype=torch.float64 if dtype == torch.float64 else torch.float32).exp()
        return {
            "slots_RKD": draw.floats(rows, top_k, width, kind=kind),
            "weights_RK": weights / weights.sum(1, keepdim=True),
            "experts_RK": draw.choices(rows, top_k, count),
            "shared_RD": draw.floats(rows, width, kind=kind) if shared else None,
        }

    def call(t: Trial, args: Args) -> Any:
        return t.op("combine")(
            args["slots_RKD"], args["weights_RK"], args["experts_RK"], count, program=t.program, shared_RD=args["shared_RD"]
        )

    def leaf(t: Trial, contributor: int) -> Tensor:
        """One contributor's leaf by the op itself: the other contributors' slots are +0 of weight +0."""
        mine = t.args["experts_RK"] // -(-count // t.program.contributors) == contributor
        slots = torch.where(mine[..., None], t.args["slots_RKD"], 0.0)
        weights = torch.where(mine, t.args["weights_RK"], 0.0)
        return t.call({**t.args, "slots_RKD": slots, "weights_RK": weights, "shared_RD": None}).double()

    def added(t: Trial, leaves: list[Tensor]) -> Tensor:
        last = [] if t.args["shared_RD"] is None else [t.args["shared_RD"].double()]
        return round_double(contributor_tree(leaves + last), t.args["slots_RKD"].dtype)

    def fusion(t: Trial) -> None:
        assert_fusion_law(t.call, lambda: added(t, [leaf(t, c) for c in range(t.program.contributors)]))

    def shard(t: Trial) -> None:
        def at_degree(degree: int) -> Any:
            if degree == 1:
                return t.call()
            leaves: list[Tensor] = []
            for begin, end in cut_points(t.program.contributors, degree):  # a rank adds its own subtree and sends the FP64 sum
                leaves.append(contributor_tree([leaf(t, c) for c in range(begin, end)]))
            return added(t, leaves)

        assert_shard_law(at_degree, [d for d in (1, 2, 4, 8, 16) if t.program.contributors % d == 0])

    laws = {**row_laws("slots_RKD", "weights_RK", "experts_RK", "shared_RD"), "fusion": fusion, "shard": shard}
    return Case(name, "combine", make, call, laws, ("slots_RKD", "weights_RK", "shared_RD"), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("one of one", 1, 1, 1, 1),
        _case("fewer experts than contributors", 7, 33, 5, 2, "wide"),
        _case("an empty last contributor", 17, 65, 25, 8, "cancel", shared=True),
        _case("16 experts", 65, 64, 16, 4, shared=True),
        _case("128 experts", 33, 257, 128, 8, "wide"),
        _case("wide rows", 7, 1024, 64, 6, "cancel", shared=True),
        _case("qwen3-30b-a3b, 1 row", 1, 2048, 128, 8, device_sized=True),
        _case("qwen3-30b-a3b, 4096 rows", 4096, 2048, 128, 8, device_sized=True),
    ]
