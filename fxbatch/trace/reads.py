"""The places that a body reads besides its tensors, and why it is no operation where it is not plain (`plain_body`).

In: a module, a function. Out: its Reads: a key that is equal exactly where the body does the same, and the places whose
numbers, functions and classes it reads.

    reads = Reads.of_module(module)
    reads.opaque                     # "calls print() (model.py:12)"; "" for a plain body
    reads.key                        # part of the key of the operation
    first_changed(reads.items)       # None while every place holds what it held
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch

from fxbatch.trace.places import ITEMS, Item, put
from fxbatch.trace.plain_body import Walk
from fxbatch.trace.plain_objects import CONSTANTS
from fxbatch.trace.source import digest
from fxbatch.trace.table import ByIdentity, OpaqueArgumentError, static_key
from fxbatch.trace.things import NotPlain, Roots

Guards = tuple[Any, ...]  # dictionary, class, cell or list, key, object it held; and again


def _token(x: object) -> object:
    """The content of a place as a key: equal for what is equal to a body."""
    if isinstance(x, tuple) and type(x) is not torch.Size:
        return (type(x), *map(_token, x))
    if isinstance(x, MethodType):
        return ByIdentity(x.__func__), ByIdentity(x.__self__)
    if isinstance(x, enum.Enum):
        return ByIdentity(x)
    if type(x) is range:
        return range, x.start, x.stop, x.step
    try:
        return static_key(x)
    except OpaqueArgumentError:
        return ByIdentity(x)


class Reads:
    """The places that a body reads besides its tensors, with their content then; and why it is not plain."""

    __slots__ = ("fields", "functions", "items", "key", "names", "opaque", "roots")

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        walk = Walk(roots)
        self.opaque = ""
        try:
            walk.start()
        except NotPlain as error:
            self.opaque = str(error)
        # What changes all the time, as a stack of states, makes nothing plain.
        unseen = walk.settings if self.opaque else ()
        self.items = [x for x in walk.items.values() if id(x.holder) not in unseen]
        self.names = frozenset(walk.names)  # of attributes that it reads of modules
        self.fields = frozenset(walk.fields)  # and of what it is given
        self.functions = tuple(walk.functions.values())
        self.key: object = self._key()

    def _key(self) -> object:
        module = self.roots.module
        tree = () if module is None else tuple(
            (ByIdentity(type(m)), ByIdentity(m) if _holds_tensors(m) else None)
            for m in module.modules()
        )  # fmt: skip
        return tree, tuple(_token(x.value) for x in self.items)

    @staticmethod
    def of_module(module: torch.nn.Module, method: str | None = None) -> Reads:
        """Of a module's forward, or another method of it."""
        return Reads(Roots(module, method or "forward", None))

    @staticmethod
    def of_function(function: object) -> Reads:
        """Of a function, a class, or a module's forward."""
        if isinstance(function, torch.nn.Module):
            return Reads.of_module(function)
        return Reads(Roots(None, "forward", function))

    def again(self) -> Reads:
        """A new look at the body, as things are now."""
        return Reads(self.roots)

    def guards(self) -> Guards:
        """For C, to be compared at each call: places that user code may change between two calls without being seen."""
        places: list[tuple[object, object, object]] = []
        for x in self.items:
            if x.far and x.kind == ITEMS:
                places.append((x.holder, ..., len(x.holder)))
                places += [(x.holder, i, y) for i, y in enumerate(x.holder) if type(x.holder) is list]
            elif x.far:
                places.append((x.holder, x.name, x.now()))
        return tuple(itertools.chain.from_iterable(places))

    def near(self) -> bool:
        """Whether those places hold what they held."""
        return all(x.holds() for x in self.items if x.far)

    def changes(self) -> list[tuple[Item, object]]:
        """The places that hold something else than they held, with what they hold now."""
        return [(x, x.now()) for x in self.items if not x.holds()]

    @contextlib.contextmanager
    def reinstated(self) -> Iterator[None]:
        """Everything that the body reads outside its own modules as it was when this was made."""
        differing = [(x, now) for x, now in self.changes() if not x.own]
        try:
            for item, _ in reversed(differing):
                put(item, item.value)
            yield
        finally:
            for item, now in differing:
                put(item, now)

    def lines(self) -> tuple[str, ...]:
        """The places with their content, as text that does not depend on the process: for traces that are kept."""
        places = {f"{x.path}: {_text(x.value)}" for x in self.items}
        return tuple(sorted(places | {f"{name} {digest(node)}" for name, node in self.functions}))


def _holds_tensors(m: torch.nn.Module) -> bool:
    tensors = itertools.chain(m._parameters.values(), m._buffers.values(), m.__dict__.values())
    return any(isinstance(t, torch.Tensor) for t in tensors)


def _text(x: object) -> str:
    if isinstance(x, (*CONSTANTS, enum.Enum)):
        return repr(x)
    if isinstance(x, tuple):
        return f"({', '.join(map(_text, x))})"
    x = getattr(x, "__func__", x)
    return str(
        getattr(x, "__qualname__", None) or getattr(x, "__name__", None) or f"a {type(x).__qualname__}"
    )
