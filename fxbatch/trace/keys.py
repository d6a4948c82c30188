"""Keys of static arguments: equal exactly when the arguments are the same to an operation.

In: Python values that meet an operation. Out: hashable keys that keep the Python type (1, 1.0 and True
differ), the sign of zero, and make nan equal to itself.

    static_key(1) != static_key(True)
    static_key(float("nan")) == static_key(float("nan"))
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

_BY_VALUE = (
    type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout,
    type(Ellipsis), type(NotImplemented), torch.Size,
)  # fmt: skip


ATOMS = frozenset({*_BY_VALUE, float, complex})  # types of plain data without parts


class OpaqueArgumentError(Exception):
    """An argument that is neither a tensor nor plain data; `kind` is its type's name."""

    def __init__(self, argument: Any) -> None:
        self.kind = type(argument).__name__
        super().__init__(f"takes a {self.kind}")


class ByIdentity:
    """A key that holds its object, compared by identity."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return type(other) is ByIdentity and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def static_key(x: Any) -> Any:
    """The key of one static leaf; OpaqueArgumentError when it is no plain data."""
    kind = type(x)
    if kind in _BY_VALUE:
        return (kind, x)
    if kind is float:
        return (kind, _float_key(x))
    if kind is complex:
        return (kind, _float_key(x.real), _float_key(x.imag))
    if kind is slice:
        return (kind, static_key(x.start), static_key(x.stop), static_key(x.step))
    if isinstance(x, np.generic):
        return (kind, x.dtype.str, x.tobytes())
    if isinstance(x, (type, torch.Generator)) or (callable(x) and not isinstance(x, torch.nn.Module)):
        return (kind, ByIdentity(x))
    raise OpaqueArgumentError(x)


def _float_key(x: float) -> Any:
    if x != x or x == 0:
        return struct.pack("<d", x) if x == 0 else "nan"
    return x
