"""Counting: differing bytes first, K3 beside them, and whether there was anything to compare at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.testing import as_integers, finite, ulp_distance
from zoo.verify.ways import Seen

CERTAIN = -1e-3  # a log-probability above this says nothing about the arithmetic
UNIFORM = 0.99  # of ln V: entropy above it means that the logits are all alike
SHARED = 0.5


@dataclass(frozen=True)
class Row:
    """One line of the ladder's table. compared counts entries, compared_bytes and differing count bytes."""

    rung: int
    what: str
    compared: int
    compared_bytes: int
    differing: int
    k3: float | None
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Spot:
    """Where bytes were first seen to differ: log-probabilities ("log_prob") or a cached tensor, of one document's position."""

    name: str
    document: int
    position: int
    elements: int
    ulp: int


@dataclass
class Tally:
    """Adds up comparisons of one row of the table. heat: differing bytes by (layer or "log-prob", position)."""

    compared: int = 0
    compared_bytes: int = 0
    differing: int = 0
    k3: float | None = None
    spot: Spot | None = None
    heat: dict[tuple[str, int], int] = field(default_factory=dict)

    def log_probs(self, trainer_T: Tensor, other_T: Tensor, document: int, begin: int) -> None:
        self.bytes(trainer_T, other_T, "log_prob", document, begin)
        k3 = k3_of(trainer_T, other_T)
        self.k3 = k3 if self.k3 is None or not k3 <= self.k3 else self.k3

    def bytes(self, a_T: Tensor, b_T: Tensor, name: str, document: int = 0, begin: int = 0) -> None:
        """Entries of dim 0 are positions from `begin` on. Entries that are not finite in a are compared, and not counted."""
        if a_T.shape != b_T.shape or a_T.dtype != b_T.dtype:
            raise ValueError(f"{name}: {a_T.dtype} {list(a_T.shape)} against {b_T.dtype} {list(b_T.shape)}")
        self._count(int(finite(a_T).sum()) if a_T.is_floating_point() else a_T.numel(), a_T)
        x, y = (as_integers(t) for t in (a_T, b_T))
        if not torch.equal(x, y):
            self._differ(a_T, b_T, name, document, begin)

    def _count(self, finite: int, a_T: Tensor) -> None:
        self.compared += finite
        self.compared_bytes += finite * a_T.element_size()

    def _differ(self, a_T: Tensor, b_T: Tensor, name: str, document: int, begin: int, rate: int = 1) -> None:
        """Rows from `begin` on; a row of `rate` tokens stands at the last of them, where it is written."""
        x, y = (as_integers(t) for t in (a_T, b_T))
        rows = (x.view(torch.uint8) != y.view(torch.uint8)).flatten(1) if x.dim() > 1 else _byte_rows(x, y)
        per_row = rows.sum(1)
        self.differing += int(per_row.sum())
        layer = "log-prob" if name == "log_prob" else name.rsplit(".", 1)[-1]
        where = per_row.nonzero()[:, 0].tolist()
        for i in where:
            place = (layer, (begin + i + 1) * rate - 1)
            self.heat[place] = self.heat.get(place, 0) + int(per_row[i])
        if self.spot is None and where:
            i = where[0]
            elements = int((x[i] != y[i]).sum())
            ulp = int(ulp_distance(a_T[i : i + 1], b_T[i : i + 1]).max()) if a_T.is_floating_point() else -1
            self.spot = Spot(name, document, (begin + i + 1) * rate - 1, elements, ulp)

    def seen(self, reference: Seen, other: Seen, *, entropy: bool, newest: int | None = None) -> None:
        """What a way showed against the trainer's whole document: its new log-probabilities and every byte cached so far.

        `entropy`: whether the way makes entropies, as training does and serving does not; then they are compared too. `newest`:
        only that many of the last cached positions. ValueError where one side lacks what the other has.
        """
        end = other.begin + other.log_prob_T.shape[0]
        self.log_probs(reference.log_prob_T[other.begin : end], other.log_prob_T, other.document, other.begin)
        if entropy:
            if reference.entropy_T is None or other.entropy_T is None:
                missing = "the reference" if reference.entropy_T is None else "the other side"
                raise ValueError(f"document {other.document}: {missing} has no entropies to compare")
            self.bytes(reference.entropy_T[other.begin : end], other.entropy_T, "entropy", other.document, other.begin)
        if set(reference.state) != set(other.state):
            raise ValueError(f"cached tensors {sorted(reference.state)} against {sorted(other.state)}")
        first = 0 if newest is None else max(0, end - newest)
        spans = {name: slice(first // reference.rate(name), end // reference.rate(name)) for name in other.state}
        pairs = {name: (reference.state[name][spans[name]], cached[spans[name]]) for name, cached in other.state.items()}
        for name, equal in zip(pairs, _all_equal(list(pairs.values())), strict=True):
            a_T, b_T = pairs[name]
            self._count(reference.finite(name, spans[name].start, spans[name].stop), a_T)
            if not equal:
                self._differ(a_T, b_T, name, other.document, spans[name].start, reference.rate(name))
        if (reference.slot is None) != (other.slot is None):
            missing = "the reference" if reference.slot is None else "the other side"
            raise ValueError(f"document {other.document}: {missing} has no states of recurrent layers to compare")
        if reference.slot is not None and other.slot is not None:
            mine = reference.slot(end)
            theirs = other.slot(end)
            if set(mine) != set(theirs):
                raise ValueError(f"states {sorted(mine)} against {sorted(theirs)}")
            for name, held in theirs.items():
                self.bytes(mine[name][None], held[None], name, other.document, end - 1)

    def row(self, rung: int, what: str, empty: str | None = None) -> Row:
        nothing = empty or (None if self.compared else "nothing was compared")
        text = what if nothing is None else f"{what} (empty: {nothing})"
        ok = not self.differing and nothing is None
        return Row(rung, text, self.compared, self.compared_bytes, self.differing, self.k3, ok)


def _all_equal(pairs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Bytes of each pair: on a GPU with one copy back to the host, since a model has hundreds of cached tensors a step."""
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"cached tensors of {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
    integers = [(as_integers(a), as_integers(b)) for a, b in pairs]
    if pairs and pairs[0][0].device.type == "cuda":
        return [not differs for differs in torch.stack([(x != y).any() for x, y in integers]).tolist()]
    return [torch.equal(x, y) for x, y in integers]


def _byte_rows(x: Tensor, y: Tensor) -> Tensor:
    width = x.element_size()
    return (x.view(torch.uint8) != y.view(torch.uint8)).view(-1, width)


def k3_of(trainer: Tensor, sampler: Tensor) -> float:
    """The largest expm1(d) - d over the entries, d = trainer - sampler in FP64."""
    d = trainer.double() - sampler.double()
    d = torch.where(trainer == sampler, 0.0, d)  # two equal infinities are no difference
    return float((torch.expm1(d) - d).max()) if d.numel() else 0.0


def emptiness(log_prob: Tensor, entropy: Tensor | None, vocabulary: int) -> str | None:
    """Why these log-probabilities prove nothing, or None."""
    log_prob = log_prob[log_prob.isfinite()]
    count = log_prob.numel()
    if count == 0:
        return "no finite log-probability"
    shared = int(torch.unique(as_integers(log_prob), return_counts=True)[1].max())
    if count > 2 and shared > SHARED * count:
        return f"{shared} of {count} log-probabilities share one bit pattern"
    certain = int((log_prob > CERTAIN).sum())
    if certain > SHARED * count:
        return f"{certain} of {count} log-probabilities exceed {CERTAIN:g}"
    if entropy is not None:
        mean = float(entropy.double().mean())
        most = math.log(vocabulary)
        if mean > UNIFORM * most:
            return f"mean entropy {mean:.4f} exceeds {UNIFORM} ln V = {UNIFORM * most:.4f}"
    return None


def shared_pattern(state: dict[str, Tensor]) -> str | None:
    """Whether more than half of a cached tensor's entries share one bit pattern: zeros, or one constant."""
    for name, tensor in state.items():
        bits = as_integers(tensor).flatten()[: 1 << 20]
        if bits.numel() > 2:
            count = int(torch.unique(bits, return_counts=True)[1].max())
            if count > SHARED * bits.numel():
                return f"{count} of {bits.numel()} entries of {name} share one bit pattern"
    return None
