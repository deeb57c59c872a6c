"""What a checkpoint holds, from its headers; the content hash streams the data one tensor at a time."""

from __future__ import annotations

import functools
from collections import Counter

from rich.table import Table

from weights_tools.convert import finite, has_zoo_names, match_zoo
from zoo.common.checkpoint import Checkpoint
from zoo.common.fingerprint import content_hash
from zoo.common.hashing import checksums
from zoo.common.registry import model_class
from zoo.common.terminal import Terminal
from zoo.common.weights import WeightTable

WIDE = 200  # columns of a file or pipe, where names are not folded


def show(path: str, revision: str | None = None, content: bool = True) -> None:
    """Prints the tables. ValueError for a checkpoint that can't be opened; an unsupported one is shown with the reason."""
    console = Terminal(WIDE)
    source = Checkpoint.open(path, revision)
    stored = source.tensors
    try:
        made = model_class(source.config)
        table: WeightTable | None = made.family.table(made.family.config.from_hf(source.config))
        known = f"a checkpoint of {made.__name__}"
    except ValueError as error:
        table = None
        known = f"not supported: {error}"
    own = table is not None and has_zoo_names(source, table)
    if own:
        known += ", in the zoo's own names: `convert --to hf` makes one that loads"

    summary = Table(title=str(source.folder), show_header=False)
    summary.add_row("model_type", str(source.config.get("model_type")))
    summary.add_row("zoo", known)
    dtypes = Counter[str]()
    for tensor in stored.values():
        dtypes[tensor.dtype] += tensor.nbytes
    summary.add_row("tensors", f"{len(stored)}, " + ", ".join(f"{n} {_size(b)}" for n, b in dtypes.most_common()))
    summary.add_row("files", ", ".join(source.files))
    fault = ""
    hashed = ""
    if table is not None:
        try:
            match_zoo(source, table) if own else source.match(table)
            hashed = _hash(source, table, own) if content else ""
        except ValueError as error:
            fault = str(error)
            summary.add_row("fault", fault)
    if content and table is not None:
        summary.add_row("content hash", "none: see fault" if fault else hashed)
    console.print(summary)

    config = Table("field", "value", title="config.json")
    for name, value in source.config.items():
        config.add_row(name, str(value))
    console.print(config)

    shards = Table("shard", "tensors", "bytes", title="shards")
    for shard in source.shards:
        shards.add_row(shard.name, str(len(shard.tensors)), _size(sum(t.nbytes for t in shard.tensors)))
    console.print(shards)

    use = _uses(table, own)
    listing = Table(title="tensors")
    for heading in ("tensor", "dtype", "shape", "bytes", "used as"):
        listing.add_column(heading, overflow="fold")
    for tensor in stored.values():
        role = use.get(tensor.name) or ("" if table is None else "carried through" if table.is_carried(tensor.name) else "UNKNOWN")
        listing.add_row(tensor.name, tensor.dtype, str(list(tensor.shape)), _size(tensor.nbytes), role)
    console.print(listing)


def content_hash_of(source: Checkpoint) -> str:
    """The content hash of a model with these weights, whatever their form; "none: " and the reason where there is none.

    Streams the data once.
    """
    try:
        table = table_of(source)
        own = has_zoo_names(source, table)
        if own:
            match_zoo(source, table)
        return _hash(source, table, own)
    except ValueError as error:
        return f"none: {error}"


def table_of(source: Checkpoint) -> WeightTable:
    """The weight table of a checkpoint's config. ValueError for an architecture or config that is not supported."""
    made = model_class(source.config)
    return made.family.table(made.family.config.from_hf(source.config))


def _uses(table: WeightTable | None, own: bool) -> dict[str, str]:
    if table is None:
        return {}
    if own:
        made: dict[str, list[str]] = {}
        for entry, piece in table.pieces():
            made.setdefault(entry.ours, []).append(piece.published)
        return {ours: names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") for ours, names in made.items()}
    return {
        piece.published: entry.ours
        + ("" if piece.expert is None else f"[{piece.expert}]")
        + (f" from row {piece.start}" if piece.start else "")
        + (f", codes of {list(entry.codec.values(piece.shape))}" if entry.codec is not None and entry.beside else "")
        for entry in table.entries
        for layout in entry.layouts
        for piece in layout
    }


def _hash(source: Checkpoint, table: WeightTable, own: bool) -> str:
    """The content hash that a model loaded from here reports as weights_version; only of checkpoints in the default layout,
    with either prefix.

    ValueError for a NaN or an infinity in any tensor that is loaded."""
    stored = source.tensors
    places = {} if own else {table.canonical(name): name for name in source.match(table).places}
    absent = [] if own else [piece.published for _, piece in table.pieces() if table.canonical(piece.published) not in places]
    if absent:
        for name in places.values():
            finite(stored[name])
        return f"none: {absent[0]} is not stored"
    parameter = functools.lru_cache(maxsize=1)(lambda name: finite(stored[name]))  # pieces of one parameter follow each other
    parts = []
    for entry, piece in table.pieces():
        name = table.canonical(piece.published)
        tensor = piece.of(parameter(entry.ours)) if own else finite(stored[places[name]])
        tensor = entry.taken(name, tensor).to(entry.stored(tensor.dtype))
        checksum = int(checksums(tensor.reshape(1, tensor.shape[0], -1)))
        parts.append((name, str(tensor.dtype), tuple(tensor.shape), checksum))
    return content_hash(parts)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
