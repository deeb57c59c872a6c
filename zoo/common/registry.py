"""Which family serves which architecture: folders of the zoo, and packages that announce one under the entry point `zoo.families`.

Nothing here names a family. A folder of the zoo is one if it has a `model.py`; its `__init__.py` holds the record, `FAMILY`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.common.family import Architecture, Family
    from zoo.common.pretrained import Pretrained

ZOO = Path(__file__).parents[1]  # the package's folder
ROLES = ("rl", "serving")
ENTRY_POINTS = "zoo.families"


@functools.cache
def families() -> tuple[Family, ...]:
    """All of them, those of the zoo first. ValueError if two have an architecture or a model_type of one name."""
    found = []
    for module in sorted(pkgutil.iter_modules([str(ZOO)]), key=lambda module: module.name):
        if module.ispkg and (ZOO / module.name / "model.py").exists():
            found.append(importlib.import_module(f"zoo.{module.name}").FAMILY)
    found += [entry.load() for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    seen: set[str] = set()
    for family in found:
        for architecture in family.architectures:
            if architecture.name in seen:
                raise ValueError(f"two families have an architecture {architecture.name!r}")
            seen.add(architecture.name)
    return tuple(found)


@functools.cache
def architectures() -> dict[str, tuple[Family, Architecture]]:
    """Every architecture by the name that the command line knows it by, with its family."""
    return {architecture.name: (family, architecture) for family in families() for architecture in family.architectures}


def find(name: str) -> tuple[Family, Architecture]:
    """An architecture by name. ValueError for one that is unknown."""
    known = architectures()
    if name not in known:
        raise ValueError(f"unknown architecture {name!r:.60}; there are {', '.join(known)}")
    return known[name]


def family_of(fields: dict[str, Any]) -> tuple[Family, Architecture]:
    """Those of a config.json. ValueError for a model_type that there is not."""
    known = {kind: (family, one) for family, one in architectures().values() for kind in one.model_types}
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"model_type {kind!r:.60} is not supported; there are {', '.join(known)}")
    return known[kind]


def model_class(fields: dict[str, Any], role: str = "rl") -> type[Pretrained]:
    """The class for a config.json and a role. ValueError for a model_type or role that there is not."""
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
    family, _ = family_of(fields)
    return family.rl if role == "rl" else family.serving
