"""Exit statuses, and the error that ends a command with one line and a hint.

raise CommandError("no function 'make' in model.py", hint="it has: minibatch, main")
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Exit statuses of every command; documented in `fxbatch --help` and docs/cli.md."""

    OK = 0
    DIFFERENCE = 1  # the command ran, and what it checked does not hold
    USAGE = 2  # unknown option or value, target not found
    DATA = 3  # a data file is missing or malformed, a download failed
    MODEL = 4  # the user's model or target function raised, or fxbatch can't run it
    INTERNAL = 70  # a mistake of fxbatch itself
    INTERRUPTED = 130  # Ctrl-C
    PIPE = 141  # the reader of the output went away


STATUS_TEXT = (
    (Status.OK, "done"),
    (Status.DIFFERENCE, "what was checked does not hold (fxbatch check)"),
    (Status.USAGE, "wrong usage, or the target was not found"),
    (Status.DATA, "a data file is missing or malformed, or a download failed"),
    (Status.MODEL, "the model or the target function raised an error"),
    (Status.INTERNAL, "a mistake of fxbatch itself"),
    (Status.INTERRUPTED, "interrupted by Ctrl-C"),
    (Status.PIPE, "the reader of the output closed it"),
)


class CommandError(Exception):
    """Ends a command: `message` and `hint` are printed in one line each, `status` is the exit status."""

    def __init__(self, message: str, *, hint: str = "", status: Status = Status.USAGE) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status
