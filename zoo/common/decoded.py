"""A checkpoint in codes with scales, seen as one of BF16 weights: every matrix is decoded, and rounded once, where it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.common.checkpoint import Checkpoint, SideFile, check_finite
from zoo.common.program import specification
from zoo.common.quantisation import FIELD, usual_program
from zoo.common.reading import parse_object
from zoo.common.shards import INDEX, NAMES, Shard, StoredTensor, header_of
from zoo.common.weights import Entry, WeightTable

if TYPE_CHECKING:
    from zoo.common.family import Family

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class DecodedTensor(StoredTensor):
    """Codes and scales of a file, told as the BF16 tensor of their values."""

    codes: StoredTensor
    scales: StoredTensor
    entries: tuple[Entry, Entry]

    def read(self) -> Tensor:
        owner, beside = self.entries
        assert owner.codec is not None, "codes have a codec"
        parts = []
        for entry, stored in ((owner, self.codes), (beside, self.scales)):
            parts.append(entry.taken(stored.name, stored.read()))
            check_finite(stored.name, parts[-1])
        return owner.codec.decode(*parts).to(DTYPE)

    def read_runs(self, dim: int, runs: Sequence[tuple[int, int]]) -> Tensor:
        whole = self.read()
        return torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in runs], dim)


def as_read(source: Checkpoint, family: Family, program: str, dtype: torch.dtype | None) -> tuple[Checkpoint, Any]:
    """A checkpoint as a program reads it, and its geometry: in codes if the program computes with codes, decoded if `dtype` asks for it.

    ValueError for codes that the program has no use for.
    """
    config = family.config.from_hf(source.config)
    if config.quantised is None or specification(program).codes:
        return source, config
    if dtype is None:
        raise ValueError(
            f"{source.folder} has matrices in FP8 codes{' and packed experts' if config.quantised.packed else ''}: "
            f"program={usual_program(config)!r} computes with them, dtype=torch.bfloat16 rounds their values once at load"
        )
    plain = decoded(source, family.table(config))
    return plain, family.config.from_hf(plain.config)


def decoded(checkpoint: Checkpoint, table: WeightTable) -> Checkpoint:
    """The checkpoint without codes: its scales are gone, its config.json says nothing of them, what else it has stays.

    table  that of the codes. ValueError for a tensor that is missing, unknown or of a wrong shape, scales among them.
    """
    checkpoint.match(table)
    stored = checkpoint.tensors
    pairs = coded(table)
    told = {name: _told(tensor, stored[pairs[name][0]], pairs[name][1]) for name, tensor in stored.items() if name in pairs}
    gone = {pairs[name][0] for name in told}
    shards = tuple(_shard(shard, told, gone) for shard in checkpoint.shards)
    config = {name: value for name, value in checkpoint.config.items() if name != FIELD}
    text = (json.dumps(config, indent=2) + "\n").encode()
    own = checkpoint.files["config.json"]
    files = {**checkpoint.files, "config.json": SideFile(own.path, len(text), own.changed, text)}
    return replace(checkpoint, config=config, shards=shards, index=_index(checkpoint, shards, gone), files=files)


def coded(table: WeightTable) -> dict[str, tuple[str, tuple[Entry, Entry]]]:
    """The published name of every tensor of codes: the name of its scales, and the entries of both."""
    entries = {entry.ours: entry for entry in table.entries}
    found = {}
    for owner in table.entries:
        for beside in owner.beside:
            for codes, scales in zip(owner.layouts, entries[beside].layouts, strict=True):
                pairs = zip(codes, scales, strict=True)
                found.update({piece.published: (scale.published, (owner, entries[beside])) for piece, scale in pairs})
    return found


def _told(codes: StoredTensor, scales: StoredTensor, entries: tuple[Entry, Entry]) -> DecodedTensor:
    codec = entries[0].codec
    assert codec is not None, "codes have a codec"
    return DecodedTensor(codes.name, NAMES[DTYPE], codec.values(codes.shape), codes.path, codes.offset, codes, scales, entries)


def _shard(shard: Shard, told: dict[str, DecodedTensor], gone: set[str]) -> Shard:
    tensors = tuple(told.get(tensor.name, tensor) for tensor in shard.tensors if tensor.name not in gone)
    return Shard(shard.name, _header(tensors), tensors, stored=shard.header)


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    by_name = {name: dtype for dtype, name in NAMES.items()}
    return header_of((tensor.name, by_name[tensor.dtype], tensor.shape) for tensor in tensors)


def _index(checkpoint: Checkpoint, shards: Sequence[Shard], gone: set[str]) -> bytes | None:
    if checkpoint.index is None:
        return None
    fields = parse_object(checkpoint.folder / INDEX, checkpoint.index)
    fields["weight_map"] = {name: file for name, file in fields["weight_map"].items() if name not in gone}
    metadata = fields.get("metadata")
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    fields["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": total}
    return (json.dumps(fields, indent=2) + "\n").encode()
