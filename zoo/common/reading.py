"""Reading files of unknown authors: their size first, JSON within bounds, and what a message shows of them clipped."""

from __future__ import annotations

import json
import reprlib
import unicodedata
from collections.abc import Collection
from pathlib import Path
from typing import Any

CONFIG_BYTES = 4 << 20  # of config.json and generation_config.json
JSON_BYTES = 32 << 20  # of an index and of a shard's header: published ones of 120,000 tensors take half of it
# commas and brackets: what a file's bytes become in memory grows with them, up to 200 bytes for one
JSON_VALUES = 1_000_000
SHOWN = 120  # characters of a name that a message shows
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode's categories: controls, formats (among them right-to-left), surrogates, new lines
JOINERS = "\u200c\u200d"  # formats that ordinary words and emoji need

_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxlong = _short.maxstring = _short.maxother = 80


def printable(text: object, keep: str = "") -> str:
    """The text with what steers a terminal written as escapes, new lines too; `keep`: characters that stay as they are."""
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in STEERING and c not in JOINERS + keep else c for c in str(text)
    )


def shown(value: Any) -> str:
    """The repr of a value, of a large one only its beginning."""
    if isinstance(value, int) and value.bit_length() > 14_000:  # Python writes none of more than 4300 digits
        return "an integer of more than 4000 digits"
    return clipped(_short.repr(value))


def clipped(text: str, most: int = SHOWN) -> str:
    """At most `most` characters of a text, all of them printable."""
    text = printable(text[: most + 1])
    return text if len(text) <= most else text[:most] + "..."


def some(names: Collection[str], most: int = 4) -> str:
    """The first few of many names, and how many more there are."""
    first = ", ".join(clipped(name) for name, _ in zip(names, range(most), strict=False))
    return first + (f" and {len(names) - most} more" if len(names) > most else "")


def read_object(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `most` bytes. ValueError naming the file."""
    return parse_object(path, read_bytes(path, most))


def read_bytes(path: Path, most: int) -> bytes:
    """A file's content. ValueError, before it is read, for one of more than `most` bytes."""
    check_size(path, most)
    return path.read_bytes()


def check_size(path: Path, most: int) -> None:
    """ValueError for a file of more than `most` bytes."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{path} has {size:,} bytes, {most:,} is the most that is read of it")


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object out of a file's bytes. ValueError naming the file."""
    values = sum(raw.count(mark) for mark in (b",", b"{", b"["))
    if values > JSON_VALUES:
        raise ValueError(f"{path} has {values:,} commas and brackets, {JSON_VALUES:,} is the most that is read of JSON")
    if 4 * len(raw) > JSON_BYTES and not raw.isascii():  # one character beyond ASCII may make all of them four bytes wide
        raise ValueError(f"{path} has {len(raw):,} bytes, not all of them ASCII; {JSON_BYTES // 4:,} is the most that is read of such JSON")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({clipped(str(error))})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}, not an object")
    return fields
