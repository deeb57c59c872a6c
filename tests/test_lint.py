"""`zoo lint`: what it finds in this checkout, and a planted breach of each rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zoo.cli import main
from zoo.lint.arithmetic import arithmetic_findings
from zoo.lint.check import COMPUTES, WRITTEN, lint
from zoo.lint.folders import FAMILY_FILES, OP_FILES, families, folder_findings, ops
from zoo.lint.imports import NAMES, circle_findings, circles, rank_findings, rank_of
from zoo.lint.rules import default_findings, environment_findings, left_findings, name_findings
from zoo.lint.source import Finding, Source, sources_of

ROOT = Path(__file__).resolve().parents[1]
Rule = Callable[[Source], Iterator[Finding]]


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    return lint(ROOT).findings


def test_this_checkout_has_no_finding(found: list[Finding]) -> None:
    """Files, folders, names, arithmetic outside the ops, imports that go up, circles."""
    assert not [str(finding) for finding in found]


def test_the_rules_read_all_that_there_is() -> None:
    """A rule that reads nothing finds nothing."""
    files = {source.file for source in sources_of(ROOT, WRITTEN)}
    assert {"zoo/sglang_plugin/sampler.py", "benchmarks/models.py", "weights_tools/compare.py", "tests/test_lint.py"} <= files
    assert {folder.name for folder in families(ROOT)} >= {"qwen3", "qwen3_5", "glm5"} and len(ops(ROOT)) > 20
    for place, reason in COMPUTES.items():
        assert reason and any(file.startswith(place) for file in files), f"{place} is no longer there"


@pytest.mark.parametrize(
    ("rule", "breach", "allowed"),
    [
        (environment_findings, "import os\nx = os.environ['A']", "import os\nx = os.path.join('A')"),
        (environment_findings, "import os as o\nx = o.getenv('A')", "import os as o\nx = o.getcwd()"),
        (environment_findings, "from os import environ", "from os import path"),
        (default_findings, "getattr(self.config, 'x', 1)", "getattr(self.config, 'x')"),
        (default_findings, "getattr(hf_config, 'x', None)", "getattr(module, 'x', None)"),
        (name_findings, "def exact_linear(): ...", "def exactly(): ..."),
        (name_findings, "def _v2_linear(): ...", "def view(): ..."),
        (name_findings, "def linear_v2(): ...", "def newest(): ..."),
        (name_findings, "class C:\n    def new_rows(self): ...", "class C:\n    def renew(self): ..."),
        (left_findings, "x = 1  # TO" + "DO: more", "x = 1  # to do: nothing"),
        (arithmetic_findings, "y = a @ b", "y = a + b"),
        (arithmetic_findings, "y = torch.exp(x)", "y = ops.linear(x_RD, w_NK)"),
        (arithmetic_findings, "y = torch.nn.functional.silu(x)", "y = torch.nn.functional.pad(x, (1, 0))"),
        (arithmetic_findings, "y = x.view(1).softmax(-1)", "y = x.view(1).reshape(-1)"),
        (arithmetic_findings, "y = self.weight.rsqrt()", "y = self.norm(x_RD)"),
        (arithmetic_findings, "y_RD = x_RD * 2", "y = a + 1"),
        (arithmetic_findings, "y = x_RD.mean(-1)", "y = x_RD.flatten(1)"),
        (arithmetic_findings, "y = MOST_X + x_RD", "sequences = MOST_SEQUENCES + 1"),
        (arithmetic_findings, "y = logits_RV - lse", "slot_R = page_R * page_size + positions_R % page_size"),
        (arithmetic_findings, "y = a * lse_R[:, None]", "y = a * positions_R[:, None]"),
        (arithmetic_findings, "y = torch.clamp(every_RV, max=0.0)", "begin_N1 = begin_N1.clamp(max=count)"),
        (arithmetic_findings, "y = scaled_RV.mul_(inverse)", "y = seen.add(name)"),
    ],
)
def test_every_rule_sees_a_planted_breach(rule: Rule, breach: str, allowed: str) -> None:
    assert len(list(rule(Source.of("zoo/planted.py", breach)))) == 1
    assert not list(rule(Source.of("zoo/planted.py", allowed)))


@pytest.mark.parametrize(
    ("module", "rank"),
    [
        ("zoo.common.rows", "base"),
        ("zoo.testing", "base"),
        ("zoo.common.ops.linear.kernels", "ops"),
        ("zoo.common.checkpoint", "common"),
        ("zoo", "common"),
        ("zoo.common.engine.pages", "engine"),
        ("zoo.qwen3", "families"),
        ("zoo.a_family_to_come.model", "families"),
        ("zoo.sglang_plugin.names", "plugin"),
        ("zoo.verify.ladder", "verify"),
        ("zoo.verify.__main__", "tools"),
        ("zoo.cli", "tools"),
        ("benchmarks.work.latent", "tools"),
    ],
)
def test_ranks(module: str, rank: str) -> None:
    assert NAMES[rank_of(module)] == rank


HOUSE = {
    "zoo/__init__.py": "",
    "zoo/common/__init__.py": "",
    "zoo/common/rows.py": "import torch\n",
    "zoo/common/ops/__init__.py": "from zoo.common import rows\n",
    "zoo/common/memory.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from zoo.verify import ladder\n",
    "zoo/verify/__init__.py": "",
    "zoo/verify/ladder.py": "from zoo.common.ops import linear\n",
}


def house(**changes: str) -> list[Source]:
    """The sources of a small house, some of its files with another text; `a__b` stands for `zoo/a/b.py`."""
    texts = HOUSE | {f"zoo/{name.replace('__', '/')}.py": text for name, text in changes.items()}
    return [Source.of(file, text) for file, text in texts.items()]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"common__rows": "from zoo.common.ops import linear\n"}, "zoo.common.rows (base) imports zoo.common.ops (ops)"),
        ({"common__rows": "def f():\n    import zoo.common.memory\n"}, "zoo.common.rows (base) imports zoo.common.memory (common)"),
        ({"common__rows": "from . import memory\n"}, "zoo.common.rows (base) imports zoo.common.memory (common)"),
        ({"common__memory": "from ..verify.ladder import Ladder\n"}, "zoo.common.memory (common) imports zoo.verify.ladder (verify)"),
        ({"common__memory": "try:\n    from zoo import verify\nexcept ImportError:\n    pass\n"}, "imports zoo.verify (verify)"),
        (
            {"common__memory": "if TYPE_CHECKING:\n    pass\nelse:\n    import zoo.verify.ladder\n"},
            "zoo.common.memory (common) imports zoo.verify.ladder (verify)",
        ),
    ],
)
def test_an_import_upwards_is_found_wherever_it_stands(change: dict[str, str], line: str) -> None:
    assert not list(rank_findings(house()))
    [finding] = rank_findings(house(**change))
    assert line in finding.what and finding.line > 0


def test_a_circle_is_found_with_all_its_modules() -> None:
    assert not list(circle_findings(house()))
    ring = {"verify__ladder": "from zoo.verify import trace", "verify__trace": "def f():\n    from zoo.verify.map import g"}
    [finding] = circle_findings(house(**ring, verify__map="import zoo.verify.ladder"))
    assert finding.what == "3 modules import each other in a circle: zoo.verify.ladder, zoo.verify.map, zoo.verify.trace"
    assert not list(circle_findings(house(**ring, verify__map="")))  # a chain is none
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"e"}, "e": {"d", "a"}}) == [["a", "b"], ["d", "e"]]


def test_folders_of_families_and_ops(tmp_path: Path) -> None:
    family = tmp_path / "zoo" / "llama"
    op = tmp_path / "zoo" / "common" / "ops" / "sort"
    for folder, names in ((family, FAMILY_FILES - {"weights.py"}), (op, OP_FILES - {"cases.py"})):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("")
    (family / "helpers.py").write_text("")
    found = sorted(f"{finding.file}: {finding.what}".partition(" has the files")[0] for finding in folder_findings(tmp_path))
    assert found == [
        "zoo/common/ops/sort: the folder has no cases.py",
        "zoo/llama/helpers.py: a family's folder",
        "zoo/llama: the folder has no weights.py",
    ]


def test_findings_are_printed_with_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["lint", *arguments])
        return int(ended.value.code or 0)

    package = tmp_path / "zoo"
    (package / "common").mkdir(parents=True)
    for name in ("__init__.py", "common/__init__.py"):
        (package / name).write_text("")
    monkeypatch.setattr("zoo.cli.__file__", str(package / "cli.py"))
    assert run() == 0 and capsys.readouterr().out == "2 files read, no findings\n"
    (package / "common" / "rows.py").write_text("import os\n\nx = os.getenv('A')\ny = x_RD * 2\n")
    assert run("--json", str(tmp_path / "out.json")) == 1
    assert capsys.readouterr().out.splitlines() == [
        "zoo/common/rows.py:3: os.getenv reads the environment",
        "zoo/common/rows.py:4: arithmetic on x_RD outside an op: x_RD * 2",
        "3 files read, 2 findings",
    ]
    fields = json.loads((tmp_path / "out.json").read_text())
    assert fields["files"] == 3 and fields["findings"][0] == {
        "file": "zoo/common/rows.py",
        "line": 3,
        "what": "os.getenv reads the environment",
    }
    (package / "common" / "rows.py").write_text("def f(:\n")
    assert run() == 2 and "zoo/common/rows.py:1: invalid syntax" in capsys.readouterr().err
    (package / "__init__.py").unlink()
    assert run() == 2 and "is no checkout" in capsys.readouterr().err
