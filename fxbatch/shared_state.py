"""Snapshots of Python state that instances share besides modules, so that checks can run a minibatch several times.

In: a forward and its owner. Out: globals, closures, default arguments, attributes of classes and what these lead to,
to be put back as it was.

    before = SharedState.of(forward, model)
    forward(model, x)                          # counts in a global, appends to a list in a closure
    after = SharedState.of(forward, model)
    before.restore()                           # as before the call: the same list, its old items
    forward(model, x)                          # gives the same again
    after.restore(anew=False)

Found from the forward, the methods of the modules' classes and the functions that these name; objects and containers
are followed, torch's and libraries' code is not. Iterators are copied. What can't be (a generator, a file) is left.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_MOST = 100_000  # objects that are looked at
_LARGE = 1 << 20  # numbers of an array that is not looked at
_ABSENT: Any = object()
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "fxbatch", "builtins"}

Restore = Callable[[bool], None]  # anew: with iterators that are at their place, but other objects


class SharedState:
    """Places, and what they held."""

    def __init__(self) -> None:
        self._restore: list[Restore] = []
        self._seen: dict[int, Any] = {}  # by id: all that was looked at, held so that ids stay theirs
        self._ahead: deque[Any] = deque()

    @staticmethod
    def of(forward: Callable[..., Any], owner: Any = None) -> SharedState:
        """All that the forward and the methods of its owner may reach, but for the owner itself."""
        found = SharedState()
        modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else []
        found._seen.update((id(x), x) for x in (*modules, owner))
        found._ahead.extend([forward, *dict.fromkeys(map(type, [*modules, owner]))])
        while found._ahead and len(found._seen) < _MOST:
            found._look(found._ahead.popleft())
        found._ahead.clear()
        return found

    def restore(self, *, anew: bool = True) -> None:
        """Put everything back. anew: may be called again; else iterators are the objects that they were."""
        for restore in self._restore:
            restore(anew)

    def _look(self, x: Any) -> None:
        if x is None or isinstance(x, (str, bytes, int, float, complex, CodeType)) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        if isinstance(x, (torch.Tensor, np.ndarray)):
            self._array(x)
        elif isinstance(x, (tuple, frozenset)):
            self._ahead.extend(x)
        elif isinstance(x, (list, bytearray)):
            self._items(x, list(x), lambda items: x.__setitem__(slice(None), items))
        elif isinstance(x, (set, deque)):
            self._items(x, list(x), partial(_refill, x))
        elif isinstance(x, FunctionType):
            self._function(x)
        elif isinstance(x, (MethodType, partial, staticmethod, classmethod, property)):
            names = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset")
            self._ahead.extend(getattr(x, name, None) for name in names)
        elif isinstance(x, type):
            if _is_users(x.__module__):
                self._members(x)
        elif isinstance(x, random.Random):
            state = x.getstate()
            self._restore.append(lambda _: x.setstate(state))
        elif not isinstance(x, ModuleType):
            self._object(x)

    def _object(self, x: Any) -> None:
        if isinstance(x, dict):
            self._items(x, [*x.items()], partial(_refill, x))
        if not (isinstance(x, dict) or _is_users(type(x).__module__)) and not isinstance(x, torch.nn.Module):
            return
        self._ahead.append(type(x))
        self._ahead.append(getattr(x, "__dict__", None))
        for cls in type(x).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__"):
                    value = getattr(x, name, _ABSENT)
                    self._place(value, partial(_set_attribute, x, name))

    def _function(self, f: Any) -> None:
        if not _is_users(f.__module__):
            return
        self._ahead.extend([f.__defaults__, f.__kwdefaults__, f.__dict__])
        for cell in f.__closure__ or ():
            self._place(_content(cell), partial(_set_cell, cell))
        names = dict.fromkeys(name for code in _codes(f.__code__) for name in code.co_names)
        for name in names:
            if name in f.__globals__:
                x = f.__globals__[name]
                self._place(x, partial(_set_item, f.__globals__, name))
                if isinstance(x, ModuleType) and _is_users(x.__name__):
                    members = vars(x)
                    for inner in names:
                        if inner in members:
                            self._place(members[inner], partial(_set_item, members, inner))

    def _members(self, cls: type) -> None:
        self._ahead.extend(cls.__bases__)
        for name, x in list(vars(cls).items()):
            if not (name.startswith("__") and name.endswith("__")) or inspect.isfunction(x):
                self._place(x, partial(_set_attribute, cls, name))

    def _array(self, x: Any) -> None:
        if isinstance(x, np.ndarray):
            if x.size <= _LARGE and x.dtype != object:
                numbers = x.copy()
                self._restore.append(lambda _: None if np.array_equal(x, numbers) else np.copyto(x, numbers))
        elif x.layout is torch.strided and x.numel() <= _LARGE and not x.is_inference():
            version, before = x._version, x.detach().clone()

            def put_back(_: bool) -> None:
                if x._version != version:
                    with torch.no_grad():
                        x.copy_(before)

            self._restore.append(put_back)

    def _place(self, x: Any, put: Callable[[Any], None]) -> None:
        """A place holds x."""
        self._ahead.append(x)
        again = _copier(x)
        self._restore.append(lambda anew: put(again() if anew else x))

    def _items(self, x: Any, items: list[Any], put: Callable[[list[Any]], Any]) -> None:
        """A container holds these."""
        flat = [y for item in items for y in item] if isinstance(x, dict) else items
        self._ahead.extend(flat)
        iterators = any(isinstance(y, Iterator) for y in flat)
        copiers = [_copier(y[1] if isinstance(x, dict) else y) for y in items] if iterators else []

        def put_back(anew: bool) -> None:
            if not (anew and iterators):
                put(items)
            elif isinstance(x, dict):
                put([(key, again()) for (key, _), again in zip(items, copiers, strict=True)])
            else:
                put([again() for again in copiers])

        self._restore.append(put_back)


def _copier(x: Any) -> Callable[[], Any]:
    """A function that returns x as it is now: the object itself, or for an iterator a new copy at each call."""
    if isinstance(x, Iterator) and not isinstance(x, (torch.nn.Module, FunctionType)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of itertools' copies, in Python 3.12
                kept = copy.copy(x)
        except TypeError:  # a generator
            return lambda: x
        return lambda: _quiet_copy(kept)
    return lambda: x


def _quiet_copy(x: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return copy.copy(x)


def _is_users(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] not in _LIBRARIES


def _codes(code: CodeType) -> Iterable[CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _refill(x: Any, items: Iterable[Any]) -> None:
    x.clear()
    if isinstance(x, dict):
        for key, value in items:
            x[key] = value
    else:
        (x.extend if isinstance(x, deque) else x.update)(items)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _set_cell(cell: CellType, x: Any) -> None:
    if x is not _ABSENT:
        cell.cell_contents = x
    elif _content(cell) is not _ABSENT:
        del cell.cell_contents


def _set_item(members: dict[str, Any], name: str, x: Any) -> None:
    if members.get(name, _ABSENT) is not x:
        members[name] = x


def _set_attribute(x: Any, name: str, value: Any) -> None:
    now = x.__dict__.get(name, _ABSENT) if isinstance(x, type) else getattr(x, name, _ABSENT)
    if now is value:
        return
    if value is _ABSENT:
        delattr(x, name)
    else:
        setattr(x, name, value)
