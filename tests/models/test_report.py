"""The HTML page of a climb, and the table beside it: each row's verdict, and each differing byte in its own cell."""

from __future__ import annotations

import re
from html import escape

import zoo
from zoo.verify.asked import Asked
from zoo.verify.ladder import Result
from zoo.verify.report import BINS, page
from zoo.verify.run import about, table_of
from zoo.verify.subject import Settings
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
    names = ["log-probability", "layer 0", "layer 1"]
    assert list(plain) == [f"{name}, positions {p} to {p}: 0 bytes" for name in names for p in range(4)]
    (green,) = {colour for *_, colour in plain.values()}
    for layer, name in (("log-prob", "log-probability"), ("0", "layer 0"), ("1", "layer 1")):
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


def test_the_caption_names_the_rungs_that_ran_and_the_scale_what_colours_mean() -> None:
    cold = page(result(), [], 1, 8)
    assert "No byte differs: log-probabilities and cached bytes of rungs 3 and 4." in cold and ">differing bytes</text>" in cold
    hot = page(result({("0", 3): 270}), [], 1, 8)
    assert "Darkest: 270 bytes." in hot and [int(n) for n in re.findall(r'y="\d+">(\d+)</text>', hot)][-5:] == [0, 1, 10, 80, 270]
    one = page(Result("qwen3", "cpu", {}, rows=[EQUAL]), [], 1, 8)
    assert "cached bytes of rung 3." in one
    assert ">log-probability</text>" in one and ">layer 0</text>" in one and ">position</text>" in one  # whole labels


def test_the_page_and_the_file_say_what_was_run() -> None:
    asked = Asked("qwen3", "out/tiny model", None, "cpu", None, None, (3, 4), (5, 9), None, "embedded", 7, None)
    found = result()
    found.about = about(asked, Settings(lengths=(5, 9)))
    assert (
        found.about["command"]
        == "zoo verify qwen3 --checkpoint 'out/tiny model' --device cpu --rungs 3,4 --lengths 5,9 --engine embedded --seed 7"
    )
    assert {name: found.about[name] for name in ("checkpoint", "seed", "lengths", "version")} == {
        "checkpoint": "out/tiny model",
        "seed": "7",
        "lengths": "5, 9",
        "version": zoo.__version__,
    }
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d", found.about["date"])
    file = found.to_dict()
    assert file["about"] == found.about and (file["values_compared"], file["bytes_compared"], file["bytes_differing"]) == (300, 600, 7)
    said = page(found, [], 1, 8)
    for text in (*found.about.values(), "600", "bytes compared"):
        assert escape(text) in said
    random = Asked("qwen3", None, None, "cpu", "0.6b", 2, (1,), None, None, "embedded", 0, None)
    assert about(random, Settings(lengths=(5,)))["checkpoint"] == "random weights of size 0.6b, 2 layers"
    assert random.command() == "zoo verify qwen3 --device cpu --size 0.6b --layers 2 --rungs 1 --engine embedded --seed 0"


def test_a_failure_without_a_place_says_so() -> None:
    assert "No place was found" in page(result(), [], 1, 8)
    placed = result()
    placed.first_divergence = {"layer": "0", "op": "linear", "sequence": 1, "position": 2, "elements": 3, "ulp": 4}
    assert "<dt>values</dt><dd><code>3</code></dd>" in page(placed, [], 1, 8)
    equal = Result("qwen3", "cpu", {}, rows=[EQUAL])
    assert "First divergence" not in page(equal, [], 1, 8)
