"""The first op whose bytes differ between two runs of the same tokens, however each run cut them into batches.

Every op call is seen through `ops.watch`; module hooks say which layer it belongs to. A run is recorded as one 64-bit checksum
per (sequence, position, layer, op call); a second pass captures the one call that was found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from zoo.common.ops import watch
from zoo.common.ops.contract import Contract
from zoo.common.rows import Rows
from zoo.testing import as_integers, ulp_distance
from zoo.verify.calls import Call, outputs_of

_POSITION_BITS = 32


@dataclass(frozen=True)
class Key:
    """One output of one op call of a layer: the `index`-th call of that op there."""

    layer: str
    op: str
    index: int
    part: str


@dataclass(frozen=True)
class Divergence:
    """The first differing op output, and the two calls cut to that row."""

    key: Key
    sequence: int
    position: int
    elements: int
    ulp: int
    calls: tuple[Call, Call]

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.key.layer,
            "op": self.key.op,
            "sequence": self.sequence,
            "position": self.position,
            "elements": self.elements,
            "ulp": self.ulp,
        }


class Tap:
    """What a run tells about the rows it is about to push. This one listens to nothing."""

    @contextmanager
    def rows(self, sequences: list[int], rows: Rows) -> Iterator[None]:
        """Op calls inside push `rows`; sequence n of the batch is sequence `sequences[n]` of the run."""
        yield


class Tracer(Tap):
    """Records op calls of one model inside `with`. `only`: rows to keep; `capture`: keep this call itself, not checksums."""

    def __init__(self, model: nn.Module, only: int | None = None, capture: tuple[Key, int, int] | None = None) -> None:
        self.model = model
        self.only = only
        self.capture = capture
        self.seen: dict[Key, list[tuple[Tensor, Tensor]]] = {}
        self.call: Call | None = None
        self._history: Any = None
        self._path: list[str] = []
        self._batch: tuple[Tensor, Tensor] | None = None
        self._calls: Counter[tuple[str, str]] = Counter()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            self._open.callback(module.register_forward_pre_hook(self._enter(name)).remove)
            self._open.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        self._open.enter_context(watch(self._observe, self._hold))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @contextmanager
    def rows(self, sequences: list[int], rows: Rows) -> Iterator[None]:
        names = torch.tensor(sequences, device=rows.positions_R.device)
        self._batch = (names[rows.sequence_R], rows.positions_R)
        self._calls.clear()
        try:
            yield
        finally:
            self._batch = None

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._path.append(name)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._path.pop()

    def _hold(self, contract: Contract, seen: dict[str, Any]) -> None:
        """Copies the slots of the call that is sought before it changes them."""
        if self._batch is None or self.capture is None or self.call is not None or not contract.history:
            return
        key = self.capture[0]
        layer = self._path[-1]
        step = seen["function"].step
        if (key.layer, key.op, key.index) == (layer, step, self._calls[layer, step]):
            history = Call.of(contract, seen, None).history
            self._history = None if history is None else history.before()

    def _observe(self, contract: Contract, seen: dict[str, Any], result: Any) -> None:
        if self._batch is None:
            return
        sequence_R, position_R = self._batch
        op = seen["function"].step
        layer = self._path[-1] if self._path else "head"
        index = self._calls[layer, op]
        self._calls[layer, op] += 1
        for part, tensor in outputs_of(result):
            if tensor.shape[:1] != sequence_R.shape:
                continue
            key = Key(layer, op, index, part)
            if self.capture is None:
                self._record(key, tensor, sequence_R, position_R)
            elif key == self.capture[0] and self.call is None:
                found = ((sequence_R == self.capture[1]) & (position_R == self.capture[2])).nonzero()
                if len(found):
                    batch = self._batch
                    self._batch = None  # shrinking calls the op again
                    with torch.no_grad():
                        call = Call.of(contract, seen, result)
                        if contract.history:
                            call.arguments[contract.history] = self._history
                        self.call = call.shrunk(int(found[0]), len(sequence_R))
                    self._batch = batch

    def _record(self, key: Key, tensor: Tensor, sequence_R: Tensor, position_R: Tensor) -> None:
        code_R = (sequence_R << _POSITION_BITS) | position_R
        if self.only is not None:
            keep = sequence_R == self.only
            tensor = tensor[keep]
            code_R = code_R[keep]
        if len(code_R):
            self.seen.setdefault(key, []).append((code_R, row_checksums(tensor)))

    def rows_of(self, key: Key) -> tuple[Tensor, Tensor]:
        """(codes ascending, checksums) of everything recorded under a key; of a row pushed twice the first counts."""
        code = torch.cat([c for c, _ in self.seen[key]])
        checksum = torch.cat([s for _, s in self.seen[key]])
        order = torch.sort(code, stable=True)
        first = torch.ones_like(order.values, dtype=torch.bool)
        first[1:] = order.values[1:] != order.values[:-1]
        return order.values[first], checksum[order.indices[first]]


def row_checksums(x: Tensor) -> Tensor:
    """int64 [R]: a position-dependent checksum of each row's bits, modulo 2^64."""
    bits = as_integers(x).flatten(1) if x.dim() > 1 else as_integers(x)[:, None]
    weights = _weights(bits.shape[1]).to(bits.device)
    blocks = [bits[:, i : i + 4096].long().mul(weights[i : i + 4096]).sum(1) for i in range(0, bits.shape[1], 4096)]
    return torch.stack(blocks).sum(0) if blocks else torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)


@lru_cache(maxsize=64)
def _weights(width: int) -> Tensor:
    draw = random.Random(width)
    return torch.tensor([draw.getrandbits(63) | 1 for _ in range(width)], dtype=torch.int64)


Run = Callable[[Tap], Any]


def first_divergence(a: tuple[nn.Module, Run], b: tuple[nn.Module, Run], sequence: int | None = None) -> Divergence | None:
    """The first op output that differs between two runs, in the order of run a's ops, then by sequence and position.

    Each run is (model, function of a Tap); it is run twice. None where every op output present in both is equal.
    """
    tracers = []
    for model, run in (a, b):
        with Tracer(model, only=sequence) as tracer:
            run(tracer)
        tracers.append(tracer)
    found = _differing(*tracers)
    if found is None:
        return None
    calls = []
    for model, run in (a, b):
        with Tracer(model, capture=found) as tracer:
            run(tracer)
        assert tracer.call is not None, "a run did not repeat itself"
        calls.append(tracer.call)
    elements, ulp = _distance(found[0].part, *calls)
    return Divergence(*found, elements, ulp, (calls[0], calls[1]))


def _differing(a: Tracer, b: Tracer) -> tuple[Key, int, int] | None:
    for key in a.seen:
        if key not in b.seen:
            continue
        left, left_sum = a.rows_of(key)
        right, right_sum = b.rows_of(key)
        place = torch.searchsorted(right, left).clamp(max=len(right) - 1)
        bad = ((right[place] == left) & (right_sum[place] != left_sum)).nonzero()
        if len(bad):
            code = int(left[bad[0]])
            return key, code >> _POSITION_BITS, code & ((1 << _POSITION_BITS) - 1)
    return None


def _distance(part: str, a: Call, b: Call) -> tuple[int, int]:
    """(differing elements, largest finite distance in ulp) of the calls' rows."""
    x, y = (dict(call.outputs())[part][call.row][None] for call in (a, b))
    if x.shape != y.shape or x.dtype != y.dtype:
        return x.numel(), -1
    elements = int((as_integers(x) != as_integers(y)).sum())
    return elements, int(ulp_distance(x, y).max()) if x.is_floating_point() else -1
