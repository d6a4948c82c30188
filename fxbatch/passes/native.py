"""The loops over columns that are in C where there was a compiler.

In: arrays. Out: results in arrays that the caller made. Each caller has its numpy or Python twin beside it,
which runs where `Native.loops` is None, and says what the loop does.

    if Native.loops is not None:
        Native.loops.longest_before(source, target, depth)
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

try:
    _loops: Any = importlib.import_module("fxbatch.passes._loops")
except ImportError:  # installed without a C compiler
    _loops = None


class Native:
    """The loops in C, or None; tests set None to run the twins."""

    loops = _loops


def checksum(*columns: np.ndarray) -> int:
    """A number that tells contents of columns (C-contiguous) apart, another one without the extension."""
    if Native.loops is not None:
        found: int = Native.loops.checksum(*columns)
        return found
    return hash(tuple(column.tobytes() for column in columns))


def empty_column(items: int) -> np.ndarray:
    """int64 [items], contents to come: where C writes columns whose number it has counted."""
    return np.empty(items, dtype=np.int64)
