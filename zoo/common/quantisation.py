"""Checkpoints whose matrices are FP8 codes with a scale a block: what config.json says of them, and the weight table that follows.

The published format is transformers' `finegrained_fp8`: codes in e4m3 and beside them a tensor of FP32 scales named inverse, which
multiply, one for each block of 128 x 128. With scale_fmt "ue8m0" scales are powers of two, stored as exponents, and have names of their
own. What a program computes with stands in `zoo.common.program`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zoo.common.codecs import BlockScaled, Exponents
from zoo.common.config import FieldReader
from zoo.common.ops.fp8_quantise import FP32_SCALES, GROUP, POWERS_OF_TWO, ScaleRule
from zoo.common.reading import shown
from zoo.common.weights import LARGEST_FP8_SCALE, Entry, Piece, WeightTable, scale_name

FIELD = "quantization_config"
SCALES = "_scale_inv"  # behind the name of the codes
EXPONENTS = ".scale"  # in place of the last part of it
BLOCKS = BlockScaled(GROUP, GROUP)
POWER_BLOCKS = BlockScaled(GROUP, GROUP, power_of_two=True)
FORMAT = "ue8m0"  # of scales that are exponents
# of quantization_config: the one value that is read, and whether it may be missing
_FIXED = {
    "quant_method": ("fp8", False),
    "weight_block_size": ([GROUP, GROUP], False),
    "activation_scheme": ("dynamic", True),
    "fmt": ("e4m3", True),
    "scale_fmt": (None, True),
    "dequantize": (False, True),
}


@runtime_checkable
class TakesCodes(Protocol):
    """A module whose parameters may be codes with scales beside them."""

    def take_codes(self, name: str, codec: BlockScaled, rule: ScaleRule) -> None:
        """Parameter `name` becomes codes. `rule`: of the scales of rows."""


EXPERTS = "expert_dtype"
_EXPERTS = {False: "fp8", True: "fp4"}  # whether experts are packed
_KEPT = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True, repr=False)
class Quantisation:
    """Weights in FP8 codes.

    kept       published names of modules whose weights are stored as they are, or what such names begin or end with
    rule       how the scale of a group of 128 activations comes from its largest
    exponents  whether scales are powers of two, stored as exponents
    packed     whether experts are MXFP4 instead
    """

    kept: tuple[str, ...] = ("lm_head",)
    rule: ScaleRule = FP32_SCALES
    exponents: bool = False
    packed: bool = False

    def __repr__(self) -> str:
        digest = hashlib.sha256("\n".join(sorted(self.kept)).encode()).hexdigest()[:16]
        more = (", scales are exponents" if self.exponents else "") + (", experts are packed" if self.packed else "")
        return f"Quantisation({len(self.kept)} names kept, {digest}, {self.rule}{more})"

    @property
    def blocks(self) -> BlockScaled:
        """The codec of its FP8 matrices."""
        return POWER_BLOCKS if self.exponents else BLOCKS

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the ops that a model with such weights calls besides its family's."""
        return ("fp8_quantise", "fp8_linear", "packed_experts" if self.packed else "fp8_experts")

    def keeps(self, module: str) -> bool:
        """Whether the weight of a module is stored as it is, by its published name."""
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        return any(".".join(parts[:end]) in self._names or ".".join(parts[-end:]) in self._names for end in ends)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.kept)

    def inside(self, prefix: tuple[str, str]) -> Quantisation:
        """The same for names that begin with either: a text model's weights have other names inside a larger model."""
        first, second = prefix
        other = [f"{b}{name.removeprefix(a)}" for a, b in ((first, second), (second, first)) for name in self.kept if name.startswith(a)]
        return replace(self, kept=(*self.kept, *other))


def read_quantisation(reader: FieldReader, name: str) -> Quantisation | None:
    """None where there is no such field. ValueError for another method, block or scheme than is built, naming it."""
    given = reader.raw(name, None)
    return None if given is None else _parsed(reader, name, given, _FIXED)


def read_exponents(reader: FieldReader, name: str) -> Quantisation | None:
    """The same for scales that are exponents. `expert_dtype` beside it or in it says what experts are: "fp8", or "fp4" for packed ones."""
    given = reader.raw(name, None)
    beside = reader.raw(EXPERTS, None)
    if given is None:
        return None
    inside = given.get(EXPERTS) if isinstance(given, dict) else None
    if None not in (beside, inside) and beside != inside:
        raise ValueError(f"{reader.family}: {EXPERTS} is {shown(beside)}, and {shown(inside)} in {name}")
    experts = inside if beside is None else beside
    if experts not in (None, *_EXPERTS.values()):
        raise ValueError(f"{reader.family}: {EXPERTS} {shown(experts)} is not supported, only 'fp8' or 'fp4'")
    rest = {field: value for field, value in given.items() if field != EXPERTS} if isinstance(given, dict) else given
    found = _parsed(reader, name, rest, {**_FIXED, "scale_fmt": (FORMAT, False)})
    return replace(found, rule=POWERS_OF_TWO, exponents=True, packed=experts == _EXPERTS[True])


def write_exponents(config: Any) -> dict[str, Any]:
    """The published fields of such weights, none for weights that are stored as they are."""
    how = config.quantised
    if how is None:
        return {}
    written = {**_written(), "scale_fmt": FORMAT, "fmt": "e4m3", "activation_scheme": "dynamic"}
    return {FIELD: written | ({"modules_to_not_convert": list(how.kept)} if how.kept else {}), EXPERTS: _EXPERTS[how.packed]}


def _parsed(reader: FieldReader, name: str, given: Any, fixed: Mapping[str, tuple[Any, bool]]) -> Quantisation:
    if not isinstance(given, dict):
        raise ValueError(f"{reader.family}: {name} must be an object, it is {shown(given)}")
    for field, (wanted, may_lack) in fixed.items():
        value = given.get(field, wanted if may_lack else None)
        if value != wanted:
            raise ValueError(f"{reader.family}: {field} {shown(value)} in {name} is not supported, only {shown(wanted)}")
    unknown = sorted(set(given) - set(fixed) - set(_KEPT))
    if unknown:
        raise ValueError(f"{reader.family}: {name} has the unknown field {shown(unknown[0])}")
    kept: list[str] = []
    for field in _KEPT:
        modules = given.get(field) or []
        if not isinstance(modules, list) or not all(isinstance(module, str) and module for module in modules):
            raise ValueError(f"{reader.family}: {field} in {name} must be names of modules, it is {shown(modules)}")
        kept += modules
    return Quantisation(tuple(kept))


def write_quantisation(config: Any) -> dict[str, Any]:
    """The published field, none for weights that are stored as they are."""
    if config.quantised is None:
        return {}
    return {FIELD: {**_written(), "activation_scheme": "dynamic", "modules_to_not_convert": list(config.quantised.kept)}}


def _written() -> dict[str, Any]:
    return {field: wanted for field, (wanted, may_lack) in _FIXED.items() if not may_lack}


def in_codes(config: Any, *, packed: bool = False) -> Any:
    """The same geometry with its matrices in codes, `packed`: its experts in MXFP4. ValueError for a family that reads none such."""
    if "quantised" not in {field.name for field in fields(config)}:
        raise ValueError(f"{config.family} reads no checkpoint in FP8 codes yet")
    return replace(config, quantised=config.codes(packed), published={})


def usual_program(config: Any) -> str:
    """The program that computes with a model's weights as they are stored."""
    if config.quantised is None:
        return "aligned"
    return "mxfp4" if config.quantised.packed else "fp8"


def quantised(table: WeightTable, how: Quantisation | None, matrices: str) -> WeightTable:
    """The table where the matrices that a checkpoint has in codes are codes and scales; the same table for None.

    matrices  a regex: the published names of the weights that such a checkpoint of this family may have in codes

    ValueError where a fused parameter is codes in part, or where a block would lie in two of its pieces: one sentence with both numbers.
    """
    if how is None:
        return table
    how = how.inside(table.prefix)
    entries: list[Entry] = []
    for entry in table.entries:
        if entry.codec is not None:  # codes of another kind
            entries.append(entry)
            continue
        coded = {_is_codes(piece, how, matrices) for pieces in entry.layouts for piece in pieces}
        if coded == {True}:
            entries += _codes_and_scales(entry, how)
        elif True in coded:
            some = [piece.published for piece in entry.layouts[0] if not _is_codes(piece, how, matrices)]
            raise ValueError(f"{entry.ours} is one matrix of codes here, and {FIELD} keeps a part of it as it is: {some[0]}")
        else:
            entries.append(entry)
    return replace(table, entries=tuple(entries))


def take_codes(module: nn.Module, table: WeightTable, how: Quantisation) -> None:
    """The layers' matrices that are codes in a table become codes and scales, under the names that it has."""
    for entry in table.entries:
        if entry.codec == how.blocks:
            owner, _, name = entry.ours.rpartition(".")
            part = module.get_submodule(owner)
            if not isinstance(part, TakesCodes):
                raise ValueError(f"{entry.ours} of a {type(part).__name__} can't be FP8 codes")
            part.take_codes(name, how.blocks, how.rule)


def _is_codes(piece: Piece, how: Quantisation, matrices: str) -> bool:
    return re.fullmatch(matrices, piece.published) is not None and not how.keeps(piece.published.removesuffix(".weight"))


def _codes_and_scales(entry: Entry, how: Quantisation) -> list[Entry]:
    beside = f"{entry.ours}{SCALES}"
    names = EXPONENTS if how.exponents else SCALES
    scales = tuple(tuple(_scales_of(piece, names) for piece in pieces) for pieces in entry.layouts)
    for pieces in entry.layouts:
        _check_blocks(entry.ours, pieces)
    codes = replace(entry, trainable=False, codec=how.blocks, beside=(beside,))
    stored = Exponents(held=torch.float32, largest=LARGEST_FP8_SCALE) if how.exponents else None
    return [codes, Entry(beside, scales, dtype=torch.float32, trainable=False, codec=stored, multiplies=True)]


def _scales_of(piece: Piece, names: str) -> Piece:
    """The scales of a piece, where they lie: as many rows in front as there are blocks."""
    return Piece(scale_name(piece.published, names), BLOCKS.scales(piece.shape), expert=piece.expert, start=-(-piece.start // BLOCKS.rows))


def _check_blocks(ours: str, pieces: Iterable[Piece]) -> None:
    odd = [piece for piece in pieces if piece.start % BLOCKS.rows]
    if odd:
        raise ValueError(
            f"{odd[0].published} begins at row {odd[0].start} of {ours}, its blocks of {BLOCKS.rows} rows would lie across those of another"
        )
