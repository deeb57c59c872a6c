"""House rules of single files: no environment variable, no guessed config field, no name for a version or a virtue, nothing left to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from zoo.lint.source import Finding, Source, dotted

BANNED_NAME = re.compile(r"^_*(exact|v\d+|new|aligned)_|_(exact|v\d+|new|aligned)$")
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})
READS_ENVIRONMENT = {"zoo/common/compilations.py": "finds the folder that DeepGEMM compiles into; no number depends on it"}
LEFT = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")


def environment_findings(source: Source) -> Iterator[Finding]:
    """Uses of the process's environment, whichever way `os` was imported: none may pick an arithmetic."""
    if source.file in READS_ENVIRONMENT:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            yield source.finding(node, f"{dotted(node)} reads the environment")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ENVIRONMENT:
                    yield source.finding(node, f"from os import {alias.name} reads the environment")


def default_findings(source: Source) -> Iterator[Finding]:
    """getattr(config, name, default): an unknown field must be refused, not guessed."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) == 3:
            owner = dotted(node.args[0]).rpartition(".")[2]
            if "config" in owner or "cfg" in owner:
                yield source.finding(node, f"getattr({owner}, ..., default) guesses a field of a config")


def name_findings(source: Source) -> Iterator[Finding]:
    """Functions and classes named for a version or a virtue instead of for what they do."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and BANNED_NAME.search(node.name):
            yield source.finding(node, f"{node.name} is named for a version or a virtue")


def left_findings(source: Source) -> Iterator[Finding]:
    """Marks of something that is left to do."""
    for number, line in enumerate(source.text.splitlines(), 1):
        mark = LEFT.search(line)
        if mark:
            yield Finding(source.file, number, f"{mark.group()} marks something left to do")
