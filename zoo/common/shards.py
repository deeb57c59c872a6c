"""The safetensors format: headers checked without touching data, tensors read and written one at a time, byte for byte."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.common.reading import JSON_BYTES, clipped, parse_object, shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DIMENSIONS = 16  # of a stored tensor, and bits of one of them
DIMENSION_BITS = 48


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self) -> Tensor:
        """The tensor on the CPU, in memory of its own."""
        out = torch.empty(self.nbytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            got = file.readinto(out.numpy().data)
        if got != self.nbytes:
            raise ValueError(f"{self.path}: {self.name} has {self.nbytes} bytes, only {got} could be read; the file changed")
        return out.view(DTYPES[self.dtype]).view(self.shape)

    def read_runs(self, dim: int, runs: Sequence[tuple[int, int]]) -> Tensor:
        """The runs [begin, end) along a dimension, one behind the other, on the CPU; nothing else of the tensor is read."""
        outer = math.prod(self.shape[:dim])
        inner = math.prod(self.shape[dim + 1 :]) * DTYPES[self.dtype].itemsize
        held = sum(end - begin for begin, end in runs)
        out = torch.empty(outer * held * inner, dtype=torch.uint8)
        room = out.numpy().data
        filled = 0
        with self.path.open("rb") as file:
            for place in range(outer):
                for begin, end in runs:
                    wanted = (end - begin) * inner
                    file.seek(self.offset + (place * self.shape[dim] + begin) * inner)
                    got = file.readinto(room[filled : filled + wanted])
                    if got != wanted:
                        raise ValueError(
                            f"{self.path}: {wanted} bytes of {self.name} are wanted, only {got} could be read; the file changed"
                        )
                    filled += wanted
        return out.view(DTYPES[self.dtype]).view(*self.shape[:dim], held, *self.shape[dim + 1 :])


@dataclass(frozen=True)
class Shard:
    """One file: its header (8-byte length included) and its tensors in the order of their data.

    stored  the header that the file has, where its tensors are told in another form
    """

    name: str
    header: bytes
    tensors: tuple[StoredTensor, ...]
    stored: bytes = b""


def read_shard(path: Path) -> Shard:
    """Reads and checks a header. ValueError in one sentence for a file that is truncated or malformed."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < 8:
            raise ValueError(f"{path} is truncated or no safetensors file: it has {size} bytes, the length of its header alone takes 8")
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise ValueError(f"{path} is truncated or no safetensors file: its header should have {length} bytes, the file has {size}")
        if length > JSON_BYTES:
            raise ValueError(f"{path} has a header of {length:,} bytes, {JSON_BYTES:,} is the most that is read")
        raw = file.read(length)
    try:
        fields = parse_object(path, raw)
        tensors = [_stored(name, spec, path, 8 + length) for name, spec in fields.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: the safetensors header is malformed ({clipped(str(error), 300)})") from error
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            raise ValueError(f"{path}: data of {clipped(tensor.name)} starts at byte {tensor.offset}, it should start at {end}")
        end += tensor.nbytes
    if end != size:
        raise ValueError(f"{path} is {'truncated' if size < end else 'too long'}: its header describes {end} bytes, the file has {size}")
    return Shard(path.name, length.to_bytes(8, "little") + raw, tuple(tensors))


def _stored(name: str, spec: dict[str, Any], path: Path, base: int) -> StoredTensor:
    if spec["dtype"] not in DTYPES:
        raise ValueError(f"{clipped(name)} has the unknown dtype {shown(spec['dtype'])}")
    begin, end = spec["data_offsets"]
    if len(spec["shape"]) > DIMENSIONS:
        raise ValueError(f"{clipped(name)} has {len(spec['shape'])} dimensions, {DIMENSIONS} is the most")
    odd = [v for v in (*spec["shape"], begin, end) if not isinstance(v, int) or v < 0 or v.bit_length() > DIMENSION_BITS]
    if odd:
        raise ValueError(f"{clipped(name)} has {shown(odd[0])} in its shape or range, which hold integers of 0 to 2^{DIMENSION_BITS}")
    stored = StoredTensor(name, spec["dtype"], tuple(spec["shape"]), path, base + begin)
    if end - begin != stored.nbytes:
        raise ValueError(f"{clipped(name)} {stored.dtype} {list(stored.shape)} needs {stored.nbytes} bytes, its range has {end - begin}")
    return stored


def header_of(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The header of a file that holds these tensors in this order."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def write_shard(path: Path, header: bytes, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Writes a header and then the tensors' bytes, one tensor in memory at a time."""
    with path.open("wb") as file:
        file.write(header)
        for name in names:
            file.write(read(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_shards(
    folder: Path, specs: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], read: Callable[[str], Tensor], shard_bytes: int
) -> None:
    """Tensors in the given order, in files of at most `shard_bytes` (one tensor may be more); several get an index."""
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    room = shard_bytes
    total = 0
    for name, dtype, shape in specs:
        size = torch.Size(shape).numel() * dtype.itemsize
        if groups[-1] and size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append((name, dtype, shape))
        room -= size
        total += size
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_shard(folder / file, header_of(group), [name for name, *_ in group], read)
        weight_map |= {name: file for name, *_ in group}
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
