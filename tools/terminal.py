"""Where commands print: results on standard output, progress and errors on standard error.

Both are rich consoles: coloured on a terminal, plain in a pipe, without colour under NO_COLOR.

    output().print(table)
    notices().print("reading 8544 trees")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

PIPE_WIDTH = 140
T = TypeVar("T")


def _width(stream: object) -> int | None:
    """Columns for a stream that is no terminal (None lets rich ask the terminal); COLUMNS overrides."""
    if os.environ.get("COLUMNS", "").isdigit() or getattr(stream, "isatty", bool)():
        return None
    return PIPE_WIDTH


def output() -> Console:
    """The console of standard output. Results only, so that a pipe gets nothing else."""
    return Console(file=sys.stdout, width=_width(sys.stdout), highlight=False, emoji=False)


def notices() -> Console:
    """The console of standard error: progress, warnings, errors."""
    return Console(file=sys.stderr, width=_width(sys.stderr), highlight=False, emoji=False)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A line with a clock, on a terminal and while it takes: `with doing("64 instances"): ...`."""
    console = notices()
    if not console.is_terminal:  # in a notebook even what is disabled leaves an empty box
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def counted(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, with a bar on a terminal."""
    console = notices()
    if not console.is_terminal:
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, total=total, description=what)
