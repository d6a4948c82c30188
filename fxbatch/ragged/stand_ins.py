"""Python's own functions that give symbols where a body is traced with symbols for its sizes.

    with stand_ins((body, model), FUNCTIONS):  # `len(x)`, `max(n, 2)`, `math.sqrt(n)`
        ...
    with stand_ins((body, model), TYPES):      # and `int(n / 2)`, `float(n)`
        ...

As torch.fx does for `len`, they are put among the globals of the users' modules while a body is traced; what they give
for anything but sizes is what it always was. A stand-in for a type is not that type where code asks `type(n) is int`:
those are tried where a body needs its sizes as plain numbers otherwise, and what comes of it is compared with the body.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from fxbatch.torch_private import FakeTensor, depends_on_values
from fxbatch.trace.plain_objects import is_library, is_users, unwrapped

SYMBOLS = (torch.SymInt, torch.SymFloat)
_LOCK = threading.RLock()


def _length(x: Sized, /) -> int | torch.SymInt:
    """`len(x)`, which is the symbol of a fake tensor's first size: `Tensor.__len__` may give plain numbers alone."""
    return x.shape[0] if isinstance(x, FakeTensor) and x.dim() else len(x)


def _extreme(usual: Callable[..., object], of_sizes: Callable[..., object]) -> Callable[..., object]:
    def extreme(*sizes: object, **options: object) -> object:
        """`max` or `min`, which is a symbol too where a size depends on values, and can't be compared."""
        if len(sizes) == 2 and not options and any(map(depends_on_values, sizes)):
            return of_sizes(*sizes)
        return usual(*sizes, **options)

    return extreme


def _type(usual: type, of_size: Callable[..., object], symbol: type) -> type:
    """`int` or `float`, which gives a symbol of a symbol, and is equal to the type that it stands for."""

    class Alike(type):
        def __instancecheck__(cls, x: object) -> bool:
            return isinstance(x, (usual, symbol))

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, (usual, symbol))

        def __call__(cls, *args: object, **kwargs: object) -> object:
            one = len(args) == 1 and not kwargs and isinstance(args[0], SYMBOLS)
            return of_size(args[0]) if one else usual(*args, **kwargs)

        def __eq__(cls, other: object) -> bool:
            return other is usual or other is symbol or other is cls

        def __hash__(cls) -> int:
            return hash(usual)

    return Alike(usual.__name__, (usual,), {})


def _of_symbol(usual: Callable[..., float], of_size: Callable[..., object]) -> Callable[..., object]:
    return lambda x, *rest: of_size(x) if isinstance(x, SYMBOLS) and not rest else usual(x, *rest)


def _log2(x: torch.SymInt | torch.SymFloat) -> float:
    return torch.sym_float(x).__sym_log2__()


_FUNCTIONS: dict[object, Callable[..., object]] = {
    **{f: _of_symbol(f, torch.sym_sqrt) for f in (math.sqrt, np.sqrt)},
    **{f: _of_symbol(f, _log2) for f in (math.log2, np.log2)},
    **{f: _of_symbol(f, lambda x: _log2(x) * math.log(2.0)) for f in (math.log, np.log)},
}


class _Functions(ModuleType):
    """A module of functions of numbers, some of which are of sizes as well."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__["of"] = module

    def __getattr__(self, name: str) -> object:
        usual = getattr(self.__dict__["of"], name)
        return _FUNCTIONS.get(usual, usual) if callable(usual) and not isinstance(usual, type) else usual


_MODULES = {id(module): _Functions(module) for module in (math, np)}


Names = Mapping[str, object]
FUNCTIONS: Names = {"len": _length, "max": _extreme(max, torch.sym_max), "min": _extreme(min, torch.sym_min)}
TYPES: Names = {
    **FUNCTIONS,
    "int": _type(int, torch.sym_int, torch.SymInt),
    "float": _type(float, torch.sym_float, torch.SymFloat),
}


@contextlib.contextmanager
def stand_ins(code: Iterable[object], names: Names) -> Iterator[None]:
    """What this code calls by these names gives symbols; and so do functions of `math` and numpy."""
    with _LOCK:
        put = [(space, name, x) for space in _spaces_of(code) for name, x in _missing(space, names).items()]
        before = [(space, name, space[name]) for space, name, _ in put if name in space]
        try:
            for space, name, x in put:
                space[name] = x
            yield
        finally:
            for space, name, _ in put:
                space.pop(name, None)
            for space, name, x in before:
                space[name] = x


def _missing(space: Mapping[str, object], names: Names) -> Names:
    """What is put among these globals: what they don't have of their own, and such functions as they have."""
    missing = {name: x for name, x in names.items() if name not in space}
    missing |= {name: _MODULES[id(x)] for name, x in space.items() if id(x) in _MODULES}
    functions = {name: x for name, x in space.items() if type(x) in _KINDS}
    return missing | {name: _FUNCTIONS[x] for name, x in functions.items() if x in _FUNCTIONS}


_KINDS = tuple({type(f) for f in _FUNCTIONS})


def _spaces_of(code: Iterable[object]) -> list[dict[str, Any]]:
    """The globals of users' functions and modules among these, and of what these globals hold."""
    spaces: dict[int, dict[str, Any]] = {}
    todo, seen = list(code), set[int]()
    while todo:
        x = todo.pop()
        if id(x) in seen or not isinstance(x, (torch.nn.Module, type, ModuleType, FunctionType)):
            continue
        seen.add(id(x))
        if isinstance(x, torch.nn.Module):
            todo += [c for m in x.modules() for c in type(m).__mro__]
        elif isinstance(x, type) and not is_library(x.__module__):
            todo += [f for f in vars(x).values() if isinstance(f, FunctionType)]
        elif isinstance(x, ModuleType) and not is_library(x.__name__) and id(vars(x)) not in spaces:
            spaces[id(vars(x))] = vars(x)
            todo += vars(x).values()
        elif is_users(f := unwrapped(x)) and id(f.__globals__) not in spaces:
            spaces[id(f.__globals__)] = f.__globals__
            todo += f.__globals__.values()
    return list(spaces.values())
