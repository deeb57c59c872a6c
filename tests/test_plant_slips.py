"""The list of slips fits the tree, and the script that plants them tells a caught slip from one that is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plant_slips import LIST, ROOT, Slip, failed_test, read, score

SLIPS = read(LIST)
WRONG_SIGN = Slip("a wrong sign", "toy.py", "a + b", "a - b", ("tests/test_toy.py",))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A tree of one function and its tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy.py").write_text("def add(a, b):\n    return a + b  # the sum\n\n\ndef zero():\n    return 0\n")
    tests = "import toy\n\n\ndef test_zero():\n    assert toy.zero() == 0\n\n\ndef test_sum():\n    assert toy.add(1, 2) == 3\n"
    (tmp_path / "tests" / "test_toy.py").write_text(tests)
    return tmp_path


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name)
def test_a_slip_of_the_list_can_be_planted(slip: Slip) -> None:
    """Where its snippet was written anew, the list says so: a slip that can't be planted is caught by nothing."""
    source = (ROOT / slip.file).read_text()
    planted = slip.planted(source)
    assert planted != source
    compile(planted, slip.file, "exec")
    for test in slip.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        function = name.rsplit("::", 1)[-1].partition("[")[0]
        assert not function or re.search(rf"^\s*(def|class) {function}\b", text, re.MULTILINE), f"{file} has no {function}"


def test_caught_and_not_caught(toy: Path) -> None:
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    slips = [
        WRONG_SIGN,
        replace(WRONG_SIGN, name="nobody looks", tests=("tests/test_toy.py::test_zero",)),
        replace(WRONG_SIGN, name="no import", old="return a + b", new="return a +"),
        replace(WRONG_SIGN, name="not there", old="a * b"),
        replace(WRONG_SIGN, name="twice there", old="return"),
        replace(WRONG_SIGN, name="no file", file="other.py"),
        replace(WRONG_SIGN, name="the same size", old="return 0", new="return 1"),
    ]
    said: list[str] = []
    outcomes = score(slips, toy, said.append)
    assert [o.caught for o in outcomes] == [True, False, False, False, False, False, True]
    assert outcomes[0].test == "tests/test_toy.py::test_sum" and outcomes[6].test == "tests/test_toy.py::test_zero"
    assert [o.why.partition(":")[0] for o in outcomes[1:6]] == [
        "the tests pass with it",
        "the tests did not run, pytest ended with status 2",
        "toy.py has 0 places of this snippet, a slip needs 1",
        "toy.py has 2 places of this snippet, a slip needs 1",
        "there is no other.py",
    ]
    assert said[0].startswith("a wrong sign (toy.py): caught by tests/test_toy.py::test_sum (")
    assert said[1].startswith("nobody looks (toy.py): NOT CAUGHT: the tests pass with it: ['1 passed in")
    assert {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()} == before


def test_tests_that_fail_or_run_not_at_all_prove_nothing(toy: Path) -> None:
    test = toy / "tests" / "test_toy.py"
    test.write_text(test.read_text().replace("== 3", "== 4"))
    with pytest.raises(ValueError, match="(?s)with nothing planted the tests must pass, and do not: .*FAILED tests/test_toy.py::test_sum"):
        score([WRONG_SIGN], toy, lambda line: None)
    test.write_text("import pytest\n\n\ndef test_sum():\n    pytest.skip('not today')\n")
    with pytest.raises(ValueError, match="(?s)must pass, and do not: .*1 skipped"):
        score([WRONG_SIGN], toy, lambda line: None)


def test_the_first_failing_test_is_named() -> None:
    output = "F\nFAILED tests/a.py::test_b[x - y] - assert 1 == 2\nFAILED tests/a.py::test_c\n"
    assert failed_test(output) == "tests/a.py::test_b[x - y]"
    assert failed_test("ERROR tests/a.py::test_b - boom\n") == "tests/a.py::test_b"
    assert failed_test("1 passed in 0.1s\n") is None


FIELDS = 'name = "n"\nfile = "toy.py"\nold = "a"\nnew = "b"\ntests = ["t"]\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[slip]]\n" + FIELDS + "line = 3\n", r"slip 1 of list.toml has the fields .*'line'.*, it needs"),
        ("[[slip]]\n" + FIELDS.replace('"b"', '"a"'), "slip 'n' of list.toml changes nothing"),
        ("[[slip]]\n" + FIELDS.replace('["t"]', "[]"), "slip 'n' of list.toml names no test"),
        (("[[slip]]\n" + FIELDS) * 2, "two slips of list.toml have the name 'n'"),
    ],
)
def test_a_faulty_list_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path / "list.toml")
