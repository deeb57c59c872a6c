"""The files that every family and every op has, so that a reader who knows one knows where to look in all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zoo.lint.source import Finding

FAMILY_FILES = frozenset({"__init__.py", "config.py", "model.py", "modeling_train.py", "modeling_serve.py", "weights.py", "README.md"})
OP_FILES = frozenset({"__init__.py", "reference.py", "kernels.py", "cases.py"})


def families(root: Path) -> list[Path]:
    """The folders of a checkout's families: those packages of zoo that have a model."""
    return sorted(path.parent for path in (root / "zoo").glob("*/model.py"))


def ops(root: Path) -> list[Path]:
    """The folders of a checkout's ops."""
    return sorted(path.parent for path in (root / "zoo" / "common" / "ops").glob("*/__init__.py"))


def folder_findings(root: Path) -> Iterator[Finding]:
    """Files that a family or an op lacks, and Python files of a family beside the usual ones."""
    for folder in families(root):
        yield from _lacking(folder, FAMILY_FILES, root)
        for path in sorted(folder.glob("*.py")):
            if path.name not in FAMILY_FILES:
                yield Finding(_name(path, root), 0, f"a family's folder has the files {', '.join(sorted(FAMILY_FILES))} and no other")
    for folder in ops(root):
        yield from _lacking(folder, OP_FILES, root)


def _lacking(folder: Path, names: frozenset[str], root: Path) -> Iterator[Finding]:
    for name in sorted(names - {path.name for path in folder.iterdir()}):
        yield Finding(_name(folder, root), 0, f"the folder has no {name}")


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
