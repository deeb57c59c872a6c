"""What every rule reads and says: a source file's tree, and a finding in it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """A breach of a rule. `file` is relative to the checkout's root; line 0 stands for the whole file or folder."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Source:
    """One Python file of a checkout, parsed. `file` is its path from the checkout's root, with forward slashes."""

    file: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, file: str, text: str) -> Source:
        """ValueError for a text that is no Python."""
        try:
            return cls(file, text, ast.parse(text, file))
        except SyntaxError as error:
            raise ValueError(f"{file}:{error.lineno}: {error.msg}") from error

    @property
    def module(self) -> str:
        """The dotted name that the file is imported by."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        return self.file.endswith("/__init__.py")

    def finding(self, node: ast.stmt | ast.expr, what: str) -> Finding:
        return Finding(self.file, node.lineno, what)


def sources_of(root: Path, folders: tuple[str, ...]) -> list[Source]:
    """Every Python file below these folders of a checkout; a folder that it lacks has none."""
    return [
        Source.of(path.relative_to(root).as_posix(), path.read_text())
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    ]


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute or a name, what stands before a call or an index left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
