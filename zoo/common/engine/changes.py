"""Changes of an engine: one thread at a time is inside, and what broke off is known by its mark until it is mended."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from zoo.common.engine.request import Request


class Changes:
    """Who is inside an engine, and which change is under way.

    unfinished  None where none is; else the requests that are to be dropped if it breaks off, as their caller learns of none of them
    """

    def __init__(self) -> None:
        self.unfinished: tuple[Request, ...] | None = None
        self._inside: dict[str, int] = {}  # "thread": its number; a dictionary, since setdefault asks and sets in one

    @contextmanager
    def change(self, *requests: Request) -> Iterator[None]:
        """Around every change of requests, queues, pages and memory: the mark is set before it and cleared behind it."""
        outer = self.unfinished
        self.unfinished = (*(outer or ()), *requests)
        yield
        self.unfinished = outer

    def enter(self) -> None:
        """ValueError if another thread is inside."""
        mine = threading.get_ident()
        if self._inside.setdefault("thread", mine) != mine:
            raise ValueError("another thread is inside this engine: give each an engine of its own, or let one of them drive it")

    @property
    def is_mine(self) -> bool:
        """Whether the thread inside is this one."""
        return self._inside.get("thread") == threading.get_ident()

    def leave(self) -> None:
        if self.is_mine:
            self._inside.clear()


class Changing(Protocol):
    """What `driving` needs of an engine."""

    changes: Changes

    def recover(self, dropped: tuple[Request, ...]) -> None:
        """Mends a change that broke off anywhere, without the requests `dropped`; it may break off as well, and then runs again."""


Driven = TypeVar("Driven", bound=Changing)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def driving(method: Callable[Concatenate[Driven, Arguments], Result]) -> Callable[Concatenate[Driven, Arguments], Result]:
    """Makes a method of the engine one that changes it: for one thread at a time, and whole or not at all.

    A change that broke off, by Ctrl-C say, left its mark (`Changes.change`). It is mended at once, or, where that was interrupted
    too, before the next call does anything.
    """

    @functools.wraps(method)
    def call(self: Driven, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            try:
                self.changes.enter()
                _settle(self)
                return method(self, *args, **kwargs)
            except BaseException:
                _settle(self)
                raise
            finally:
                self.changes.leave()
        finally:
            self.changes.leave()  # again: the first may have been interrupted before it did anything

    return call


def _settle(engine: Changing) -> None:
    if engine.changes.unfinished is not None and engine.changes.is_mine:
        engine.recover(engine.changes.unfinished)
