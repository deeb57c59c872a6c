"""All rules over a checkout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo.lint.arithmetic import arithmetic_findings
from zoo.lint.folders import folder_findings
from zoo.lint.imports import circle_findings, rank_findings
from zoo.lint.rules import default_findings, environment_findings, left_findings, name_findings
from zoo.lint.source import Finding, Source, sources_of

PRODUCT = ("zoo", "weights_tools")
WRITTEN = (*PRODUCT, "benchmarks", "tests")
# where numbers are made on purpose: the ops, and what judges or rivals them
COMPUTES = {
    "zoo/common/ops/": "the ops",
    "zoo/common/rollouts/curves.py": "how far trainer and sampler are apart, in float64",
    "zoo/common/hashing.py": "random weights and checksums, in integers",
    "zoo/lint/": "reads source files",
    "zoo/testing.py": "the laws compare outputs",
    "zoo/verify/": "compares what the models made, and judges outside kernels by float64 formulas",
    "benchmarks/common.py": "the error of an output, in float64",
    "benchmarks/models_float64.py": "the models in float64, by which accuracy is judged",
    "benchmarks/rivals.py": "the arithmetic of other libraries, which the ops are measured against",
    "benchmarks/triton_product.py": "single products against plain ones",
    "benchmarks/work/": "each op's rivals and its float64 judge",
}


@dataclass(frozen=True)
class Report:
    """How many files were read, and what was found in them."""

    files: int
    findings: list[Finding]


def lint(root: Path) -> Report:
    """Reads every Python file of a checkout; an installed package is one that lacks tests and benchmarks.

    ValueError where `root` has no zoo.
    """
    if not (root / "zoo" / "__init__.py").exists():
        raise ValueError(f"{root} is no checkout: it has no zoo/__init__.py")
    written = sources_of(root, WRITTEN)
    findings = [finding for source in written for finding in _of_file(source)]
    findings += folder_findings(root)
    importing = [source for source in written if not _in(source, "tests")]
    findings += rank_findings(importing)
    findings += circle_findings(importing)
    return Report(len(written), sorted(set(findings), key=lambda finding: (finding.file, finding.line, finding.what)))


def _of_file(source: Source) -> Iterator[Finding]:
    yield from left_findings(source)
    if _in(source, *PRODUCT):
        yield from environment_findings(source)
        yield from default_findings(source)
        yield from name_findings(source)
    if not _in(source, "tests") and not source.file.startswith(tuple(COMPUTES)):
        yield from arithmetic_findings(source)


def _in(source: Source, *folders: str) -> bool:
    return source.file.partition("/")[0] in folders
