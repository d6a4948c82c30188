"""What the recorder keeps of a minibatch, as C and Python both see it.

In: signature ids, value ids, calls that were met before. Out: columns that numpy reads without conversion.

    sigs = new_column()
    sigs.append(3)
    np.array(sigs, dtype=np.int32)
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

try:
    _fast: Any = importlib.import_module("fxbatch.trace._fast")
except ImportError:  # installed without a C compiler
    _fast = None

Owner = TypeVar("Owner")


class ExtensionSwitch:
    """Whether new recordings use the C extension: tests turn it off, and every call goes the long way."""

    on = _fast is not None


def new_column() -> Any:
    """An empty int64 column with append, extend and the buffer protocol."""
    return _fast.Column() if ExtensionSwitch.on else array("q")


def new_call_table() -> Any:
    """An empty table of calls that were met before, see _fast_columns.h; without C it stays empty."""
    return _fast.CallTable() if ExtensionSwitch.on else {}


Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # the smallest and the largest size of each dimension


def sizes_of(tensors: list[torch.Tensor]) -> tuple[np.ndarray, Bounds] | None:
    """int64 [tensors, dimensions]: the sizes of plain tensors that may differ in their sizes alone, and their bounds;
    None for others."""
    first = tensors[0]
    rank = first.dim()
    sizes = np.empty((len(tensors), rank), dtype=np.int64)
    if ExtensionSwitch.on:
        found = _fast.sizes_of(tensors, sizes, rank)
        return None if found is None else (sizes, (found[:rank], found[rank:]))
    kind = (torch.Tensor, first.dtype, first.requires_grad, first.dim())
    if any((type(t), t.dtype, t.requires_grad, t.dim()) != kind for t in tensors):
        return None
    sizes[:] = [t.shape for t in tensors]
    return sizes, (tuple(sizes.min(0).tolist()), tuple(sizes.max(0).tolist()))


def _ignore(recorder: Any) -> None:
    """There is no C extension to be told."""


set_current: Callable[[Any], None] = _fast.set_current if _fast is not None else _ignore
quicken: Callable[[type | tuple[type, ...]], None] = _fast.quicken if _fast is not None else _ignore
