"""What the recorder keeps of a minibatch, as the C extension and its Python twin both see it.

In: signature ids, value ids, calls that were met before. Out: columns that numpy reads without conversion.

    sigs = new_column()
    sigs.append(3)
    np.array(sigs, dtype=np.int32)
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

try:
    _fast: Any = importlib.import_module("fxbatch.trace._fast")
except ImportError:  # installed without a C compiler
    _fast = None

if TYPE_CHECKING:
    import torch

    from fxbatch.trace.table import Entry
    from fxbatch.trace.values import Value


Owner = TypeVar("Owner")


class KnownCalls:
    """Entries by what was called (a module, a function), mode and input types."""

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[Any, Entry]] = {}

    def add(self, owner: Any, mode: int, types: tuple[int, ...], entry: Entry) -> None:
        """Remember the entry of a call; the owner is kept alive, so that its id stays its own."""
        self._entries[(id(owner), mode, types)] = (owner, entry)

    def find(self, owner: Any, mode: int, types: tuple[int, ...]) -> Entry | None:
        """The entry of a call that was met before."""
        found = self._entries.get((id(owner), mode, types))
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()

    def lasts(self) -> bool:
        """Whether these may be known in another minibatch: not when they are too many."""
        return len(self._entries) < 4096


class Columns:
    """The recorder's state that each call reads or writes: slots, which C finds by their offsets."""

    __slots__ = (
        "autocast", "constant_entries", "constants", "count", "floats", "grad", "inputs", "met", "mode",
        "owners", "payload", "sigs", "unchecked",
    )  # fmt: skip
    sigs: Any  # signature id of each call
    inputs: Any  # value ids
    count: int  # id of the next value
    met: Any  # KnownCalls
    mode: int  # number of torch's modes, part of the key of a known call
    grad: bool
    floats: torch.dtype  # torch's default dtype
    autocast: bool | None  # what any_autocast() must say; None never is: then each call takes the slow path
    constants: dict[int, tuple[Value, torch.Tensor, int | None]]
    unchecked: list[tuple[Value, torch.Tensor, int | None]]  # constants that no phase has read yet
    constant_entries: dict[Any, Entry]  # by (shape, dtype, device)
    owners: dict[int, tuple[torch.nn.Module, str]] | None
    payload: dict[int, Any]  # of the constants, by signature: a list, in merged traces maybe an IntegerColumn


class Switch:
    """Whether new recordings use the C extension: tests turn it off to run the Python twin."""

    on = _fast is not None


def new_column() -> Any:
    """An empty int64 column with append, extend and the buffer protocol."""
    return _fast.Column() if Switch.on else array("q")


def columns_of(sigs: Any, inputs: Any, base: int, count: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Signatures as int32 [calls], inputs counted from `base` as int64 [inputs], and whether all inputs are values
    of this recording: base to count. The columns of merged traces are so already (`join_columns`)."""
    if isinstance(sigs, np.ndarray):
        return sigs, inputs, True
    if _fast is not None and type(sigs) is _fast.Column:
        sig, out = np.empty(len(sigs), dtype=np.int32), np.empty(len(inputs), dtype=np.int64)
        return sig, out, _fast.copy_columns(sigs, inputs, base, count, sig, out)
    sig, out = np.array(sigs, dtype=np.int32), np.array(inputs, dtype=np.int64)
    out -= base
    return sig, out, not len(out) or (int(out.min()) >= 0 and int(out.max()) < count - base)


def written_to(tensors: Sequence[tuple[Owner, torch.Tensor, int | None]]) -> Owner | None:
    """Whose tensor was the first that was written to since it was met, at that version; None if none was."""
    if Switch.on:
        found: Owner | None = _fast.written_to(tensors)
        return found
    return next((x for x, t, version in tensors if version is not None and t._version != version), None)


def leaves_of(constants: dict[int, tuple[Value, torch.Tensor, int | None]]) -> list[int]:
    """Numbers of the constants that require gradients."""
    if Switch.on:
        return _fast.leaves_of(constants)
    return [v._value for v, t, _ in constants.values() if t.requires_grad]


def new_known_calls() -> Any:
    """Empty KnownCalls, in C or in Python."""
    return _fast.KnownCalls() if Switch.on else KnownCalls()


def _ignore(recorder: Any) -> None:
    """There is no C extension to be told."""


set_current: Callable[[Any], None] = _fast.set_current if _fast is not None else _ignore
quicken: Callable[[type], None] = _fast.quicken if _fast is not None else _ignore
