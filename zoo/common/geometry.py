"""A family's geometry: every field is written once, with its published name and its check, and read and written from that.

A family's config is a frozen dataclass whose published fields are `Annotated[type, Published(...)]`, in the order in which they are
read: a field's check may look at those before it in `FieldReader.found`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self, get_type_hints

from zoo.common.config import IGNORED, MISSING, FieldReader, check_tokens
from zoo.common.layout import WHOLE, Layout
from zoo.common.quantisation import Quantisation

Reader = Callable[[FieldReader, str], Any]
Writer = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Published:
    """How a field of ours stands in config.json.

    name       the published field, which `read` is given
    read       its check: (reader, name) -> our value; it may read several published fields
    write      config -> the published fields; by default `name` with our value
    only       the model_types of ours that have it; others write nothing and have `otherwise`
    divided    the axis of a layout along which ranks share it
    """

    name: str
    read: Reader
    write: Writer | None = None
    only: tuple[str, ...] = ()
    otherwise: Any = None
    divided: str | None = None


@dataclass(frozen=True)
class Fixed:
    """A published field of which the model file implements one value, and refuses all others.

    absent   it may be missing; else it is required
    written  whether a new config.json has it
    only     the model_types of ours that have it
    """

    name: str
    value: Any
    absent: bool = True
    written: bool = False
    only: tuple[str, ...] = ()

    def read(self, reader: FieldReader) -> None:
        reader.only(self.name, self.value, absent=self.value if self.absent else MISSING)


def eos_of(config: Any) -> dict[str, Any]:
    """Writes the ends as published: one by itself, several as a list."""
    ends = config.eos
    return {"eos_token_id": list(ends) if len(ends) > 1 else ends[0]} if ends else {}


class _UseCache(type):
    """Makes classes in which `use_cache` alone may be written, frozen dataclasses too: transformers' Trainer writes it."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, _but_use_cache(value) if name == "__setattr__" else value)


def _but_use_cache(frozen: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    def write(self: Any, name: str, value: Any) -> None:
        if name != "use_cache":
            frozen(self, name, value)
        elif value:
            raise ValueError(f"use_cache={value!r}: a trainer keeps no cache, and a server always has one")

    return write


class Geometry(metaclass=_UseCache):
    """Base of a family's config, a frozen dataclass.

    family         the name that begins its sentences
    kinds          model_types of config.json -> ours
    architectures  our model_types -> the class that transformers names in a new config.json
    fixed          fields of one value
    ignored        fields that move no number, beside those of every family
    published      config.json as it was read
    kept           published names of modules that stay as they are where such a model's matrices are made codes
    quantised      how its matrices are stored as codes, a published field of the families that read such checkpoints
    """

    family: ClassVar[str]
    kinds: ClassVar[Mapping[str, str]]
    architectures: ClassVar[Mapping[str, str]]
    fixed: ClassVar[tuple[Fixed, ...]] = ()
    ignored: ClassVar[frozenset[str]] = frozenset()

    use_cache: ClassVar[bool] = False

    kept: ClassVar[tuple[str, ...]] = ("lm_head",)

    quantised: Quantisation | None = None

    vocabulary: int
    eos: tuple[int, ...]
    published: dict[str, Any]

    def __post_init__(self) -> None:
        check_tokens(self.family, "eos_token_id", self.eos, self.eos, self.vocabulary)

    @property
    def model_type(self) -> str:
        """Which of its family's architectures this is; a family of several tells it by a field."""
        assert len(set(self.kinds.values())) == 1, f"{self.family} has several architectures and doesn't tell them apart"
        return next(iter(self.kinds.values()))

    def codes(self, packed: bool) -> Quantisation:
        """How its matrices are codes where they are, `packed`: with experts in MXFP4. ValueError for a family that has none of these."""
        if packed:
            raise ValueError(f"{self.family} reads no checkpoint with experts in MXFP4")
        return Quantisation(self.kept)

    @property
    def written_type(self) -> str:
        """The model_type of a new config.json."""
        return self.model_type

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> Self:
        """Reads a config.json. ValueError for a missing, unknown or unsupported field, naming it and its value."""
        return cls(**cls.read(fields), published=fields)  # type: ignore[call-arg]  # every subclass is a dataclass with it

    def to_hf(self) -> dict[str, Any]:
        """The published fields of this geometry: as read if they still say the same."""
        if self.published and type(self).from_hf(self.published) == self:
            return deepcopy(self.published)
        kind = self.model_type
        out: dict[str, Any] = {"architectures": [self.architectures[kind]], "model_type": self.written_type}
        for name, one in published_fields(type(self)).items():
            if not one.only or kind in one.only:
                out |= one.write(self) if one.write else {one.name: getattr(self, name)}
        out |= {one.name: deepcopy(one.value) for one in self.fixed if one.written and (not one.only or kind in one.only)}
        return out | {"torch_dtype": "bfloat16"}

    def to_dict(self) -> dict[str, Any]:
        """`to_hf`, under the name that transformers' callbacks ask for."""
        return self.to_hf()

    def get_text_config(self, decoder: bool = False) -> SimpleNamespace:
        """Token ids as config.json has them, under transformers' names; what is written there reaches no model."""
        return SimpleNamespace(**{name: self.published.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")})

    def to_json_string(self) -> str:
        return json.dumps(self.to_hf(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Our fields out of those of a text model's config.json, in the order in which they are declared."""
        reader = FieldReader(cls.family, fields, IGNORED | cls.ignored)
        kind = cls.kinds[reader.one_of("model_type", *cls.kinds)]
        if "quantised" not in published_fields(cls):
            reader.is_not_quantised()
        reader.trains_as_published()
        for fixed in cls.fixed:
            if not fixed.only or kind in fixed.only:
                fixed.read(reader)
        for name, one in published_fields(cls).items():
            reader.found[name] = one.read(reader, one.name) if not one.only or kind in one.only else one.otherwise
        cls.check(reader)
        reader.finish()
        return reader.found

    @classmethod
    def check(cls, reader: FieldReader) -> None:
        """Refuses fields of `reader.found` that do not fit each other."""

    def local(self, layout: Layout) -> Self:
        """The sizes that one rank of a layout holds. ValueError, with both numbers, for what does not divide."""
        shares = {
            name: layout.share(one.name, getattr(self, name), one.divided)
            for name, one in published_fields(type(self)).items()
            if one.divided is not None
        }
        mine = replace(self, **shares, eos=(), published={})  # type: ignore[type-var]  # every subclass is a dataclass
        # no fields of the dataclass: no fingerprint and no comparison has them
        object.__setattr__(mine, "_whole", self.whole)
        object.__setattr__(mine, "_layout", layout)
        return mine

    @property
    def whole(self) -> Self:
        """The geometry of which this is one rank's part, else itself: for what each rank has whole, as a router of all experts."""
        found: Self = vars(self).get("_whole", self)
        return found

    @property
    def layout(self) -> Layout:
        """The layout of which this is one rank's part."""
        found: Layout = vars(self).get("_layout", WHOLE)
        return found


def published_fields(config_class: type[Geometry]) -> dict[str, Published]:
    """The published fields of a family's config by our name, in order."""
    hints = get_type_hints(config_class, include_extras=True)
    found: dict[str, Published] = {}
    for field in fields(config_class):  # type: ignore[arg-type]  # every subclass is a dataclass
        notes = [note for note in getattr(hints[field.name], "__metadata__", ()) if isinstance(note, Published)]
        if notes:
            (found[field.name],) = notes
    return found
