"""Mistakes inside fxbatch, told apart from what a user's code can't do.

What a body raises when it is traced or batched is a reason to run it call by call. What fxbatch itself raises on the
way is a mistake, which must not hide behind such a reason: `verify=True` raises it, otherwise it is warned of once.

    with ours():                     # rewriting a graph, say: whatever is raised here is fxbatch's
        rewrite(graph)
    report(error, verify=False)      # a warning if it is a mistake
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, TracebackType
from typing import TypeVar

import torch

from fxbatch.errors import FxbatchError, InternalWarning, TraceError

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# What PyTorch's operators don't raise: an error of another type may come from one that fxbatch calls for the user.
_PYTHONS_OWN = (AssertionError, AttributeError, KeyError, NameError)
_OPERATORS = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)  # what they do raise
_NOTE = "fxbatch: this is a mistake inside fxbatch, please report it"
_warned: set[tuple[str, int]] = set()  # places in fxbatch's code; only looked up
_running: dict[CodeType, bool] = {}  # of functions that run operations (True), or users' forwards

F = TypeVar("F", bound=Callable[..., object])


@contextlib.contextmanager
def ours(*reasons: type[Exception]) -> Iterator[None]:
    """No code of a user's runs within: what is raised is a mistake of fxbatch, but for `reasons` and lack of memory."""
    try:
        yield
    except (FxbatchError, NotImplementedError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not isinstance(error, reasons) and not is_mistake(error):
            error.add_note(_NOTE)
        raise


def is_mistake(error: BaseException) -> bool:
    """Whether fxbatch's own code raised it, and not the user's or PyTorch on the user's behalf."""
    if _NOTE in getattr(error, "__notes__", ()):
        return True
    place = _innermost(error.__traceback__)
    return isinstance(error, _PYTHONS_OWN) and place is not None and place[0].startswith(_PACKAGE)


def report(error: Exception, what: str, *, verify: bool) -> str:
    """The error as a reason, in one line. A mistake is raised again (verify), or warned of once a place in the code."""
    mistake, place = is_mistake(error), _innermost(error.__traceback__) or ("", 0)
    if mistake and verify:
        raise error
    if mistake and place not in _warned:
        _warned.add(place)
        warnings.warn(
            f"{what} runs call by call because of a mistake inside fxbatch (please report it): {type(error).__name__}: "
            f"{error} ({os.path.basename(place[0])}:{place[1]}); verify=True raises it",
            InternalWarning,
            stacklevel=2,
        )
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def refusal_of(error: Exception) -> TraceError | None:
    """A mistake as a reason for the plain loop: an error that PyTorch's operators don't raise, of fxbatch's code, or of
    PyTorch's that this has called. None for others."""
    place = _innermost(error.__traceback__, but=(_TORCH,))
    if not isinstance(error, _PYTHONS_OWN) or place is None or not place[0].startswith(_PACKAGE):
        return None
    where = f"{os.path.basename(place[0])}:{place[1]}"
    text = f"a mistake inside fxbatch (please report it): {type(error).__name__}: {error} ({where})"
    return TraceError(text)


def runs_operations(function: F) -> F:
    """Marks a function of fxbatch that runs what was recorded."""
    _running[function.__code__] = True
    return function


def runs_forwards(function: F) -> F:
    """Marks one that runs users' forwards."""
    _running[function.__code__] = False
    return function


def error_of_operation(error: Exception) -> TraceError | None:
    """What an operation has raised when it ran (an index out of range, a matrix without inverse) as a reason for the
    loop, in which the forward may catch it. None for what a forward itself has raised, for lack of memory, and for what
    comes from elsewhere: the end of a checkpoint's second run, a signal's handler."""
    if not isinstance(error, _OPERATORS) or isinstance(error, (FxbatchError, torch.OutOfMemoryError)):
        return None
    of_operation, traceback = False, error.__traceback__
    while traceback is not None:
        of_operation = _running.get(traceback.tb_frame.f_code, of_operation)
        traceback = traceback.tb_next
    if not of_operation:
        return None
    lines = str(error).splitlines() or [""]
    refusal = TraceError(
        f"an operation has raised {type(error).__name__}, which the forward catches: {lines[0][:160]}"
    )
    refusal.of_operation = True
    return refusal


def _innermost(traceback: TracebackType | None, but: tuple[str, ...] = ()) -> tuple[str, int] | None:
    """The file and line that an error comes from; the last of those that are not in these folders."""
    place = None
    while traceback is not None:
        if not (file := traceback.tb_frame.f_code.co_filename).startswith(but):
            place = file, traceback.tb_lineno
        traceback = traceback.tb_next
    return place


def outside() -> int:
    """The stack level of the user's line that made the call, for a warning of the one who asks."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in ("fxbatch", "torch"):
        level, frame = level + 1, frame.f_back
    return level
