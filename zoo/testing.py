"""The laws, one helper each: what an op's output may depend on. Put your own kernel through them.

Every helper takes plain callables, works on any device, compares bytes (never tolerances) and raises `LawBroken` with the count
of differing elements, the first of them and the distance in ulp.

    from zoo.testing import Along, assert_row_law

    assert_row_law(lambda args: my_linear(args["x"], args["w"]), {"x": x, "w": w}, Along("x"))
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Args = dict[str, Any]
Plan = tuple[tuple[int, ...], ...]

EDGES = (1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)
EXTREMES = (torch.nan, torch.inf, -torch.inf, 1e30, -3e38)


class LawBroken(AssertionError):
    """Bytes differ where a law says that they must not."""


def tensors(value: Any, name: str = "out") -> list[tuple[str, Tensor]]:
    """Every tensor inside nested tuples, lists, dicts and dataclasses, named; None is skipped."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tensors({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, name)
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in tensors(item, f"{name}.{key}")]
    if isinstance(value, (tuple, list)):
        return [found for i, item in enumerate(value) for found in tensors(item, f"{name}[{i}]")]
    assert value is None, f"{name} is a {type(value).__name__}, not a tensor"
    return []


def as_integers(x: Tensor) -> Tensor:
    """The tensor's bits: integers of the same width and shape."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(width)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Representable values between a and b, int64; -1 where either is not finite; +0 and -0 are 0 apart."""
    lowest = -(1 << (8 * a.element_size() - 1))
    x, y = (torch.where(i < 0, lowest - i, i) for i in (as_integers(t).long() for t in (a, b)))
    return torch.where(finite(a) & finite(b), (x - y).abs(), -1)


def finite(x: Tensor) -> Tensor:
    """Which elements are no NaN and no infinity; torch has no isfinite of some FP8."""
    return (x.float() if x.element_size() == 1 else x).isfinite()


def assert_same_bytes(actual: Any, expected: Any, what: str = "result") -> None:
    """Equal dtypes, shapes and bytes, NaN payloads and signs of zero included, over nested outputs. LawBroken otherwise."""
    _compare(tensors(actual), tensors(expected), what)


def _compare(left: list[tuple[str, Tensor]], right: list[tuple[str, Tensor]], what: str) -> None:
    if [name for name, _ in left] != [name for name, _ in right]:
        raise LawBroken(f"{what}: outputs {[name for name, _ in left]} against {[name for name, _ in right]}")
    for (name, a), (_, b) in zip(left, right, strict=True):
        label = what if name == "out" else f"{what}, {name}"
        if a.dtype != b.dtype or a.shape != b.shape:
            raise LawBroken(f"{label}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
        bits = as_integers(a)
        other = as_integers(b.to(a.device))
        if not torch.equal(bits, other):
            raise LawBroken(f"{label}: {_difference(a.detach(), b.detach().to(a.device), bits, other)}")


def _kept(value: Any, law: str) -> list[tuple[str, Tensor]]:
    """A result's tensors, copied: a kernel may hand out one buffer again and again. LawBroken if they hold no element but NaN."""
    found = [(name, t.detach().clone()) for name, t in tensors(value)]
    if not any(t.numel() for _, t in found):
        raise LawBroken(f"{law}: the call returned no element, so nothing would be compared")
    if all(bool(t.isnan().all()) for _, t in found):
        raise LawBroken(f"{law}: the call returned NaN alone, so nothing worth comparing is left")
    return found


def _difference(a: Tensor, b: Tensor, bits: Tensor, other: Tensor) -> str:
    differing = (bits != other).nonzero()
    first = tuple(differing[0].tolist())
    mask = (1 << 8 * a.element_size()) - 1
    values = [f"{t[first].item()} (0x{int(i[first]) & mask:0{2 * a.element_size()}x})" for t, i in ((a, bits), (b, other))]
    text = f"{differing.shape[0]} of {a.numel()} elements differ; first at {first}: {values[0]} against {values[1]}"
    if not a.is_floating_point():
        return text
    distance = ulp_distance(a, b)
    at = int(distance[first])
    return f"{text}, {'not finite' if at < 0 else f'{at} ulp'}; largest finite distance {max(int(distance.max()), 0)} ulp"


class Units(Protocol):
    """How the independent units of a call (rows, columns, sequences) are taken out of its arguments."""

    def count(self, args: Args) -> int: ...

    def take(self, args: Args, index: Tensor) -> Args:
        """The arguments of a call on these units alone, in this order."""

    def spoil(self, args: Args, kept: Tensor, value: float) -> Args:
        """The arguments with every other unit's numbers set to `value`."""

    def outputs(self, args: Args, index: Tensor) -> Tensor:
        """Where the units lie along the output's axis."""


class Along:
    """Units along one dim of the named tensors; with `blocks` > 1 a unit has one entry in each of so many equal blocks."""

    def __init__(self, *names: str, dim: int = 0, blocks: int = 1) -> None:
        self.names = names
        self.dim = dim
        self.blocks = blocks

    def count(self, args: Args) -> int:
        return args[self.names[0]].shape[self.dim] // self.blocks

    def _entries(self, args: Args, index: Tensor) -> Tensor:
        return torch.cat([index + block * self.count(args) for block in range(self.blocks)])

    def take(self, args: Args, index: Tensor) -> Args:
        entries = self._entries(args, index)
        return {**args, **{n: args[n].index_select(self.dim, entries.to(args[n].device)) for n in self._present(args)}}

    def spoil(self, args: Args, kept: Tensor, value: float) -> Args:
        out = dict(args)
        entries = self._entries(args, kept)
        for name in self._present(args):
            tensor = args[name]
            if tensor.is_floating_point():
                entries = entries.to(tensor.device)
                filled = torch.full_like(tensor, value)
                out[name] = filled.index_copy_(self.dim, entries, tensor.index_select(self.dim, entries))
        return out

    def outputs(self, args: Args, index: Tensor) -> Tensor:
        return index

    def _present(self, args: Args) -> list[str]:
        return [name for name in self.names if args[name] is not None]


def assert_row_law(call: Callable[[Args], Any], args: Args, rows: Units, *, seed: int = 0) -> None:
    """Output row i depends on input row i and its own history only.

    Rows alone, in subsets, prefixes of every edge size, reversed, shuffled, three times as many; then beside rows that hold NaN,
    infinities and extremes. For attention `rows` are whole sequences: a non-finite value in a row's own future lies outside the
    law, since a masked weight of 0 times NaN is NaN in any tiled kernel; other sequences may be non-finite.
    """
    _assert_independent("row law", call, args, rows, 0, seed)


def assert_column_law(call: Callable[[Args], Any], args: Args, columns: Units, *, seed: int = 0) -> None:
    """Output column n depends on weight column n only: fused, split, reordered, and beside non-finite columns."""
    _assert_independent("column law", call, args, columns, -1, seed)


def selections(count: int, seed: int = 0) -> dict[str, list[int]]:
    """Which of `count` units the row and column laws run, by name."""
    order = random.Random(seed)
    everything = list(range(count))
    picked = {f"unit {i} alone": [i] for i in sorted({0, count // 2, count - 1})}
    picked |= {f"the first {n}": everything[:n] for n in EDGES if n < count}
    picked |= {f"from {n} on": everything[n:] for n in (1, 16, 64) if n < count}
    picked["reversed"] = everything[::-1]
    picked["shuffled"] = order.sample(everything, count)
    picked["a random half"] = sorted(order.sample(everything, -(-count // 2)))
    picked["three times as many"] = everything * 3
    return picked


def _assert_independent(law: str, call: Callable[[Args], Any], args: Args, units: Units, axis: int, seed: int) -> None:
    count = units.count(args)
    whole = _kept(call(args), law)

    def expected(index: Tensor) -> list[Tensor]:
        where = units.outputs(args, index)
        return [t.index_select(axis, where.to(t.device)) for _, t in whole]

    for name, chosen in selections(count, seed).items():
        index = torch.tensor(chosen)
        found = [t for _, t in tensors(call(units.take(args, index)))]
        assert_same_bytes(found, expected(index), f"{law}: {name} of {count}")
    order = random.Random(seed + 1)
    crowd = torch.arange(max(count, 3)) % count  # one unit has no neighbour to spoil: give it copies of itself
    crowded = units.take(args, crowd)
    for value in EXTREMES:
        kept = torch.tensor(sorted(order.sample(range(len(crowd)), -(-len(crowd) // 3))))
        where = units.outputs(crowded, kept)
        found = [t.index_select(axis, where.to(t.device)) for _, t in tensors(call(units.spoil(crowded, kept, value)))]
        assert_same_bytes(found, expected(crowd[kept]), f"{law}: beside units of {value}")


def split_plans(lengths: Sequence[int], edges: Sequence[int] = (16, 64, 128), seed: int = 0) -> dict[str, Plan]:
    """Ways to push sequences of these lengths: a plan is a tuple of steps, a step the rows of each sequence (0: it sits out)."""
    order = random.Random(seed)

    def in_pieces(size: int) -> Plan:
        steps = -(-max(lengths) // size)
        return tuple(tuple(max(min(size, n - step * size), 0) for n in lengths) for step in range(steps))

    plans: dict[str, Plan] = {"whole": (tuple(lengths),), "a row at a time": in_pieces(1)}
    for size in (7, *(edge + off for edge in edges for off in (-1, 0, 1))):
        if 1 < size < max(lengths):
            plans[f"in pieces of {size}"] = in_pieces(size)
    for cut in sorted({edge + off for edge in edges for off in (-1, 0, 1)}):
        if 0 < cut < max(lengths):
            plans[f"cut at {cut}"] = (tuple(min(cut, n) for n in lengths), tuple(max(n - cut, 0) for n in lengths))
    plans["one sequence after another"] = tuple(tuple(n if i == j else 0 for j, n in enumerate(lengths)) for i in range(len(lengths)))
    left = list(lengths)
    steps = []
    while any(left):
        step = tuple(order.randint(0, min(n, 40)) for n in left)
        if any(step):
            steps.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
    plans["at random"] = tuple(steps)
    return plans


def assert_split_law(push: Callable[[Plan], Any], plans: Mapping[str, Plan]) -> None:
    """A sequence pushed whole, in chunks or a row at a time gives the same rows and leaves the same cached bytes.

    `push(plan)` returns the rows' outputs in one order, and the cached bytes; see `split_plans`. The first plan is the measure.
    ValueError for plans that are all one.
    """
    _assert_all_equal("split law", push, plans, len(set(plans.values())))


@dataclasses.dataclass(frozen=True)
class Place:
    """Rows inside a larger buffer: `before` and `after` foreign rows of `fill`, in the batch (`live`) or merely beside it."""

    before: int = 0
    after: int = 0
    fill: float = torch.nan
    live: bool = False


PLACES = {
    "alone": Place(),
    "inside a buffer of NaN": Place(3, 5),
    "inside a buffer of infinities": Place(16, 64, torch.inf),
    "among padding rows of NaN": Place(5, 11, torch.nan, True),
    "before padding rows of 1e30": Place(0, 64, 1e30, True),
    "after padding rows": Place(129, 0, torch.inf, True),
}


def rows_at(call: Callable[[Args], Any], args: Args, names: Sequence[str]) -> Callable[[Place], Any]:
    """A call at a `Place`: the named tensors (rows in dim 0) move there, the outputs of the rows themselves come back."""

    def run(place: Place) -> Any:
        moved = dict(args)
        count = args[names[0]].shape[0]
        for name in names:
            tensor = args[name]
            if tensor is None:
                continue
            fill = place.fill if tensor.is_floating_point() else 0
            buffer = torch.full((place.before + count + place.after, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=tensor.device)
            buffer[place.before : place.before + count] = tensor
            moved[name] = buffer if place.live else buffer[place.before : place.before + count]
        begin = place.before if place.live else 0
        return [t[begin : begin + count] for _, t in tensors(call(moved))]

    return run


def assert_place_law(call: Callable[[Any], Any], places: Mapping[str, Any]) -> None:
    """Page numbers, slots, padding and neighbours do not matter: `call(place)` is the same at all of them.

    A place is whatever `call` understands: `Place` with `rows_at`, or a page size, a page order and the content of dead pages.
    """
    _assert_all_equal("place law", call, places, len(places))


def assert_shard_law(call: Callable[[int], Any], degrees: Sequence[int]) -> None:
    """The degree of parallelism does not matter: `call(degree)` computes the shards one by one and puts them together."""
    _assert_all_equal("shard law", call, {f"degree {degree}": degree for degree in degrees}, len(set(degrees)))


def assert_fusion_law(fused: Callable[[], Any], composed: Callable[[], Any]) -> None:
    """A fused op equals the composition that it replaces, output by output."""
    first = [t for _, t in _kept(fused(), "fusion law")]
    assert_same_bytes(first, [t for _, t in tensors(composed())], "fusion law")


def _assert_all_equal(law: str, call: Callable[[Any], Any], variants: Mapping[str, Any], different: int) -> None:
    if different < 2:
        raise ValueError(f"{law}: {different} of its variants differ ({', '.join(variants)}), it takes 2 to compare")
    names = list(variants)
    expected = _kept(call(variants[names[0]]), law)
    for name in names[1:]:
        _compare(tensors(call(variants[name])), expected, f"{law}: {name} against {names[0]}")


def gradients(call: Callable[[Args], Any], args: Args, names: Sequence[str], *, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """(outputs, the named arguments' gradients) for one random upstream gradient, the same numbers on every device and dtype."""
    leaves = {name: args[name].detach().clone().requires_grad_() for name in names if args[name] is not None}
    outputs = call({**args, **leaves})
    live = [t for _, t in tensors(outputs) if t.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(t.shape, generator=generator).bfloat16().to(t.device, t.dtype) for t in live]
    found = torch.autograd.grad(live, list(leaves.values()), upstream)
    return outputs, dict(zip(leaves, found, strict=True))


def assert_repeat_law(call: Callable[[Args], Any], args: Args, differentiable: Sequence[str] = (), *, times: int = 3) -> None:
    """The same call again gives the same bytes, forward and backward, whatever fresh memory holds."""

    def once() -> Any:
        return gradients(call, args, differentiable) if differentiable else call(args)

    if times < 2:
        raise ValueError(f"repeat law: {times} calls compare nothing, it takes 2")
    expected = _kept(once(), "repeat law")
    for attempt in range(1, times):
        _dirty([t for _, t in expected])
        _compare(tensors(once()), expected, f"repeat law: call {attempt + 1} against the first")


def _dirty(outputs: Any) -> None:
    """Leaves NaN in the blocks that the next torch.empty of these sizes is likely to get."""
    for _ in range(2):
        blocks = [torch.full_like(t, torch.nan) for _, t in tensors(outputs) if t.is_floating_point()]
        del blocks


def cut_points(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of `parts` contiguous shards of `count`, as equal as they come; empty shards are left out."""
    size = -(-count // parts)
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)
