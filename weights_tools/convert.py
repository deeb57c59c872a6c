"""Published names to the zoo's parameter names and back; one parameter in memory at a time."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from zoo.common.checkpoint import SHARD_BYTES, Checkpoint, check_finite, check_shard_bytes
from zoo.common.files import fresh_folder
from zoo.common.registry import model_class
from zoo.common.shards import DTYPES, StoredTensor, write_shards
from zoo.common.weights import Piece, WeightTable


def convert(path: str | Path, out: str | Path, to: str = "zoo", *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the checkpoint at `path` in the other naming; config, tokenizer and unused tensors go along unchanged.

    ValueError for an unknown direction, a non-empty `out`, or tensors that are missing, unknown, wrong-shaped or, where a model
    would load them, NaN or infinite.
    """
    if to not in ("zoo", "hf"):
        raise ValueError(f"--to {to!r} is not one of zoo, hf")
    check_shard_bytes(shard_bytes)
    source = Checkpoint.open(path)
    made = model_class(source.config)
    table = made.family.table(made.family.config.from_hf(source.config))
    with fresh_folder(out) as folder:
        for name, file in source.files.items():
            file.write(folder / name)
        if to == "zoo":
            _to_zoo(source, table, folder, shard_bytes)
        else:
            _to_hf(source, table, folder, shard_bytes)


def has_zoo_names(source: Checkpoint, table: WeightTable) -> bool:
    """Whether the tensors are named as the zoo's parameters: more of their names are the zoo's alone than published ones alone."""
    ours = {entry.ours for entry in table.entries}
    theirs = {piece.published for entry in table.entries for layout in entry.layouts for piece in layout}
    return sum(name in ours - theirs for name in source.tensors) > sum(name in theirs - ours for name in source.tensors)


def match_zoo(source: Checkpoint, table: WeightTable) -> list[str]:
    """The stored names that are no parameters: aliases and what is carried. ValueError unless the others are all parameters in the
    zoo's naming, naming what is missing, unknown or wrong-shaped."""
    stored = source.tensors
    ours = {entry.ours for entry in table.entries}
    missing = sorted(ours - set(stored))
    aliases = {piece.published for entry in table.entries if entry.optional_alias for piece in entry.layouts[0]}
    kept = [name for name in stored if name not in ours]
    unknown = [name for name in kept if name not in aliases and not table.is_carried(name)]
    if missing or unknown:
        faults = f"{len(missing)} parameters missing {missing[:4]}, {len(unknown)} unknown {unknown[:4]}"
        raise ValueError(f"{source.folder} is not in the zoo's naming: {faults}")
    pieces: dict[str, list[Piece]] = {}
    for entry, piece in table.pieces():
        pieces.setdefault(entry.ours, []).append(piece)
    for name, its in pieces.items():
        if stored[name].shape != _shape(its):
            raise ValueError(f"{source.folder}: {name} is {list(stored[name].shape)} where the config needs {list(_shape(its))}")
    return kept


def _to_zoo(source: Checkpoint, table: WeightTable, folder: Path, shard_bytes: int) -> None:
    match = source.match(table)
    stored = source.tensors
    members: dict[str, list[str]] = {}
    for name, (entry, _) in match.places.items():
        if not entry.optional_alias:
            members.setdefault(entry.ours, []).append(name)
    kept = [name for name in stored if name in match.carried or match.places[name][0].optional_alias]
    specs = [(ours, DTYPES[stored[names[0]].dtype], _shape([match.places[n][1] for n in names])) for ours, names in members.items()]
    empty = {ours: (shape, dtype) for ours, dtype, shape in specs}
    specs += [(name, DTYPES[stored[name].dtype], stored[name].shape) for name in kept]

    def read(name: str) -> Tensor:
        if name not in members:
            return stored[name].read() if table.is_carried(name) else finite(stored[name])
        shape, dtype = empty[name]
        out = torch.empty(shape, dtype=dtype)
        for published in members[name]:
            match.places[published][1].of(out).copy_(finite(stored[published]))
        return out

    write_shards(folder, specs, read, shard_bytes)


def _to_hf(source: Checkpoint, table: WeightTable, folder: Path, shard_bytes: int) -> None:
    stored = source.tensors
    kept = match_zoo(source, table)
    places = {piece.published: (entry.ours, piece) for entry, piece in table.pieces()}
    specs = [(name, DTYPES[stored[owner].dtype], piece.shape) for name, (owner, piece) in places.items()]
    specs += [(name, DTYPES[stored[name].dtype], stored[name].shape) for name in kept]
    parameter = functools.lru_cache(maxsize=1)(lambda name: finite(stored[name]))  # pieces of one parameter follow each other

    def read(name: str) -> Tensor:
        if name not in places:
            return stored[name].read() if table.is_carried(name) else finite(stored[name])
        owner, piece = places[name]
        return piece.of(parameter(owner))

    write_shards(folder, specs, read, shard_bytes)


def finite(stored: StoredTensor) -> Tensor:
    """A tensor that a model would load. ValueError naming it if it holds a NaN or an infinity."""
    tensor = stored.read()
    check_finite(stored.name, tensor)
    return tensor


def _shape(pieces: list[Piece]) -> tuple[int, ...]:
    """Shape of the parameter that these pieces tile."""
    rows = max(piece.start + piece.shape[0] for piece in pieces)
    stacked = () if pieces[0].expert is None else (1 + max(piece.expert or 0 for piece in pieces),)
    return (*stacked, rows, *pieces[0].shape[1:])
