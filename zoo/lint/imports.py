"""Imports run downwards only: each module has a rank and imports its own rank or a lower one, and inside a rank no circle closes.

Imports inside functions count, since they bind as much as those at the top; those under `if TYPE_CHECKING:` do not, since nothing is
imported there. A module that is loaded by name from data (a family, a provider's kernels) is no import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zoo.lint.source import Finding, Source, dotted

# from below: what a rank is called, and the modules and packages that have it; the longest name that fits a module counts
RANKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "base",
        (
            "zoo.common.files",
            "zoo.common.hashing",
            "zoo.common.history",
            "zoo.common.program",
            "zoo.common.reading",
            "zoo.common.row_sampling",
            "zoo.common.rows",
            "zoo.common.toolchain",
            "zoo.common.verdicts",
            "zoo.testing",
        ),
    ),
    ("ops", ("zoo.common.ops",)),
    ("common", ("zoo", "zoo.common")),
    ("engine", ("zoo.common.engine", "zoo.common.generate")),
    ("families", ()),  # every other package of zoo: see `rank_of`
    ("plugin", ("zoo.sglang_plugin", "zoo.rl")),
    ("verify", ("zoo.verify",)),
    ("tools", ("zoo.__main__", "zoo.cli", "zoo.lint", "zoo.verify.__main__", "weights_tools", "benchmarks")),
)
NAMES = tuple(name for name, _ in RANKS)
PLACES = {place: rank for rank, (_, places) in enumerate(RANKS) for place in places}


@dataclass(frozen=True)
class Import:
    """One module imports another, both by their dotted names."""

    importer: str
    imported: str
    file: str
    line: int


def rank_of(module: str) -> int:
    """A module's rank, an index of RANKS."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        place = ".".join(parts[:length])
        if place in PLACES:
            return PLACES[place]
    if len(parts) > 1 and parts[0] == "zoo":
        return NAMES.index("families")
    return PLACES[parts[0]]


def imports_of(source: Source, known: Iterable[str]) -> Iterator[Import]:
    """The imports of modules that are `known`. `from a import b` is one of a.b where that is a module, else of a."""
    modules = frozenset(known)
    for node in _running(source.tree):
        for name in _names(node, source):
            target = name
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != source.module:
                yield Import(source.module, target, source.file, node.lineno)


def rank_findings(sources: list[Source]) -> Iterator[Finding]:
    """Imports of a higher rank."""
    for found in _all(sources):
        mine = rank_of(found.importer)
        theirs = rank_of(found.imported)
        if theirs > mine:
            what = f"{found.importer} ({NAMES[mine]}) imports {found.imported} ({NAMES[theirs]}), which is above it"
            yield Finding(found.file, found.line, what)


def circle_findings(sources: list[Source]) -> Iterator[Finding]:
    """Circles of modules: each one once, with all modules that import each other through one another."""
    graph: dict[str, set[str]] = {source.module: set() for source in sources}
    for found in _all(sources):
        graph[found.importer].add(found.imported)
    files = {source.module: source.file for source in sources}
    for circle in circles(graph):
        yield Finding(files[circle[0]], 0, f"{len(circle)} modules import each other in a circle: {', '.join(circle)}")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, each sorted: nodes that reach each other."""
    reached = {node: _reached(graph, node) for node in graph}
    found: list[list[str]] = []
    placed: set[str] = set()
    for node in sorted(graph):
        if node not in placed:
            together = sorted(other for other in reached[node] if node in reached[other])
            placed.update(together)
            if len(together) > 1:
                found.append(together)
    return found


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every node that a walk of any length from `start` meets, `start` itself only if a walk comes back."""
    seen: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead.extend(graph[node])
    return seen


def _all(sources: list[Source]) -> Iterator[Import]:
    known = {source.module for source in sources}
    for source in sources:
        yield from dict.fromkeys(imports_of(source, known))  # one statement may name several things of a module


def _running(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that may run: of a TYPE_CHECKING block only its `else`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and dotted(child.test).rpartition(".")[2] == "TYPE_CHECKING":
            for statement in child.orelse:
                yield from _running(statement) if not isinstance(statement, ast.Import | ast.ImportFrom) else (statement,)
        else:
            yield from _running(child)


def _names(node: ast.Import | ast.ImportFrom, source: Source) -> list[str]:
    """The dotted names that a statement asks for, with the longest reading of each."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = node.module or ""
    if node.level:
        parts = source.module.split(".")
        above = parts[: len(parts) - node.level + source.is_package]
        package = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{package}.{alias.name}" for alias in node.names]
