"""Where commands print: results on standard output, progress and errors on standard error.

Both are rich consoles: coloured on a terminal, plain in a pipe, without colour under NO_COLOR.

    output().print(table)
    notices().print("reading 8544 trees")
"""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPE_WIDTH = 140


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
