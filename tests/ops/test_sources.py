"""Every op's page says where its formula comes from, and every kernel what it computes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import zoo

ROOT = Path(zoo.__file__).parent
FOLDER = ROOT / "common" / "ops"
PAGES = sorted(path for path in FOLDER.glob("*/__init__.py") if (path.parent / "reference.py").exists())
# a paper by its number, its journal or conference, or a public implementation by its name
NAMED = re.compile(r"arXiv\s\d{4}\.\d{4,5}|\b(SIAM|IMA) Journal\b|transformers'\s`\w+`|`torch\.\w+(\.\w+)*`")


def source_of(page: str) -> str:
    """The paragraph of a module's docstring that names its sources; empty where there is none."""
    paragraphs = (ast.get_docstring(ast.parse(page)) or "").split("\n\n")
    return next((text for text in paragraphs if re.match(r"Sources?: ", text)), "")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_a_page_names_its_source(path: Path) -> None:
    assert NAMED.search(source_of(path.read_text()))


def test_a_page_without_a_source_is_seen() -> None:
    assert len(PAGES) > 20
    assert not source_of('"""An op."""')
    assert not NAMED.search(source_of('"""An op.\n\nSource: a paper that everybody knows.\n"""'))
    assert NAMED.search(source_of('"""An op.\n\nSource: somebody 2020 (arXiv 2002.05202), section 2.\n"""'))


def unexplained(source: str) -> list[str]:
    """Triton functions of a module without a docstring."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    kernels = [f for f in functions if any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list)]
    return [kernel.name for kernel in kernels if not ast.get_docstring(kernel)]


def test_every_kernel_says_what_it_computes() -> None:
    texts = {path: path.read_text() for path in ROOT.rglob("*.py")}
    kernels = {path: text for path, text in texts.items() if "triton.jit" in text}
    assert len(kernels) > 20
    assert not {str(path): found for path, text in kernels.items() if (found := unexplained(text))}


def test_a_kernel_without_a_word_is_seen() -> None:
    assert unexplained("@triton.jit(do_not_specialize=['rows'])\ndef _f(x):\n    return x\n") == ["_f"]
    assert not unexplained('@triton.jit\ndef _f(x):\n    """x itself."""\n    return x\n')
