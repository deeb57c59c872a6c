"""Cases of gated_delta: packed documents, and the same documents pushed through slots in any pieces and places."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.common.history import DeltaState
from zoo.common.ops.cases import Case, Documents, Draw, Product, Trial, pushes, repeat, starts_of
from zoo.common.ops.contract import Provider
from zoo.common.ops.gated_delta import Functions
from zoo.common.ops.gated_delta.slots import CHUNK, FROM_ZERO, empty_state, live_bytes, slot_tensors
from zoo.common.ops.gated_delta.witness import OPERANDS
from zoo.common.program import Program, resolve
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

EDGES = (1, 3, 4, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True)
class SlotPlace:
    """Where sequences live: spare slots, their order, and what dead slots and dead rows hold."""

    spare: int = 3
    order: int = 0
    fill: float = torch.nan


PLACES = {
    "slots in order": SlotPlace(0, 0, 0.0),
    "dead rows of NaN": SlotPlace(),
    "shuffled among infinities": SlotPlace(7, 1, torch.inf),
    "reversed": SlotPlace(2, -1, -3e38),
}


def packed_rows(args: Args) -> Rows:
    return Rows.packed(torch.tensor(starts_of(args["lengths"]), device=args["q_RHK"].device))


def run(t: Trial, args: Args) -> Any:
    """The packed call, as training makes it."""
    return t.op("gated_delta")(*(args[name] for name in OPERANDS), None, packed_rows(args), program=t.program)


def slots_for(args: Args, place: SlotPlace) -> tuple[DeltaState, list[int]]:
    """Pools at `place` with a slot assigned to each document; rows that nobody wrote hold `fill`."""
    k = args["k_RHK"]
    v = args["v_RVE"]
    count = len(args["lengths"])
    slots = 1 + count + place.spare
    state = empty_state(slots, slot_tensors(k.shape[1], v.shape[1], k.shape[2], v.shape[2], v.dtype), v.device)
    free = list(range(1, slots))
    owned = (free[::-1] if place.order < 0 else random.Random(place.order).sample(free, len(free)) if place.order else free)[:count]
    for name, pool in pools_of(state).items():
        # stale rows of the slot's own live chunk may not matter either
        pool.fill_(place.fill)
        if name in FROM_ZERO:
            pool[owned] = 0
    return state, owned


def pools_of(state: DeltaState) -> dict[str, Tensor]:
    """[S, ...] each."""
    return {name: pool for name, pool in vars(state).items() if name != "slot_N"}


def written(state: DeltaState, slot: int, length: int) -> dict[str, Tensor]:
    """What a sequence's slot holds that says something."""
    return live_bytes({name: pool[None] for name, pool in pools_of(state).items()}, slot, length)


def push(t: Trial, args: Args, plan: Plan, place: SlotPlace, every_step: bool = False) -> dict[str, Any]:
    """The same documents pushed by `plan`: outputs in packed order, cached bytes per document (`seen`: after every step)."""
    pools, owned = slots_for(args, place)
    out = torch.full_like(args["v_RVE"], torch.nan)
    device = args["q_RHK"].device
    seen: dict[tuple[int, int], Any] = {}
    for live, rows, index in pushes(plan, args["lengths"], device):
        state = replace(pools, slot_N=torch.tensor([owned[n] for n in live], device=device))
        out[index] = t.op("gated_delta")(*(args[name][index] for name in OPERANDS), state, rows, program=t.program)
        if every_step:
            seen |= {(n, length): written(pools, owned[n], length) for n, length in zip(live, rows.lengths_N.tolist())}
    cached = [written(pools, slot, length) for slot, length in zip(owned, args["lengths"])]
    return {"out": out, "cached": cached, **({"seen": seen} if every_step else {})}


def _row(t: Trial) -> None:
    assert_row_law(t.call, t.args, Documents(*OPERANDS), seed=t.seed)
    # a document cut short keeps its rows
    whole = t.call()
    lengths = t.args["lengths"]
    starts = starts_of(t.args["lengths"])
    cut = [max(1, length - 1 - length // 3) for length in lengths]
    kept = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, cut)]).to(whole.device)
    short = {**t.args, **{name: t.args[name].index_select(0, kept) for name in OPERANDS}, "lengths": cut}
    assert_same_bytes(t.call(short), whole.index_select(0, kept), "row law: documents cut short")


def _split(t: Trial) -> None:
    plans = split_plans(t.args["lengths"], (16, CHUNK, 2 * CHUNK), t.seed)
    assert_split_law(lambda plan: push(t, t.args, plan, SlotPlace()), plans)
    assert_same_bytes(push(t, t.args, plans["whole"], SlotPlace())["out"], t.call(), "split law: slots against packed rows")
    # the cached bytes at every token boundary: a row at a time, and in pieces that end at each of them
    stepped = push(t, t.args, plans["a row at a time"], SlotPlace(), every_step=True)["seen"]
    for name in ("at random", "in pieces of 7", "in pieces of 65"):
        if name in plans:
            seen = push(t, t.args, plans[name], SlotPlace(), every_step=True)["seen"]
            assert_same_bytes(list(seen.values()), [stepped[at] for at in seen], f"split law: caches, {name} against a row at a time")


def _place(t: Trial) -> None:
    plan = split_plans(t.args["lengths"], (), t.seed)["at random"]
    assert_place_law(lambda place: push(t, t.args, plan, place), PLACES)


def _shard(t: Trial) -> None:
    key_heads = t.args["q_RHK"].shape[1]
    repeat = t.args["v_RVE"].shape[1] // t.args["q_RHK"].shape[1]

    def at_degree(degree: int) -> Any:
        parts = []
        for rank in range(degree):
            keys = slice(rank * key_heads // degree, (rank + 1) * key_heads // degree)
            values = slice(keys.start * repeat, keys.stop * repeat)
            local = {name: t.args[name][:, values if "V" in name else keys].contiguous() for name in OPERANDS}
            parts.append(t.call({**t.args, **local}))
        return torch.cat(parts, 1)

    assert_shard_law(at_degree, [d for d in range(1, key_heads + 1) if key_heads % d == 0])


def _case(
    name: str,
    lengths: Sequence[int],
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    decay: float = 0.3,
    laws: tuple[str, ...] = ("row", "split", "place", "shard", "repeat"),
    device_sized: bool = False,
) -> Case:
    """`decay` scales -log_decay; 0: heads that keep everything, heads that forget at once, beta near 0 and near 1."""

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, dtype)
        rows = sum(lengths)
        exact = torch.promote_types(dtype, torch.float32)
        q, k = (draw.floats(rows, key_heads, key_dim, dtype=exact) for _ in range(2))
        gate, beta = (draw.floats(rows, value_heads, dtype=exact) for _ in range(2))
        if decay == 0:
            head = torch.arange(value_heads, device=device) % 3
            log_decay = -torch.exp(gate) * torch.tensor([1e-6, 0.3, 40.0], dtype=exact, device=device)[head]
            beta = torch.sigmoid(beta * 12)
        else:
            log_decay = -torch.exp(gate) * decay
            beta = torch.sigmoid(beta)
        return {
            "q_RHK": (q / q.norm(dim=-1, keepdim=True)).to(dtype),
            "k_RHK": (k / k.norm(dim=-1, keepdim=True)).to(dtype),
            "v_RVE": draw.floats(rows, value_heads, value_dim),
            "log_decay_RV": log_decay,
            "beta_RV": beta,
            "lengths": list(lengths),
        }

    checks = {"row": _row, "split": _split, "place": _place, "shard": _shard, "repeat": repeat}
    return Case(name, "gated_delta", make, run, {law: checks[law] for law in laws}, OPERANDS, device_sized)


def cases(program: Program) -> list[Case]:
    rough = ("row", "place", "repeat")
    return [
        _case("one row", [1], 1, 1, 16, 16, laws=rough),
        _case("two chunks", [130, 3], 2, 4, 16, 16),
        _case("extreme gates", [66, 1, 64], 2, 6, 32, 32, decay=0, laws=("row", "split", "place", "shard", "repeat")),
        _case("edges", EDGES, 1, 1, 32, 32, laws=rough),
        _case("heads of 128", [65, 2], 1, 2, 128, 128, decay=0.05, laws=rough),
        _case("qwen3.5-35b-a3b, edges", [*EDGES, 593, 1000], 16, 32, 128, 128, 0.05, ("row", "place", "shard", "repeat"), True),
        _case("qwen3.5-35b-a3b, a row at a time", [200, 129], 16, 32, 128, 128, 0, ("split",), True),
        _case("qwen3.5-4b, a row at a time", [593, 64], 16, 32, 128, 128, 0.05, ("split",), True),
        _case("qwen3.5-35b-a3b, 4096", [4096], 16, 32, 128, 128, 0.05, ("shard", "repeat"), True),
    ]


def products() -> list[Product]:
    """Every width with every launch of the scan and of a step, forward, backward and into slots."""

    def forward(provider: Provider[Functions], args: Args) -> Any:
        q, k, v, log_decay, beta = (args[name] for name in OPERANDS)
        return provider.functions.forward(q, k, v, log_decay, beta, None, packed_rows(args))

    def backward(provider: Provider[Functions], args: Args) -> Any:
        grad = args["v_RVE"].roll(1, 0)
        q, k, v, log_decay, beta = (args[name] for name in OPERANDS)
        return provider.functions.backward(grad, None, q, k, v, log_decay, beta, None, packed_rows(args))

    def serve(provider: Provider[Functions], args: Args) -> Any:
        """All but each document's last four rows in chunks, then these one by one."""

        def op(*operands: Any, program: Program) -> Any:
            return provider.functions.serve(*operands)

        lengths = args["lengths"]
        plan = (tuple(length - 4 for length in lengths), *[(1,) * len(lengths)] * 4)
        stand_in = Trial(case, resolve("aligned", "cpu", torch.bfloat16), args, {"gated_delta": op})
        return push(stand_in, args, plan, SlotPlace())["out"]

    found = []
    for width in (16, 32, 64, 128):
        for columns in (3000, 6000, 12000):  # of all states of a launch: the scan's shapes reach to 4224 and 8448
            documents = -(-columns // (16 * width))
            case = _case("", [130, *[3] * (documents - 1)], 4, 16, width, width, 0.05)
            found.append(Product(f"forward, {documents} documents, width {width}", "gated_delta", case.make, forward))
        case = _case("", [130, 65, 3], 2, 4, width, width, 0.05)
        found.append(Product(f"backward, width {width}", "gated_delta", case.make, backward))
        for heads in (4, 24):  # a step's shapes reach to 64 heads of all documents
            # rows 14 to 17, 30 to 33, 62 to 65: a step reads 16, 32 or 64 lanes, and row 63 closes a chunk
            case = _case("", [18, 34, 66], heads // 2, heads, width, width, 0.05)
            found.append(Product(f"serve, {heads} heads, width {width}", "gated_delta", case.make, serve))
    return found
