"""The pictures of the documentation: made from the rows that are stored, and what is checked in is what is made."""

from __future__ import annotations

import json
import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.figures import ROWS, cost, idea, models, ops, rows_of, serving, write

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize("name", ["idea.svg", "cost.svg"])
def test_the_picture_that_is_checked_in_is_the_one_that_is_made(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    made = (tmp_path / name).read_text()
    assert made == (DOCS / name).read_text(), "remake it: make figures"
    assert ElementTree.fromstring(made).tag.endswith("svg") and "http" not in made.replace("http://www.w3.org/2000/svg", "")


def test_a_row_more_moves_its_dot(tmp_path: Path) -> None:
    """The control: a later measurement of the same thing replaces its dot, and only that."""
    rows = rows_of(ROWS)
    row = next(row for row in rows if row["kind"] == "model" and row["what"] == "decode")
    again = cost([*rows, {**row, "ratio": 3.5}])
    before, after = (set(re.findall(r"<circle.*?</circle>", text)) for text in (cost(rows), again))
    assert len(before - after) == len(after - before) == 1 and "decode, batch" in next(iter(after - before))
    changed = tmp_path / "rows.jsonl"
    changed.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    write(tmp_path / "again", changed)
    assert (tmp_path / "again" / "cost.svg").read_text() == cost(rows)


def test_every_measurement_has_its_dot() -> None:
    rows = rows_of(ROWS)
    panels = (models(rows), serving(rows), ops(rows))
    assert [len(panel) for panel in panels] == [8, 4, 12]
    points = [ratio for panel in panels for its in panel.values() for _, ratio in its]
    assert cost(rows).count("<circle") == len(points) and min(points) > 0.19 and max(points) < 4.0  # all on the axis


def test_the_slow_ones_are_in_it() -> None:
    rows = rows_of(ROWS)
    slowest = max((row for row in rows if row["kind"] == "op" and row["ratio"]), key=lambda row: row["ratio"])
    assert f"{slowest['shape']}, {slowest['rows']} rows" in cost(rows)


def test_the_bytes_of_the_idea_are_those_of_its_number() -> None:
    number, octets = re.findall(r"= (-[\d.]+)<", idea()), re.findall(r">((?:[0-9a-f]{2} ){3}[0-9a-f]{2})<", idea())
    assert len(number) == len(octets) == 3 and len(set(octets)) == 1
    assert struct.pack(">f", float(number[0])).hex(" ") == octets[0]
