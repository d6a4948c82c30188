"""What the recorder keeps of a minibatch, as C and Python both see it.

In: signature ids, value ids, calls that were met before. Out: columns that numpy reads without conversion.

    sigs = new_column()
    sigs.append(3)
    np.array(sigs, dtype=np.int32)
"""

from __future__ import annotations

import functools
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


def _ignore(_: Any) -> None:
    """There is no C extension to be told."""


# An empty int64 column with append, extend and the buffer protocol.
new_column: Callable[[], Any] = functools.partial(array, "q") if _fast is None else _fast.Column
# An empty table of calls that were met before, see _fast_columns.h; without C it stays empty.
new_call_table: Callable[[], Any] = dict if _fast is None else _fast.CallTable
set_current: Callable[[Any], None] = _ignore if _fast is None else _fast.set_current
quicken: Callable[[type | tuple[type, ...]], None] = _ignore if _fast is None else _fast.quicken

Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # the smallest and the largest size of each dimension


def sizes_of(tensors: list[torch.Tensor]) -> tuple[np.ndarray, Bounds] | None:
    """int64 [tensors, dimensions]: the sizes of plain tensors that may differ in their sizes alone, and their bounds;
    None for others."""
    first = tensors[0]
    rank = first.dim()
    sizes = np.empty((len(tensors), rank), dtype=np.int64)
    if _fast is not None:
        found = _fast.sizes_of(tensors, sizes, rank)
        return None if found is None else (sizes, (found[:rank], found[rank:]))
    kind = (torch.Tensor, first.dtype, first.requires_grad, first.dim())
    if any((type(t), t.dtype, t.requires_grad, t.dim()) != kind for t in tensors):
        return None
    sizes[:] = [t.shape for t in tensors]
    return sizes, (tuple(sizes.min(0).tolist()), tuple(sizes.max(0).tolist()))
