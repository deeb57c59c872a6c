"""Readers of a record's JSON: each gives one value in the type that is wanted, or a ValueError that says what was there instead."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from zoo.common.reading import shown, some

IDS = 1 << 31  # no vocabulary is larger
HEXADECIMAL = re.compile("([0-9a-f]{8})*")


def read_fields(what: str, value: object, names: Collection[str]) -> dict[str, Any]:
    """A dictionary of exactly these fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a dictionary, not {shown(value)}")
    if set(value) != set(names):
        raise ValueError(f"{what} has the fields {', '.join(sorted(names))}, this one {some(sorted(map(shown, value)), most=20)}")
    return value


def read_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {shown(value)}")
    return value


def read_truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {shown(value)}")
    return value


def read_dictionary(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a dictionary, not {shown(value)}")
    return value


def read_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """One of a few words."""
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"{name} {shown(value)} is not one of {', '.join(choices)}")


def read_ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids: integers of at least 0 and below 2^31."""
    members = value if isinstance(value, list | tuple) else [value]
    for member in members:
        if type(member) is not int or not 0 <= member < IDS:
            raise ValueError(f"{name} must be a list of integers of at least 0 and below 2^31, not {shown(member)}")
    if members is not value:
        raise ValueError(f"{name} must be a list of integers of at least 0 and below 2^31, not {shown(value)}")
    return tuple(members)


def read_floats(name: str, value: object) -> tuple[float, ...]:
    """FP32 numbers of little-endian hexadecimal text, 8 digits each, as Python floats of the same value: log-probabilities."""
    if not isinstance(value, str) or not HEXADECIMAL.fullmatch(value):
        raise ValueError(f"{name} must be hexadecimal text of whole FP32 numbers, 8 digits each, not {shown(value)}")
    content = bytes.fromhex(value)
    numbers = struct.unpack(f"<{len(content) // 4}f", content)
    for number in numbers:
        if number > 0:
            raise ValueError(f"{name} holds {number!r}; a log-probability is at most 0")
    return numbers


def write_floats(values: Sequence[float]) -> str:
    """What `read_floats` reads."""
    return struct.pack(f"<{len(values)}f", *values).hex()


def read_runs(name: str, value: object, most: int) -> tuple[str, ...]:
    """Texts of run lengths, [text, count] each, of at most `most` texts in all."""
    runs: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    total = 0
    for run in runs:
        pair = isinstance(run, list | tuple) and len(run) == 2 and isinstance(run[0], str)
        if not pair or type(run[1]) is not int or run[1] < 1:
            raise ValueError(f"{name} must be runs [weights, rows of at least 1], not {shown(run)}")
        total += run[1]
    if total > most:
        raise ValueError(f"{name} count {total} rows for {most} tokens")
    return tuple(text for text, count in runs for _ in range(count))


def write_runs(texts: Sequence[str]) -> list[list[str | int]]:
    """What `read_runs` reads."""
    return [[text, len(list(run))] for text, run in groupby(texts)]
