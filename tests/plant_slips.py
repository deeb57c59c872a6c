"""Plants the slips of tests/slips.toml one at a time and says which test catches each: `python tests/plant_slips.py [WORD ...]`.

Each slip is a snippet of a source file and what a tired hand might have written instead. It is planted in a temporary copy of the
tree, never in the tree itself; only the tests named beside it run there. Words choose the slips whose name or file holds one of
them. The exit status is 0 if every slip that was planted is caught.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "slips.toml"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "out", "build")
SECONDS = 120  # a slip whose tests take longer hangs them
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# pytest's exit statuses that say something of the tests; the others say that they did not run
PASSED = 0
FAILED = 1


@dataclass(frozen=True)
class Slip:
    """One change: `old` stands exactly once in `file` and becomes `new`; `tests` are the files or ids that ought to notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The source with the slip in it. ValueError where the snippet is not there exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} has {count} places of this snippet, a slip needs 1: {self.old!r}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of a slip. `test` is the first test that failed, if it was caught; `why` says what went wrong otherwise."""

    slip: Slip
    caught: bool
    test: str
    why: str
    seconds: float

    def line(self) -> str:
        verdict = f"caught by {self.test}" if self.caught else f"NOT CAUGHT: {self.why}"
        return f"{self.slip.name} ({self.slip.file}): {verdict} ({self.seconds:.0f} s)"


def read(path: Path) -> list[Slip]:
    """The slips of a list. ValueError for a slip that lacks a field, has another one, changes nothing or has another's name."""
    slips: list[Slip] = []
    for number, fields in enumerate(tomllib.loads(path.read_text())["slip"], 1):
        expected = set(Slip.__dataclass_fields__)
        if set(fields) != expected:
            raise ValueError(f"slip {number} of {path.name} has the fields {sorted(fields)}, it needs {sorted(expected)}")
        slip = Slip(**{**fields, "tests": tuple(fields["tests"])})
        if not slip.tests:
            raise ValueError(f"slip {slip.name!r} of {path.name} names no test")
        if slip.old == slip.new:
            raise ValueError(f"slip {slip.name!r} of {path.name} changes nothing")
        if slip.name in {other.name for other in slips}:
            raise ValueError(f"two slips of {path.name} have the name {slip.name!r}")
        slips.append(slip)
    return slips


def copied(root: Path, into: Path) -> Path:
    """A copy of the tree without what was built in it. Its compiled files are checked by content: a slip may keep a file's size
    and time."""
    copy = into / "tree"
    shutil.copytree(root, copy, ignore=LEFT_OUT)
    compileall.compile_dir(copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return copy


def run_tests(copy: Path, tests: Iterable[str], seconds: float | None = None) -> tuple[int, str]:
    """pytest's exit status and output for these tests in the copy, up to the first failure. TimeoutExpired after `seconds`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--no-header", "-rfE", *tests]
    environment = {**os.environ, **THREADS, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stdout + done.stderr


def failed_test(output: str) -> str | None:
    """The id of the first test that pytest's summary names."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::\w+(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    return None if found is None else found.group(1)


def plant(slip: Slip, copy: Path) -> Outcome:
    """Plants a slip in the copy, runs its tests there and takes it out again."""
    begin = time.monotonic()

    def outcome(test: str | None, why: str = "") -> Outcome:
        return Outcome(slip, test is not None, test or "", why, time.monotonic() - begin)

    path = copy / slip.file
    if not path.is_file():
        return outcome(None, f"there is no {slip.file}")
    source = path.read_text()
    try:
        path.write_text(slip.planted(source))
        status, output = run_tests(copy, slip.tests, SECONDS)
    except ValueError as error:
        return outcome(None, str(error))
    except subprocess.TimeoutExpired:
        return outcome(None, f"its tests ran past {SECONDS} s")
    finally:
        path.write_text(source)
    last = output.strip().splitlines()[-1:]
    if status == FAILED:
        return outcome(failed_test(output), f"no test is named: {last}")
    if status == PASSED:
        return outcome(None, f"the tests pass with it: {last}")
    return outcome(None, f"the tests did not run, pytest ended with status {status}: {last}")


def score(slips: list[Slip], root: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Every slip's outcome. ValueError if a test fails while nothing is planted: it would prove nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(root, Path(folder))
        status, output = run_tests(copy, dict.fromkeys(test for slip in slips for test in slip.tests))
        if status != PASSED or " passed" not in output:
            raise ValueError(f"with nothing planted the tests must pass, and do not: {output[-2000:]}")
        outcomes = []
        for slip in slips:
            outcomes.append(plant(slip, copy))
            say(outcomes[-1].line())
        return outcomes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Plants slips one at a time and says which test catches each.")
    parser.add_argument("words", nargs="*", help="only the slips whose name or file holds one of these words")
    words = parser.parse_args(arguments).words
    chosen = [slip for slip in read(LIST) if not words or any(word in f"{slip.name} {slip.file}" for word in words)]
    if not chosen:
        print(f"no slip of {LIST.name} holds {' or '.join(words)}", file=sys.stderr)
        return 2
    try:
        outcomes = score(chosen, ROOT, lambda line: print(line, flush=True))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} slips caught, {sum(o.seconds for o in outcomes):.0f} s")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
