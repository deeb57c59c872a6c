"""The documentation's claims against what is stored: its numbers are those of the rows it names, its links lead somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(p for p in ROOT.rglob("*.md") if not any(part.startswith(".") or part == "out" for part in p.relative_to(ROOT).parts))
PROOF = ROOT / "docs" / "PROOF.md"
ROWS = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / "h200_proof.jsonl").read_text().splitlines()]


def numbers(text: str) -> list[int]:
    """What a line of a table claims: `0 of 9,638,185,312`."""
    return [int(found.replace(",", "")) for found in re.findall(r"0 of ([\d,]+)", text)]


def lines_of(text: str) -> list[int]:
    """75, or 97, 98, or 118-125, 150-153."""
    spans = [part.strip().split("-") for part in text.split(",")]
    return [n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)]


def sums(rows: list[dict[str, Any]]) -> set[int]:
    """Every sum that a claim about these rows may be: of each kind of value, or of values and bytes of rungs and their kinds."""
    out: dict[Any, int] = defaultdict(int)
    for row in rows:
        for name, count in (row["compared"] if isinstance(row.get("compared"), dict) else {}).items():
            over_http = any(word in row["phase"] for word in ("HTTP", "released"))
            out[over_http, name] += count
        for rung in row.get("rungs", []):
            kinds = [way for way in ("prefill", "eager decode", "CUDA graph") if way in rung["what"].split(" against ")[-1]] or [""]
            for key in ("compared", "compared_bytes"):
                out[rung["rung"], kinds[0], key] += rung[key]
                out[rung["rung"], key] += rung[key]
                out["all", key] += rung[key]
                if rung["rung"] in (1, 2):
                    out["1 and 2", key] += rung[key]
    return set(out.values())


def differing(row: dict[str, Any]) -> int:
    return sum(row.get("differing_bytes", {}).values()) + sum(rung["differing"] for rung in row.get("rungs", []))


def claims() -> list[tuple[list[int], list[int]]]:
    """(lines, numbers) of every row of a table of the proof page that names lines."""
    out = []
    column = None
    for line in PROOF.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            column = None
        elif cells[0] == "model":
            column = next((i for i, cell in enumerate(cells) if cell in ("line", "lines")), None)
        elif column is not None and re.fullmatch(r"[\d, -]+", cells[column]) and any(c.isdigit() for c in cells[column]):
            out.append((lines_of(cells[column]), numbers(line)))
    return out


@pytest.mark.parametrize(("lines", "claimed"), claims())
def test_a_claim_of_the_proof_page_is_the_sum_of_its_rows(lines: list[int], claimed: list[int]) -> None:
    rows = [ROWS[n - 1] for n in lines]
    possible = sums(rows).union(*(sums([row]) for row in rows))
    assert claimed and set(claimed) <= possible, sorted(set(claimed) - possible)
    assert not any(differing(row) for row in rows)


def test_the_claims_are_found_and_a_wrong_one_is_seen() -> None:
    found = claims()
    assert len(found) == 16 and sum(len(numbers) for _, numbers in found) > 50
    lines, claimed = found[0]
    assert claimed[0] in sums([ROWS[n - 1] for n in lines]) and claimed[0] + 1 not in sums([ROWS[n - 1] for n in lines])


def test_the_front_page_claims_what_the_proof_page_does() -> None:
    rows = defaultdict(int)
    for lines, claimed in claims()[:6]:  # rung 3
        rows[lines[0]] = sum(claimed)
    front = (ROOT / "README.md").read_text()
    shown = [numbers(line)[0] for line in front.splitlines() if re.match(r"\| (Q|G|D)[^|]* layers \|", line) and "0 of" in line]
    assert shown == list(rows.values())


def shown(page: str) -> list[tuple[int, list[str]]]:
    """(line, numbers as they are written) of every row of a table whose last column names a line."""
    out = []
    for row in page.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")] if row.startswith("|") else []
        if len(cells) > 2 and cells[-1].isdigit():
            out.append((int(cells[-1]), [cell for cell in cells[1:-1] if re.fullmatch(r"[\d.]+", cell)]))
    return out


def leaves(value: Any) -> list[float]:
    """Every number inside a row of results."""
    if isinstance(value, dict | list):
        return [number for inner in (value.values() if isinstance(value, dict) else value) for number in leaves(inner)]
    return [float(value)] if isinstance(value, int | float) else []


def misquoted(page: str, rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Numbers that are none of the row that they name, rounded to the digits that are written."""
    out = []
    for line, numbers in shown(page):
        for number in numbers:
            digits = len(number.partition(".")[2])
            if not any(abs(found - float(number)) <= 0.5000001 * 10**-digits for found in leaves(rows[line - 1])):
                out.append((line, number))
    return out


def test_the_page_of_decisions_quotes_its_rows() -> None:
    page = (ROOT / "docs" / "DECISIONS.md").read_text()
    rows = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / "decisions_h200.jsonl").read_text().splitlines()]
    assert sum(len(numbers) for _, numbers in shown(page)) > 70
    assert not misquoted(page, rows)
    assert misquoted(page.replace("| 50.6 |", "| 50.7 |"), rows) == [(27, "50.7")]  # the control


def anchors(page: Path) -> set[str]:
    """The names of a page's headings as they are linked to."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: Path) -> list[str]:
    out = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            out.append(target)
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One head\n[a](page.md#one-head) [b](#one-head) [c](page.md#other) [d](absent.md) [e](https://example.org)")
    assert broken_links(page) == ["page.md#other", "absent.md"]


def absent_paths(page: Path) -> list[str]:
    """Files and folders that a page names and that are not there; neither a place holder like FAMILY nor what is said to stand in an
    earlier commit is one."""
    text = re.sub(r"commit `[0-9a-f]{7,40}`, folder `[^`]*`", "", page.read_text())
    named = re.findall(r"`((?:zoo|tests|benchmarks|weights_tools|examples|docs|constraints)/[\w./-]*)`", text)
    return [path for path in named if not (ROOT / path).exists() and "FAMILY" not in path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    assert not absent_paths(page)


def test_an_absent_file_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`zoo/common/rows.py` `zoo/common/absent.py` `zoo/FAMILY/model.py` `zoo/common/ops/`, commit `4e91d64`, folder `benchmarks/gone`"
    )
    assert absent_paths(page) == ["zoo/common/absent.py"]


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or something in one."""
    module, _, name = dotted.rpartition(".")
    try:
        if importlib.util.find_spec(dotted) is not None:
            return True
    except ModuleNotFoundError:  # what stands before the last dot is no package
        pass
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_are_written_are_there(page: Path) -> None:
    named = set(re.findall(r"`((?:zoo|weights_tools|benchmarks)(?:\.\w+)+)`", page.read_text()))
    assert not [name for name in named if not resolves(name) and name != "zoo.families"]  # the entry point's name


def test_an_absent_name_is_seen() -> None:
    assert resolves("zoo.common.engine.Engine") and resolves("zoo.common.rows")
    assert not resolves("zoo.common.engine.Absent") and not resolves("zoo.absent")


def imported(page: Path) -> list[tuple[str, str]]:
    """(module, name) of every import in a page's examples that is one of ours."""
    lines = re.findall(r"^\s*from ((?:zoo|weights_tools)[\w.]*) import ([\w, ]+)", page.read_text(), re.MULTILINE)
    return [(module, name.strip()) for module, names in lines for name in names.split(",") if name.strip()]


@pytest.mark.parametrize("page", [page for page in PAGES if imported(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_examples_import_is_there(page: Path) -> None:
    assert all(hasattr(importlib.import_module(module), name) for module, name in imported(page))


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
