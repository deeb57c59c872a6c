"""Writes the stored hashes, or compares them with what the code does now. It needs no pytest.

python -m tests.golden.rewrite                                      what tests/golden/cpu.json lacks
python -m tests.golden.rewrite --reason TEXT                        after a change that moves bytes on purpose
python -m tests.golden.rewrite --device cuda --out FILE             of a GPU, to any file
python -m tests.golden.rewrite --device cuda --against FILE         compares and writes nothing; 1 if an entry differs
python -m tests.golden.rewrite --architecture NAME --out FILE       of one architecture; a file's other cases stay
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.golden.collect import collected, differing, made_on
from tests.golden.geometries import GEOMETRIES

FOLDER = Path(__file__).parent


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Every entry of every case that is not the same in both files' cases, as "case: entry"."""
    names = sorted({**stored, **found})
    return [f"{name}: {entry}" for name in names for entry in differing(stored.get(name, {}), found.get(name, {}))]


def told(line: str, stored: dict[str, Any]) -> bool:
    """Whether the stored file had this entry, so that its bytes moved."""
    case, entry = line.split(": ", 1)
    return entry in stored.get(case, {})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.rewrite", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="file to write; by default tests/golden/DEVICE.json")
    parser.add_argument("--against", type=Path, help="file to compare with; nothing is written")
    parser.add_argument("--architecture", choices=GEOMETRIES, help="whose cases alone are made")
    parser.add_argument("--reason", help="why stored bytes move; kept in the file")
    given = parser.parse_args(arguments)
    path = given.against or given.out or FOLDER / f"{given.device}.json"
    if given.against and not given.against.exists():
        parser.error(f"--against {given.against}: there is no such file")
    stored = read(path)
    here = made_on(given.device)
    if given.against and stored["made_on"] != here:
        parser.error(f"{path} was made on {stored['made_on']}, here is {here}: their bytes can't be compared")
    found = dict(collected(given.device, given.architecture))
    before = stored.get("cases", {}) if stored.get("made_on") == here else {}
    if given.architecture:
        found = {**before, **found}
    differences = changes(before, found)
    for line in differences if before else []:
        print(line)
    if given.against:
        print(f"{len(differences)} of {sum(map(len, found.values()))} entries differ from {path}")
        return int(bool(differences))
    if any(told(line, before) for line in differences) and not given.reason:
        print(f"{path} has other bytes: give --reason TEXT if they moved on purpose", file=sys.stderr)
        return 1
    reasons = stored.get("reasons", []) + ([given.reason] if given.reason else [])
    path.write_text(json.dumps({"made_on": here, "reasons": reasons, "cases": found}, indent=1) + "\n")
    print(f"{path}: {len(found)} cases, {sum(map(len, found.values()))} entries, {len(differences)} of them not as before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
