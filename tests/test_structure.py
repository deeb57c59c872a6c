"""The layout and the house rules that a program can check: files, sizes, banned names. Each rule has a planted breach."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT / "zoo"
OPS = ZOO / "common" / "ops"

ARCHITECTURE_NAMES = ("qwen3", "qwen3_5", "glm5", "deepseek_v4")
ARCHITECTURE_FILES = {"config.py", "model.py", "modeling_train.py", "modeling_serve.py", "weights.py", "README.md"}
OP_FILES = {"__init__.py", "reference.py", "kernels.py", "cases.py"}
LINES = {"model.py": 450, "modeling_train.py": 250, "modeling_serve.py": 250}
OP_LINES = {"__init__.py": 150, "kernels.py": 500}

FUNCTION_NAME = re.compile(r"^_*(exact|v\d+|new|aligned)_|_(exact|v\d+|new|aligned)$")
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}
# What only an op may call: arithmetic whose bytes depend on shape, layout or library.
NUMBERS = {
    "matmul", "mm", "bmm", "addmm", "einsum", "softmax", "log_softmax", "logsumexp", "sigmoid", "silu", "gelu", "softplus",
    "rsqrt", "rms_norm", "layer_norm", "scaled_dot_product_attention", "cross_entropy", "nll_loss",
}  # fmt: skip

ARCHITECTURES = [ZOO / name for name in ARCHITECTURE_NAMES if any((ZOO / name).glob("*.py"))]
OP_FOLDERS = sorted(page.parent for page in OPS.glob("*/__init__.py"))
SOURCES = sorted(path for package in ("zoo", "weights_tools") for path in (ROOT / package).rglob("*.py"))
WRITTEN = sorted(path for name in ("zoo", "weights_tools", "tests", "benchmarks") for path in (ROOT / name).rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def environment_reads(tree: ast.AST) -> Iterator[str]:
    """Uses of the process's environment, whichever way `os` was imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            yield f"line {node.lineno}: {_dotted(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"line {node.lineno}: from os import {a.name}" for a in node.names if a.name in ENVIRONMENT)


def config_defaults(tree: ast.AST) -> Iterator[str]:
    """getattr(config, name, default): an unknown field must be refused, not guessed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func) == "getattr" and len(node.args) == 3:
            owner = _dotted(node.args[0]).rsplit(".", 1)[-1]
            if "config" in owner or "cfg" in owner:
                yield f"line {node.lineno}: getattr({owner}, ..., default)"


def banned_names(tree: ast.AST) -> Iterator[str]:
    """Functions and classes named for a version or a virtue instead of for what they do."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and FUNCTION_NAME.search(node.name):
            yield f"line {node.lineno}: {node.name}"


def numbers(tree: ast.AST) -> Iterator[str]:
    """Arithmetic outside an op."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield f"line {node.lineno}: @"
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in NUMBERS:
            owner = _dotted(called.value).split(".")[0]
            if owner not in ("ops", "layers"):
                yield f"line {called.lineno}: {_dotted(called)}"


def missing(folder: Path, names: set[str]) -> set[str]:
    """The required files that the folder lacks."""
    return names - {path.name for path in folder.iterdir()}


def too_long(folder: Path, limits: dict[str, int]) -> list[str]:
    """Files above their limit of lines; an absent file is another test's matter."""
    counts = {name: len((folder / name).read_text().splitlines()) for name in limits if (folder / name).exists()}
    return [f"{name}: {count} lines, at most {limits[name]}" for name, count in counts.items() if count > limits[name]]


@pytest.mark.parametrize("folder", ARCHITECTURES, ids=_name)
def test_architecture_has_the_same_six_files(folder: Path) -> None:
    assert not missing(folder, ARCHITECTURE_FILES)
    assert {path.name for path in folder.glob("*.py")} <= ARCHITECTURE_FILES | {"__init__.py"}


@pytest.mark.parametrize("folder", ARCHITECTURES, ids=_name)
def test_architecture_stays_small(folder: Path) -> None:
    assert not too_long(folder, LINES)


@pytest.mark.parametrize("folder", ARCHITECTURES, ids=_name)
def test_models_and_drivers_make_no_number(folder: Path) -> None:
    found = [f"{name} {line}" for name in LINES for line in numbers(ast.parse((folder / name).read_text()))]
    assert not found


@pytest.mark.parametrize("folder", OP_FOLDERS, ids=_name)
def test_op_has_four_files_of_limited_size(folder: Path) -> None:
    assert not missing(folder, OP_FILES)
    assert not too_long(folder, OP_LINES)


@pytest.mark.parametrize("check", [environment_reads, config_defaults, banned_names])
def test_sources_keep_the_house_rules(check: Callable[[ast.AST], Iterator[str]]) -> None:
    found = [f"{_name(path)} {line}" for path in SOURCES for line in check(ast.parse(path.read_text()))]
    assert not found


def test_nothing_is_left_to_do() -> None:
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    found = [f"{_name(path)} line {i}" for path in WRITTEN for i, line in enumerate(path.read_text().splitlines(), 1) if mark.search(line)]
    assert not found


def test_something_was_checked() -> None:
    assert ARCHITECTURES and OP_FOLDERS and len(SOURCES) > len(OP_FOLDERS)


@pytest.mark.parametrize(
    ("check", "breach", "allowed"),
    [
        (environment_reads, "import os\nx = os.environ['A']", "import os\nx = os.path.join('A')"),
        (environment_reads, "import os as o\nx = o.getenv('A')", "import os as o\nx = o.getcwd()"),
        (environment_reads, "from os import environ", "from os import path"),
        (config_defaults, "getattr(self.config, 'x', 1)", "getattr(self.config, 'x')"),
        (config_defaults, "getattr(hf_config, 'x', None)", "getattr(module, 'x', None)"),
        (banned_names, "def exact_linear(): ...", "def exactly(): ..."),
        (banned_names, "def _v2_linear(): ...", "def view(): ..."),
        (banned_names, "def linear_v2(): ...", "def newest(): ..."),
        (banned_names, "class C:\n    def new_rows(self): ...", "class C:\n    def renew(self): ..."),
        (numbers, "y = a @ b", "y = a + b"),
        (numbers, "y = torch.nn.functional.silu(x)", "y = torch.nn.functional.pad(x, (1, 0))"),
        (numbers, "y = x.view(1).softmax(-1)", "y = x.view(1).reshape(-1)"),
        (numbers, "y = x.rsqrt()", "y = ops.rms_norm(x)"),
    ],
)
def test_every_rule_sees_a_planted_breach(check: Callable[[ast.AST], Iterator[str]], breach: str, allowed: str) -> None:
    assert len(list(check(ast.parse(breach)))) == 1
    assert not list(check(ast.parse(allowed)))


def test_file_rules_see_a_planted_breach(tmp_path: Path) -> None:
    for name in ARCHITECTURE_FILES - {"weights.py"}:
        (tmp_path / name).write_text("\n" * 250)
    assert missing(tmp_path, ARCHITECTURE_FILES) == {"weights.py"}
    assert not too_long(tmp_path, LINES)
    (tmp_path / "modeling_train.py").write_text("\n" * 251)
    assert too_long(tmp_path, LINES) == ["modeling_train.py: 251 lines, at most 250"]
