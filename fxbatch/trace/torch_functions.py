"""Functions of torch that recordings have met: while some thread records, something in C stands in their place.

    torch.tanh(v)       # known: recorded at once; torch would look its own function up by name and ask v about it

What stands there is equal to torch's function and has its attributes; only `is` tells them apart.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, ModuleType

import torch
import torch.nn.functional as F

from fxbatch.trace.state import _fast

met: list[tuple[ModuleType, str, object]] = []  # where, by which name, and what stands there
_noted: set[object] = set()


@functools.cache
def _places() -> dict[object, list[tuple[ModuleType, str]]]:
    """Where torch's own functions in C are looked up."""
    places: dict[object, list[tuple[ModuleType, str]]] = {}
    for module in (torch, F):
        for name, function in vars(module).items():
            if type(function) is BuiltinFunctionType:
                places.setdefault(function, []).append((module, name))
    return places


def note(function: object) -> None:
    """Calls of this one come again."""
    if _fast is None or type(function) is not BuiltinFunctionType or function in _noted:
        return
    _noted.add(function)
    met.extend((module, name, _fast.Function(function)) for module, name in _places().get(function, ()))
