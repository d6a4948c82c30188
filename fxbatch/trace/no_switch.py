"""Calls of `torch.ops`: C++ bindings that must not be left by a greenlet switch.

In: the function that met a value. While a thread is inside such a call, an instance that asks for a value
is answered on the spot: pybind11 keeps a stack a thread, and ends the process when it is left out of order.

    with inside_binding(torch.ops.aten.nonzero):
        recorder.read(values)           # runs what is pending here, parks nothing
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_BOUND = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))  # packets and overloads


class _Depth(threading.local):
    depth = 0


_inside = _Depth()


@contextlib.contextmanager
def inside_binding(func: Any) -> Iterator[None]:
    """Note that this thread is inside a call of func, if that is one of torch.ops."""
    if not isinstance(func, _BOUND):
        yield
        return
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def must_not_switch() -> bool:
    """Whether this thread is inside a binding."""
    return _inside.depth > 0
