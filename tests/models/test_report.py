"""The HTML page of a climb, and the table beside it: each row's verdict, and each differing byte in its own cell."""

from __future__ import annotations

import re

from zoo.verify.ladder import Result
from zoo.verify.report import BINS, page
from zoo.verify.run import table_of
from zoo.verify.tally import Row

EMPTY = Row(3, "an empty row", 100, 200, 0, 0.0, ok=False)
EQUAL = Row(3, "an equal row", 100, 200, 0, 0.0, ok=True)
DIFFERS = Row(4, "a row that differs", 100, 200, 7, 0.5, ok=False)


def result(heat: dict[tuple[str, int], int] | None = None) -> Result:
    return Result("qwen3", "cpu", {}, rows=[EMPTY, EQUAL, DIFFERS], heat=heat or {})


def test_a_row_that_proves_nothing_is_no_equal_one() -> None:
    """An empty row has no differing byte: its verdict is what the ladder says, not what its count seems to."""
    said = page(result(), [], 1, 8)
    verdicts = dict(re.findall(r'<tr><td>([^<]*)</td>(?:<td class="n">[^<]*</td>){4}<td><span class="\w+">(\w+)</span>', said))
    assert verdicts == {EMPTY.what: "FAILED", EQUAL.what: "equal", DIFFERS.what: "FAILED"}
    assert "The climb failed." in said


def test_the_table_s_verdicts_are_the_rows() -> None:
    verdicts = [str(cell) for cell in table_of(result()).columns[-1].cells]
    assert verdicts == ["FAILED", "equal", "FAILED"]


def cells(said: str) -> dict[str, tuple[float, int, str]]:
    """Each cell of the heat map by its words: where it stands, and its colour."""
    found = re.findall(r'<rect x="([\d.]+)" y="(\d+)" [^>]*fill="([^"]+)"><title>([^<]*)</title>', said)
    return {title: (float(x), int(y), colour) for x, y, colour, title in found}


def test_a_differing_byte_colours_its_own_cell() -> None:
    """The words, the place and the colour of a cell agree: one layer down, one position right, and nothing else."""
    plain = cells(page(result(), [], 2, 4))
    names = ["log-prob", "layer 0", "layer 1"]
    assert list(plain) == [f"{name}, positions {p} to {p}: 0 bytes" for name in names for p in range(4)]
    (green,) = {colour for *_, colour in plain.values()}
    for layer, name in (("log-prob", "log-prob"), ("0", "layer 0"), ("1", "layer 1")):
        for position in range(4):
            hot = cells(page(result({(layer, position): 5}), [], 2, 4))
            place = f"{name}, positions {position} to {position}: "
            assert {title for title, (*_, colour) in hot.items() if colour != green} == {f"{place}5 bytes"}
            assert hot[f"{place}5 bytes"][:2] == plain[f"{place}0 bytes"][:2]
    columns = sorted({x for x, *_ in plain.values()})
    rows = sorted({y for _, y, _ in plain.values()})
    for i, name in enumerate(names):
        assert [plain[f"{name}, positions {p} to {p}: 0 bytes"][:2] for p in range(4)] == [(x, rows[i]) for x in columns]


def test_cells_of_several_positions_add_up_what_is_theirs() -> None:
    longest = 2 * BINS + 1  # three positions a cell, the last cell has fewer
    heat = {("0", 0): 1, ("0", 2): 2, ("0", 3): 4, ("0", longest - 1): 8}
    counted = {
        title.removeprefix("layer 0, positions ") for title in cells(page(result(heat), [], 1, longest)) if not title.endswith(": 0 bytes")
    }
    assert counted == {"0 to 2: 3 bytes", "3 to 5: 4 bytes", f"{longest - 1} to {longest - 1}: 8 bytes"}
