"""The user's line: the innermost frame outside fxbatch and torch, as "model.py:31".

In: the Python stack of the caller. Out: text. Computed only when it is needed: for a new signature, an
error or a suspension, never once a call.

    user_line()   # "model.py:31"
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from types import CodeType, FrameType

import torch

from fxbatch.caches import cached

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SKIPPED = ("<frozen", "<string>", "<eval_with_key>", "<autobatch")


_LIBRARIES = ("contextlib", "functools", "copy", "threading", "greenlet")


def shown_name(path: str) -> str:
    """ "model.py" of a file; of a notebook's cell "In[3]", as the notebook says itself."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(path)
    return os.path.basename(path) if cell is None else str(cell[1])


@cached("files of code")
def _is_users(path: str, module: str) -> bool:
    """Whether code of this file and module is the user's, not torch's, ours or a library's that passes calls on."""
    return path != "" and not (
        path.startswith((_PACKAGE, _TORCH, *_SKIPPED)) or module.startswith(_LIBRARIES)
    )


def user_line() -> str:
    """The user's line as "model.py:31", "" when no user code is on the stack."""
    return line_of(user_place())


UserPlace = tuple[CodeType, int] | None  # code and the instruction in it; None: no user code


def user_place(inner: int = 0) -> UserPlace:
    """Where the innermost frame of the user's code is, at a cost of well under a microsecond; `line_of` makes text of
    it. inner: how many frames between the caller and that are certainly ours: one that is not looked at costs a tenth.
    """
    frame: FrameType | None = sys._getframe(inner + 1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


def line_of(place: UserPlace) -> str:
    """A place as "model.py:31", "" for none."""
    if place is None:
        return ""
    code, instruction = place
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end and line is not None]
    return f"{shown_name(code.co_filename)}:{lines[0] if lines else code.co_firstlineno}"


def source_of(place: UserPlace) -> str:
    """The text of what is called there, "float(best)"; "" where the file can't be read."""
    if place is None:
        return ""
    code, instruction = place
    first, last, begin, end = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if first is None or first != last:
        return "" if first is None else linecache.getline(code.co_filename, first).strip()
    text = linecache.getline(code.co_filename, first).encode()[begin:end]  # columns count bytes
    return text.decode(errors="replace").strip()


def at_line() -> str:
    """The text " (model.py:31)", to end a message with; "" when there is no user's line."""
    line = user_line()
    return f" ({line})" if line else ""
