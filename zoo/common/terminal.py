"""What the command lines print and how they end.

Text of a checkpoint can't style the terminal, steer it or forge a line. A command ends with status 0, with 1 for a verdict (bytes
differ, a law is broken), and with 2 after one sentence on stderr for all else, a stream that can't be written included.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from zoo.common.reading import printable

WIDE = 130  # columns of a file or pipe, enough for the tables


class Terminal(Console):
    """A console on which a plain string is text: no markup, no emoji codes, no highlighting, all of it `printable`.

    Styles and line breaks of our own come as `Text`.
    """

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__(width=None if sys.stdout.isatty() else wide, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False, "highlight": False})

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has gone")


class Command(TyperCommand):
    """A command that ends in one sentence for whatever the user can cause."""

    def invoke(self, ctx: Any) -> Any:
        with one_sentence():
            return super().invoke(ctx)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns what went wrong into a sentence on stderr and exit status 2; what nobody foresaw keeps its traceback, with the same status."""
    if sys.stdout is None:  # closed by who started us: what is opened next would become the output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for the rest of the process
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except typer.Exit:
        raise
    except BrokenPipeError as error:  # whoever read the output wants no more of it, and no sentence about it
        _end("", error)
    except (ValueError, OSError, MemoryError) as error:
        _end(f"error: {printable(_said(error))}\n", error)
    except Exception as error:
        _end(traceback.format_exc(), error)


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"the memory does not suffice: {error}".removesuffix(": ")
    if isinstance(error, OSError) and error.filename is None and not isinstance(error, ValueError):
        return f"the output can't be written: {error}"
    return str(error)


def _end(text: str, error: Exception) -> None:
    with suppress(OSError, AttributeError):  # stderr can't be written either, or is closed
        sys.stderr.write(text)
        sys.stderr.flush()
    for stream in (sys.stdout, sys.stderr):
        _let_go(stream)
    raise SystemExit(2) from error


def _let_go(stream: TextIO | None) -> None:
    """What a stream could not write would be tried once more at the end, and change the exit status."""
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


def run(application: typer.Typer, name: str, arguments: list[str] | None = None) -> None:
    """Runs a command line of `Command`s; `arguments` instead of those of the process."""
    with one_sentence():
        application(arguments, prog_name=name)
