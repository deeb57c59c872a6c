"""Checkpoints in Hugging Face format: strict reading, and writing back byte for byte."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common.files import fresh_folder
from zoo.common.hub import SIDECARS, locate
from zoo.common.ops.fp8_quantise.reference import LARGEST
from zoo.common.reading import CONFIG_BYTES, JSON_BYTES, parse_object, read_bytes, shown, some
from zoo.common.shards import (
    DTYPES,
    INDEX,
    NAMES,
    SINGLE,
    Shard,
    StoredTensor,
    header_of,
    read_shard,
    write_shard,
    write_shards,
)
from zoo.common.weights import Entry, Piece, WeightTable, check_table
from zoo.testing import finite

SHARD_BYTES = 5 * 10**9
LARGEST_SCALE = torch.finfo(torch.bfloat16).max / LARGEST  # of FP8 codes
HELD_BYTES = 64 << 20  # of small files that are held in memory; larger ones are copied from where they lie
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # transformers would change the weights by them
TENSORS = 300_000  # of a checkpoint; the published ones with most have 120,000


@dataclass(frozen=True)
class Match:
    """Which published tensor of a checkpoint fills which place: published name -> (entry, piece)."""

    places: dict[str, tuple[Entry, Piece]]
    carried: tuple[str, ...]

    def local(self, table: WeightTable) -> Match:
        """The places of one rank, whose table this is. What is published of other ranks' experts has none."""
        places = {name: table.known[name] for name in self.places if name in table.known}
        return Match({name: (entry, piece) for name, (entry, _, piece) in places.items()}, self.carried)


@dataclass(frozen=True)
class SideFile:
    """A small file beside the weights. `content` is None for one too large to be held, which is copied from where it lies."""

    path: Path
    size: int
    changed: int
    content: bytes | None

    def write(self, path: Path) -> None:
        """The same bytes at `path`. ValueError for a file that was not held and is no longer as it was."""
        if self.content is not None:
            path.write_bytes(self.content)
            return
        now = self.path.stat() if self.path.is_file() else None
        if now is None or (now.st_size, now.st_mtime_ns) != (self.size, self.changed):
            raise ValueError(f"{self.path} has changed since it was loaded; it was too large to be held and can't be carried through")
        shutil.copyfile(self.path, path)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: headers, config and small files are read and checked, no tensor is.

    files  config.json, tokenizer and generation files by name: all that save copies through
    """

    folder: Path
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    index: bytes | None
    files: dict[str, SideFile]

    @classmethod
    def open(cls, path_or_hub_id: str | Path, revision: str | None = None) -> Checkpoint:
        """ValueError in one sentence for whatever is missing, truncated or contradictory, or more than any model needs.

        Warns of what does no harm: a file of weights that is not of this checkpoint, a wrong total_size in the index.
        """
        folder = locate(path_or_hub_id, revision)
        adapters = [name for name in ADAPTERS if (folder / name).exists()]
        if adapters:
            raise ValueError(f"{folder} has {' and '.join(adapters)}: merge the adapter into the weights, or move its files away")
        names = {p.name for pattern in SIDECARS for p in folder.glob(pattern) if p.is_file()} - {INDEX}
        if "config.json" not in names:
            raise ValueError(f"{folder} has no config.json")
        raw = read_bytes(folder / "config.json", CONFIG_BYTES)
        config = parse_object(folder / "config.json", raw)
        index = read_bytes(folder / INDEX, JSON_BYTES) if (folder / INDEX).is_file() else None
        checkpoint = cls(folder, config, tuple(_shards(folder, index)), index, _side_files(folder, names, raw))
        twice = [n for n, count in Counter(t.name for s in checkpoint.shards for t in s.tensors).items() if count > 1]
        if twice:
            raise ValueError(f"{folder}: {some(twice)} stand in more than one file")
        checkpoint._warn()
        return checkpoint

    def _warn(self) -> None:
        used = {shard.name for shard in self.shards}
        stray = sorted(path.name for path in self.folder.glob("*.safetensors") if path.name not in used)
        if stray:
            warnings.warn(f"{self.folder}: not read, since they are not of this checkpoint: {some(stray)}", stacklevel=3)
        if self.index is None:
            return
        metadata = parse_object(self.folder / INDEX, self.index).get("metadata")
        told = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)
        if told is not None and told != total:
            warnings.warn(f"{self.folder}: {INDEX} has total_size {shown(told)}, the tensors have {total} bytes", stacklevel=3)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    def match(self, table: WeightTable) -> Match:
        """Finds every parameter's layout by names and shapes. ValueError naming what is missing, unknown or wrong-shaped."""
        stored = self.tensors
        small = [name for name, tensor in stored.items() if DTYPES[tensor.dtype].itemsize == 1 and name in table.known]
        codes = [name for name in small if table.known[name][0].codec is None]
        if codes:
            raise ValueError(
                f"{self.folder}: {len(codes)} tensors are codes of one byte, and config.json says nothing of them: {some(codes)}; put "
                "the published config.json with its quantization_config there, or load the model's BF16 checkpoint"
            )
        places: dict[str, tuple[Entry, Piece]] = {}
        missing: list[str] = []
        for entry in table.entries:
            layout = max(entry.layouts, key=lambda pieces: sum(p.published in stored for p in pieces) / len(pieces))
            absent = [p.published for p in layout if p.published not in stored]
            missing += [] if entry.optional_alias else absent
            places |= {p.published: (entry, p) for p in layout if p.published in stored}
        rest = [name for name in stored if name not in places]
        unknown = [name for name in rest if not table.is_carried(name)]
        shapes = [
            f"{name} {list(stored[name].shape)} where the config needs {list(piece.shape)}"
            for name, (_, piece) in places.items()
            if stored[name].shape != piece.shape
        ]
        faults = [(missing, "missing"), (unknown, "unknown"), (shapes, "of a wrong shape")]
        if any(names for names, _ in faults):
            own = bool(unknown) and {*unknown} <= {entry.ours for entry in table.entries}
            hint = " (the zoo's own names: `weights-tools convert --to hf` makes a checkpoint that loads)" if own else ""
            raise ValueError(f"{self.folder}: " + "; ".join(f"{len(n)} tensors {what}: {some(n)}" for n, what in faults if n) + hint)
        return Match(places, tuple(name for name in rest if name not in unknown))

    def main_dtype(self, match: Match) -> torch.dtype:
        """The stored dtype of the most elements, entries of a dtype of their own left out."""
        stored = self.tensors
        elements = Counter[str]()
        for name, (entry, _) in match.places.items():
            if not entry.fixed:
                elements[stored[name].dtype] += stored[name].nbytes // DTYPES[stored[name].dtype].itemsize
        return DTYPES[elements.most_common(1)[0][0]]


def check_shard_bytes(shard_bytes: int) -> None:
    """ValueError unless it is a size of files."""
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise ValueError(f"shard_bytes must be an integer of at least 1, not {shown(shard_bytes)}")


def check_dtypes(checkpoint: Checkpoint, match: Match, module: nn.Module, convert: bool) -> None:
    """Stored dtypes against the parameters'. An FP32 entry may be stored narrower (widening is exact); `convert` allows one
    rounding."""
    check_parameter_dtypes(checkpoint, match, _parameters(module), convert)


def check_parameter_dtypes(checkpoint: Checkpoint, match: Match, parameters: Mapping[str, Tensor], convert: bool) -> None:
    """The same for parameters by our name."""
    stored = checkpoint.tensors
    floats = {torch.float32, torch.float16, torch.bfloat16}  # from float64 torch would round twice
    wrong = []
    helps = True
    for name, (entry, _) in match.places.items():
        have = DTYPES[stored[name].dtype]
        want = entry.stored(parameters[entry.ours].dtype)
        allowed = {want, *entry.alike} | (floats if want in floats and (convert or entry.widens) else set())
        if have not in allowed:
            wrong.append(f"{name} is {stored[name].dtype} where the program needs {NAMES[want]}")
            helps &= have in floats
    if wrong:
        hint = "; dtype=torch.bfloat16 rounds floating-point weights once at load" if helps and not convert else ""
        raise ValueError(f"{checkpoint.folder}: {len(wrong)} tensors of a wrong dtype: {some(wrong)}{hint}")


def fill(module: nn.Module, checkpoint: Checkpoint, match: Match) -> None:
    """Streams every tensor into the module's allocated parameters. ValueError naming a NaN, an infinity or a differing alias."""
    fill_parameters(_parameters(module), checkpoint, match)


@torch.no_grad()
def fill_parameters(parameters: Mapping[str, Tensor], checkpoint: Checkpoint, match: Match) -> None:
    """The same for parameters by our name: the whole ones, or with a rank's match those of a rank."""
    aliases = []
    for stored in (tensor for shard in checkpoint.shards for tensor in shard.tensors):
        if stored.name not in match.places:
            continue
        entry, piece = match.places[stored.name]
        if entry.optional_alias:
            aliases.append((stored, entry, piece))
            continue
        view = piece.of(parameters[entry.ours])
        view.copy_(entry.taken(stored.name, _read(stored, piece)))
        check_values(stored.name, view, entry)
    for stored, entry, piece in aliases:
        check_alias(stored.name, _read(stored, piece), entry.publish(piece.of(parameters[entry.ours])), entry.ours)


def _read(stored: StoredTensor, piece: Piece) -> Tensor:
    """What of a stored tensor fills the place. Of one that ranks share no other rank's part is read."""
    if piece.cut is None or not piece.taken:
        return stored.read()
    return stored.read_runs(piece.cut.dim, piece.taken)


def check_values(name: str, tensor: Tensor, entry: Entry) -> None:
    """ValueError for a NaN or an infinity, for a table of integers that its entry forbids, and for FP32 scales that no code can have."""
    check_finite(name, tensor)
    if entry.multiplies and tensor.dtype is torch.float32 and tensor.numel():
        check_scales(name, tensor)
    if entry.below:
        check_table(name, tensor, entry.below)


def check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        return
    bad = ~finite(tensor)
    if bool(bad.any()):
        raise ValueError(f"{name} has {int(bad.sum())} NaN or infinite values, the first at {bad.nonzero()[0].tolist()}")


def check_scales(name: str, scales: Tensor) -> None:
    smallest = float(scales.min())
    if smallest < 0:
        raise ValueError(f"{name} has the scale {smallest:g}: a scale of FP8 codes is not below 0")
    largest = float(scales.max())
    if largest > LARGEST_SCALE:
        raise ValueError(f"{name} has the scale {largest:g}, beyond {LARGEST_SCALE:g}: times the largest code it is no BF16 number")


def check_alias(name: str, tensor: Tensor, tied: Tensor, ours: str) -> None:
    """The alias of a tied tensor must be the same bytes."""
    alias = tensor.to(tied.device, tied.dtype)
    differing = int((alias.contiguous().view(torch.uint8) != tied.contiguous().view(torch.uint8)).sum())
    if differing:
        raise ValueError(f"{name} must equal the tied {ours}, {differing} bytes differ")


@torch.no_grad()
def save(
    read: Callable[[str], Tensor],
    table: WeightTable,
    usual: torch.dtype,
    config: dict[str, Any],
    path: str | Path,
    source: Checkpoint | None,
    shard_bytes: int,
    *,
    masters: bool = False,
) -> None:
    """Writes a checkpoint: as `source` was when the module was loaded from one, else shards of at most `shard_bytes`.

    `read`: our name of a parameter -> it as it is written. `usual`: the program's dtype. With `masters` it gives those as they are.
    """

    written = _written(usual, masters)
    if source is None:
        places = {piece.published: (entry, piece) for entry, piece in table.pieces()}
        specs = [(name, written(entry), piece.shape) for name, (entry, piece) in places.items()]

        def published(name: str) -> Tensor:
            entry, piece = places[name]
            return piece.of(read(entry.ours))

        with fresh_folder(path) as folder:
            fields = _with_dtype(config, [dtype for _, dtype, _ in specs])
            (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
            write_shards(folder, specs, published, shard_bytes)
        return
    match = source.match(table)
    stored = source.tensors
    for shard in source.shards:  # carried tensors are read from where they were
        if any(t.name in match.carried for t in shard.tensors) and read_shard(shard.tensors[0].path).header != (
            shard.stored or shard.header
        ):
            raise ValueError(f"{shard.tensors[0].path} has changed since it was loaded; its unused tensors can't be carried through")

    def value(name: str) -> Tensor:
        if name not in match.places:
            return stored[name].read()
        entry, piece = match.places[name]
        ours = piece.of(read(entry.ours))
        return ours.view(dtypes[name]) if dtypes[name] in entry.alike else ours.to(dtypes[name])

    dtypes = {name: DTYPES[tensor.dtype] for name, tensor in stored.items()}
    for name, (entry, piece) in match.places.items():
        if _may_narrow(entry, dtypes[name], written):
            ours = piece.of(read(entry.ours))
            if torch.equal(ours.to(dtypes[name]).to(ours.dtype), ours):
                continue
        if dtypes[name] not in entry.alike:
            dtypes[name] = written(entry)
    with fresh_folder(path) as folder:
        for name, file in source.files.items():
            file.write(folder / name)
        (folder / "config.json").write_bytes(_config_bytes(source, match, dtypes))
        total = 0
        for shard in source.shards:
            same = all(DTYPES[t.dtype] == dtypes[t.name] for t in shard.tensors)
            header = shard.header if same else header_of((t.name, dtypes[t.name], t.shape) for t in shard.tensors)
            write_shard(folder / shard.name, header, [t.name for t in shard.tensors], value)
            total += sum(t.nbytes // DTYPES[t.dtype].itemsize * dtypes[t.name].itemsize for t in shard.tensors)
        if source.index is not None:
            if total != sum(t.nbytes for t in stored.values()):
                index = json.loads(source.index)
                metadata = index.get("metadata")
                index["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": total}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            else:
                (folder / INDEX).write_bytes(source.index)


def reading_order(table: WeightTable, usual: torch.dtype, source: Checkpoint | None, *, masters: bool = False) -> list[str]:
    """Our names in the order in which `save` reads them, the same one several times."""
    if source is None:
        return [entry.ours for entry, _ in table.pieces()]
    match = source.match(table)
    stored = source.tensors
    written = _written(usual, masters)
    looked_at = [entry.ours for name, (entry, _) in match.places.items() if _may_narrow(entry, DTYPES[stored[name].dtype], written)]
    return looked_at + [match.places[t.name][0].ours for shard in source.shards for t in shard.tensors if t.name in match.places]


def _written(usual: torch.dtype, masters: bool) -> Callable[[Entry], torch.dtype]:
    """The dtype in which an entry's tensors are written."""
    return lambda entry: entry.held(usual) if masters and entry.is_master else entry.stored(usual)


def _may_narrow(entry: Entry, stored: torch.dtype, written: Callable[[Entry], torch.dtype]) -> bool:
    """Whether an FP32 parameter was stored narrower: it goes back narrower only while that loses nothing."""
    return entry.codec is None and entry.widens and stored != written(entry)


def _side_files(folder: Path, names: Iterable[str], config: bytes) -> dict[str, SideFile]:
    """The small files, smallest first held in memory; config.json, which was read, always is."""
    found = {}
    room = HELD_BYTES
    sizes = {name: (folder / name).stat() for name in names}
    for name in sorted(names, key=lambda name: (sizes[name].st_size, name)):
        size = sizes[name].st_size
        content = config if name == "config.json" else (folder / name).read_bytes() if size <= room else None
        room -= 0 if content is None else len(content)
        found[name] = SideFile(folder / name, size, sizes[name].st_mtime_ns, content)
    return dict(sorted(found.items()))


def _shards(folder: Path, index: bytes | None) -> Iterator[Shard]:
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    if index is None:
        if SINGLE not in present and len(present) != 1:
            what = f"{len(present)} .safetensors files and no {INDEX}" if present else "no .safetensors file"
            raise ValueError(f"{folder} has {what}")
        yield read_shard(folder / (SINGLE if SINGLE in present else present[0]))
        return
    weight_map = parse_object(folder / INDEX, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    if len(weight_map) > TENSORS:
        raise ValueError(f"{folder / INDEX} names {len(weight_map):,} tensors, {TENSORS:,} is the most that is read")
    odd = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if odd:
        raise ValueError(f"{folder / INDEX} names no file for {some(odd)}")
    files = sorted(set(weight_map.values()))
    outside = [f for f in files if Path(f).name != f]
    if outside:
        raise ValueError(f"{folder / INDEX} names files outside its folder: {some(outside)}")
    absent = [f for f in files if f not in present]
    if absent:
        raise ValueError(f"{folder}: {INDEX} names {len(absent)} absent files: {some(absent)}")
    listed: dict[str, set[str]] = {file: set() for file in files}
    for name, file in weight_map.items():
        listed[file].add(name)
    for file in files:
        shard = read_shard(folder / file)
        differing = sorted(listed[file] ^ {t.name for t in shard.tensors})
        if differing:
            raise ValueError(f"{folder}: {INDEX} and {file} disagree on {len(differing)} tensors: {some(differing)}")
        yield shard


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def _config_bytes(source: Checkpoint, match: Match, dtypes: dict[str, torch.dtype]) -> bytes:
    """config.json as it was, unless the weights were converted: then every dtype field of theirs follows them."""
    stored = source.tensors
    if all(DTYPES[stored[name].dtype] == dtypes[name] for name in match.places):
        content = source.files["config.json"].content
        assert content is not None, "config.json is always held"
        return content
    fields = _with_dtype(source.config, [dtypes[name] for name in match.places])
    return (json.dumps(fields, indent=2) + "\n").encode()


def _with_dtype(config: dict[str, Any], dtypes: list[torch.dtype]) -> dict[str, Any]:
    """A config.json whose dtype fields, outside and in text_config, name the dtype of the most tensors."""
    main = str(Counter(dtypes).most_common(1)[0][0]).removeprefix("torch.")
    fields: dict[str, Any] = {name: main if name in ("dtype", "torch_dtype") else value for name, value in config.items()}
    if "text_config" in fields:
        fields["text_config"] = _with_dtype(fields["text_config"], dtypes)
    return fields
