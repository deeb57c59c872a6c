"""A BF16 checkpoint into codes with scales, FP8 blocks or MXFP4, and back; one matrix in memory at a time."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from weights_tools.forms import in_form, is_plain
from zoo.common.checkpoint import Checkpoint, SideFile, check_finite
from zoo.common.codecs import BlockScaled, MxFp4
from zoo.common.decoded import coded, decoded
from zoo.common.files import check_space, fresh_folder
from zoo.common.reading import parse_object, some
from zoo.common.registry import model_class
from zoo.common.shards import DTYPES, INDEX, NAMES, Shard, StoredTensor, header_of, write_shard
from zoo.common.weights import Entry

VALUES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class EncodedTensor(StoredTensor):
    """One of the tensors that stored values become: codes, or the scales beside them."""

    values: StoredTensor
    codec: BlockScaled | MxFp4
    part: int

    def read(self) -> Tensor:
        return _encoded(self.values, self.codec)[self.part].to(DTYPES[self.dtype])


@functools.lru_cache(maxsize=1)  # codes and their scales are written one after another
def _encoded(values: StoredTensor, codec: BlockScaled | MxFp4) -> tuple[Tensor, ...]:
    tensor = values.read()
    check_finite(values.name, tensor)
    try:
        return codec.encode(tensor)
    except ValueError as error:
        raise ValueError(f"{values.name}: {error}") from error


def quantize(path: str | Path, out: str | Path, form: str) -> None:
    """Writes the BF16 checkpoint at `path` in codes and scales: a family's `form`, "fp8" or "mxfp4". All else goes along unchanged.

    ValueError, and no folder, for a checkpoint that has codes already, that is incomplete or not finite, for values that a form has no
    codes for, for a form that the family has not, or a non-empty `out`.
    """
    source = Checkpoint.open(path)
    family = model_class(source.config).family
    if not is_plain(source.config):
        raise ValueError(f"{source.folder} has codes already: dequantize it first")
    fields = in_form(family, source.config, form)
    if fields == source.config:
        raise ValueError(f"{source.folder} has this form: --form names one with codes")
    source.match(family.table(family.config.from_hf(source.config)))
    pairs = coded(family.table(family.config.from_hf(fields)))
    odd = [f"{name} {tensor.dtype}" for name, tensor in source.tensors.items() if name in pairs and tensor.dtype not in VALUES]
    if odd:
        raise ValueError(f"{source.folder}: {len(odd)} tensors are no values that could be quantised: {some(odd)}")
    shards = tuple(_told(shard, [told for tensor in shard.tensors for told in _in_codes(tensor, pairs)]) for shard in source.shards)
    text = (json.dumps(fields, indent=2) + "\n").encode()
    own = source.files["config.json"]
    files = {**source.files, "config.json": SideFile(own.path, len(text), own.changed, text)}
    _write(replace(source, shards=shards, files=files, index=_index(source, shards)), out)


def dequantize(path: str | Path, out: str | Path) -> None:
    """Writes the checkpoint at `path` with BF16 values for codes and scales: a value in four bits exactly, one of FP8 rounded once.

    ValueError, and no folder, for a checkpoint without codes, one that is incomplete, a scale that is NaN or beyond BF16, or a
    non-empty `out`.
    """
    source = Checkpoint.open(path)
    if is_plain(source.config):
        raise ValueError(f"{source.folder} has no codes: its config.json has no quantization_config")
    family = model_class(source.config).family
    seen = decoded(source, family.table(family.config.from_hf(source.config)))
    seen.match(family.table(family.config.from_hf(seen.config)))
    _write(seen, out)


def _in_codes(tensor: StoredTensor, pairs: Mapping[str, tuple[str, tuple[Entry, Entry]]]) -> Iterator[StoredTensor]:
    """What a stored tensor becomes: itself, or codes and scales."""
    if tensor.name not in pairs:
        yield tensor
        return
    beside, (owner, scales) = pairs[tensor.name]
    codec = owner.codec
    assert isinstance(codec, BlockScaled | MxFp4), "codes have a codec"
    codes = codec.packed(tensor.shape)
    parts = ((tensor.name, owner, codes), (beside, scales, codec.scales(codes)))
    for part, (name, entry, shape) in enumerate(parts):
        yield EncodedTensor(name, NAMES[entry.stored(torch.bfloat16)], shape, tensor.path, tensor.offset, tensor, codec, part)


def _told(shard: Shard, tensors: list[StoredTensor]) -> Shard:
    header = header_of((tensor.name, DTYPES[tensor.dtype], tensor.shape) for tensor in tensors)
    return Shard(shard.name, header, tuple(tensors), stored=shard.header)


def _index(source: Checkpoint, shards: tuple[Shard, ...]) -> bytes | None:
    if source.index is None:
        return None
    fields = parse_object(source.folder / INDEX, source.index)
    fields["weight_map"] = dict(sorted((tensor.name, shard.name) for shard in shards for tensor in shard.tensors))
    metadata = fields.get("metadata")
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    fields["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": total}
    return (json.dumps(fields, indent=2) + "\n").encode()


def _write(told: Checkpoint, out: str | Path) -> None:
    """A checkpoint as it is told: every tensor read, and so checked, before the folder has its name."""
    check_space(out, sum(tensor.nbytes for shard in told.shards for tensor in shard.tensors))
    try:
        with fresh_folder(out) as folder:
            for name, file in told.files.items():
                file.write(folder / name)
            if told.index is not None:
                (folder / INDEX).write_bytes(told.index)
            for shard in told.shards:
                stored = {tensor.name: tensor for tensor in shard.tensors}
                write_shard(folder / shard.name, shard.header, stored, lambda name, stored=stored: stored[name].read())  # type: ignore[misc]
    finally:
        _encoded.cache_clear()
