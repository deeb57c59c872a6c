"""The fingerprint: what a trainer, a server and a recorded rollout must agree on, and what is only reported."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common import layers, qualification
from zoo.common.hashing import checksums
from zoo.common.ops import CONTRACTS
from zoo.common.ops.log_prob import head_shapes
from zoo.common.program import HEAD, Program
from zoo.common.reading import shown
from zoo.common.weights import Entry, Piece, WeightTable


@dataclass(frozen=True)
class Fingerprint:
    """Four parts. `program` and `weights` must match; `toolchain` and `realisation` are reported.

    weights  content hash of the published tensors, hexadecimal; the same inside a larger model as in the text model alone
    """

    program: dict[str, str]
    weights: str
    toolchain: dict[str, str]
    realisation: dict[str, str]

    def check(self, other: Fingerprint) -> None:
        """ValueError listing the differing lines of program and weights, this one's against the other's."""
        mine, theirs = ({**f.program, "weights": f.weights} for f in (self, other))
        lines = [
            f"{name}: {mine.get(name, 'absent')} against {theirs.get(name, 'absent')}"
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        ]
        if lines:
            raise ValueError(f"fingerprints differ in {len(lines)} line(s): {'; '.join(lines)} (this one's against the given one's)")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Fingerprint:
        """The inverse of `to_dict`. ValueError for other fields, or parts that are no dictionaries of text."""
        if not isinstance(fields, dict):
            raise ValueError(f"a fingerprint is a dictionary, not {shown(fields)}")
        names = set(cls.__dataclass_fields__)
        if set(fields) != names:
            raise ValueError(f"a fingerprint has the fields {sorted(names)}, this one {', '.join(sorted(map(shown, fields)))}")
        if not isinstance(fields["weights"], str):
            raise ValueError(f"a fingerprint's weights are text, not {shown(fields['weights'])}")
        for name in sorted(names - {"weights"}):
            part = fields[name]
            if not isinstance(part, dict) or not all(isinstance(text, str) for line in part.items() for text in line):
                raise ValueError(f"a fingerprint's {name} is a dictionary of text, not {shown(part)}")
        return cls(**fields)


def products(realisation: Mapping[str, str]) -> dict[str, str]:
    """Of a fingerprint's realisation the matrix products: which provider runs each shape."""
    return {name: provider for name, provider in realisation.items() if " " in name}  # they alone are named with their shape


def content_hash(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> str:
    """Hash of (published name, dtype, shape, 64-bit checksum), whatever the order they come in."""
    digest = hashlib.sha256()
    for name, dtype, shape, checksum in sorted(tensors):
        digest.update(f"{name} {dtype} {list(shape)} {checksum & (1 << 64) - 1:016x}\n".encode())
    return digest.hexdigest()[:32]


def weights_hash(published: Callable[[str], Tensor], table: WeightTable) -> str:
    """Content hash of a module's weights in canonical names, default layout; one copy back to the host.

    `published`: our name of a parameter -> it, whole, as it is published. It is asked for one after another, each once or twice.
    """
    groups: dict[tuple[str, bool, int, tuple[int, ...]], list[tuple[Entry, Piece]]] = defaultdict(list)
    for entry, piece in table.pieces():
        groups[entry.ours, piece.expert is not None, piece.start, piece.shape].append((entry, piece))
    named: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    sums = []
    for (ours, stacked, start, shape), members in groups.items():
        parameter = published(ours)
        rows_XR = parameter[:, start : start + shape[0]] if stacked else parameter[None, start : start + shape[0]]
        if stacked and [piece.expert for _, piece in members] != list(range(parameter.shape[0])):
            rows_XR = rows_XR[torch.tensor([piece.expert for _, piece in members], device=rows_XR.device)]
        sums.append(checksums(rows_XR.reshape(*rows_XR.shape[:2], -1)))
        named += [(table.canonical(piece.published), parameter.dtype, shape) for _, piece in members]
    return content_hash((str(n), str(d), s, c) for (n, d, s), c in zip(named, torch.cat(sums).tolist(), strict=True))


def products_of(module: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    """(op, shape) of every matrix product whose provider is chosen by shape, the vocabulary head's among them; meta tensors do."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    for part in module.modules():
        if isinstance(part, layers.Linear):
            shape = tuple(part.weight.shape)
            found.add(("linear", (*shape, part.k_parts)) if part.rule is None else ("fp8_linear", shape))
        elif isinstance(part, layers.Experts):
            count, hidden, intermediate = part.down.shape
            found.add(("experts" if part.rule is None else "fp8_experts", (count, hidden, intermediate)))
        elif isinstance(part, layers.PackedExperts):
            count, hidden, bytes_a_row = part.down.shape
            found.add(("packed_experts", (count, hidden, 2 * bytes_a_row)))
    return found | {("linear", shape) for shape in _head_shapes_of(module)}


def _head_shapes_of(module: nn.Module) -> set[tuple[int, ...]]:
    vocabulary, hidden = module.get_submodule("model").vocabulary_head.weight.shape  # type: ignore[union-attr,misc]
    return head_shapes(int(vocabulary), int(hidden))


def realisation(module: nn.Module, program: Program, used: Iterable[str]) -> dict[str, str]:
    """Which provider runs each op that the module uses, and each shape of the matrix products."""
    out = {}
    chosen = products_of(module)
    heads = _head_shapes_of(module)
    for op, shape in sorted(chosen):
        provider = CONTRACTS[op].provider(program, shape, HEAD if op == "linear" and shape in heads else op)
        out[f"{op} {'x'.join(map(str, shape))}"] = provider.name
    for op in sorted(used):
        wanted = program.byte_classes(op)
        members = [p.name for p in CONTRACTS[op].providers if p.device == program.device and p.byte_class in wanted and p.installed()]
        out.setdefault(op, " or ".join(members) or "none")
    out["layout"] = "one device"
    # without a stored qualification every class runs its defining provider
    out["qualification"] = qualification.state(chosen, program.device)
    return out
