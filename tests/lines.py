"""How many lines of fxbatch's Python a call runs: what a minibatch costs, counted and not timed.

lines_of(lambda: model(batch), "trace")     # those of the recorder
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fxbatch


def lines_of(call: Callable[[], Any], room: str = "") -> int:
    """Lines of fxbatch's Python, or of one of its rooms, that a call runs; the fewer of two, for some are run once in a
    while."""
    folder, count = str(Path(fxbatch.__file__).parent / room), 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(folder) else None

    counts = []
    for _ in range(2):
        before, count = sys.gettrace(), 0
        gc.collect()
        gc.disable()  # what earlier calls left is no part of this one
        sys.settrace(enter)
        try:
            call()
        finally:
            sys.settrace(before)
            gc.enable()
        counts.append(count)
    return min(counts)
