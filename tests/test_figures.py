"""The pictures of the documentation: made from the rows that are stored, and what is checked in is what is made."""

from __future__ import annotations

import json
import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.figures import GRPO_ROWS, ROWS, cost, grpo, idea, models, ops, rows_of, serving, write

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
    number = re.findall(r"= (-[\d.]+)<", idea())
    octets = re.findall(r">((?:[0-9a-f]{2} ){3}[0-9a-f]{2})<", idea())
    assert len(number) == len(octets) == 3 and len(set(octets)) == 1
    assert struct.pack(">f", float(number[0])).hex(" ") == octets[0]


def run(sampler: str, k3: list[float], **changed: object) -> dict[str, object]:
    """A row as benchmarks/grpo.py writes it."""
    row = {"kind": "grpo", "arch": "qwen3", "size": "0.6b", "layers": 28, "sampler": sampler, "k3": k3, "clip_ratio": [0.0] * len(k3)}
    return {**row, "reward": [0.5 + i / 10 for i in range(len(k3))], "differing_bytes": [0] * len(k3), **changed}


def test_curves_of_both_samplers_are_in_one_plot() -> None:
    rows = [
        run("embedded", [0.0] * 4),
        run("sglang", [0.0] * 4),
        run("unaligned", [1e-3, 2e-3, 1e-4, 1e-3], clip_ratio=[0.1, 0.2, 0.0, 0.1]),
    ]
    made = grpo(rows)  # type: ignore[arg-type]
    assert ElementTree.fromstring(made).tag.endswith("svg") and made.count("<polyline") == 3 * 3 + 3  # and one each in the legend
    assert "unaligned kernels: K3, 4 steps, last 0.001" in made and "Qwen3-0.6B, 28 layers" in made
    again = grpo([*rows, run("unaligned", [1e-3, 2e-3, 1e-4, 1e-2])])  # type: ignore[arg-type]
    assert again != made and again.count("<polyline") == made.count("<polyline")  # a later run takes the place of its curve
    two = grpo([*rows, run("embedded", [0.0], arch="qwen3_moe", size="30b-a3b", layers=8), run("http", [], reward=[])])  # type: ignore[arg-type]
    assert "Qwen3-30B-A3B, 8 layers" in two and "over HTTP" not in two


@pytest.mark.skipif(not GRPO_ROWS.exists(), reason="no rows of benchmarks/grpo.py are stored yet")
def test_the_curves_that_are_checked_in_are_those_that_are_made() -> None:
    assert grpo(rows_of(GRPO_ROWS)) == (DOCS / "grpo.svg").read_text(), "remake it: make figures"
    for row in rows_of(GRPO_ROWS):
        assert row["sampler"] == "unaligned" or not any(row["differing_bytes"])
