"""Where modules are looked for."""

from __future__ import annotations

import os
import sys


def drop_working_directory() -> None:
    """`python -m` puts the working directory first: a checkpoint's `typer.py` would run. A source checkout's own root stays.

    For the first line of a `__main__`; a console script has no such entry at all.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    here = os.getcwd()
    if sys.path and os.path.abspath(sys.path[0]) == here != root:
        del sys.path[0]
