"""All caches and all guards of fxbatch, a line each: what is not told here is neither made nor compared.

@cached("tensor types")                 # a function of hashable arguments, for the process
def tensor_spec(shape, dtype, device): ...

blocks = Cache("blocks")                # of an object, and gone with it; the least recently used entries go first
blocks.put(family, learned)
blocks.get(family)

@guard("places")                        # a function that says whether what was cached still holds
def first_changed(places): ...
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])


class Kind(NamedTuple):
    """One kind of cache."""

    key: str  # what entries are found by, compared whole
    most: int  # entries, or bytes
    goes_with: str  # what holds it: it is cleared when that goes
    unit: str = "entries"


CACHES = {
    # Functions of values, for the process.
    "tensor types": Kind("shape, dtype, device", 65536, "process"),
    "argument functions": Kind("text", 4096, "process"),
    "pass-through signatures": Kind("tensor type", 4096, "process"),
    "sizes of integers": Kind("number", 1024, "process"),
    "data classes": Kind("class, weakly", 4096, "process"),
    "files of code": Kind("file, module", 4096, "process"),
    "functions of a file": Kind("source", 64, "process"),
    "graphs": Kind("digest of body, types, needs, modes", 1024, "process"),
    # Of a tuple of signatures, and gone with the first of them.
    "columns": Kind("signatures", 64, "signature"),
    "facts of signatures": Kind("what is found, edges, needs", 1024, "columns"),
    # Of one decorated callable.
    "structures": Kind("kind, content", 64 << 20, "engine", "bytes"),
    "structures met once": Kind("hash of kind, content", 256, "engine"),
    "operations": Kind("signature, needs, types of shared operands, options", 4096, "engine"),
    "signatures that were met": Kind("signature", 4096, "engine"),
    "idle passes": Kind("columns, which signatures are called", 8 << 20, "engine", "bytes"),
    "signatures of rewrites": Kind("operation or members, types, modes, arguments", 1024, "engine"),
    "signatures in blocks": Kind("signature", 4096, "engine"),
    "rows of arrays": Kind("array", 4096, "pool"),
    "gradient memory": Kind("shape, dtype", 64, "engine"),
    "traces": Kind("digest of a trace", 256, "model"),
    "views of parameters": Kind("parameter, geometry", 4096, "signature table"),
    "packed families": Kind("content, arguments, modes", 32, "engine"),
    "contents": Kind("what a module and its code read", 32, "engine"),
    "operations to build": Kind("signature, needs", 4096, "engine"),
    "compiled rows": Kind("number of rows", 4096, "compiled graph"),
}

GUARDS = {
    "places": "what code reads is what it was: modules, attributes, globals, closures; once a minibatch, or a call",
    "modes": "gradients, autocast, dtype and torch's modes are what they were; at each phase",
    "model": "the model of traces and ready minibatches is what it was; at each use",
    "types": "shared operands are of the types that they were; once a run",
    "sizes": "what was compiled is for this number of rows; at each step",
}

_live: dict[str, weakref.WeakSet[Cache[Any, Any]]] = {name: weakref.WeakSet() for name in CACHES}
_functions: dict[str, Callable[..., Any]] = {}
_weak: dict[str, WeakKeyDictionary[Any, Any]] = {}


class Cache(Generic[K, V]):
    """Entries by key, bounded by its line in CACHES. Threads may share it."""

    __slots__ = ("__weakref__", "_entries", "_lock", "most", "size")

    def __init__(self, name: str, most: int | None = None) -> None:
        self.most = CACHES[name].most if most is None else most
        self.size = 0  # of all entries
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()
        _live[name].add(self)

    def get(self, key: K) -> V | None:
        """The entry of a key, which is now the one that was used last; or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            self._entries.move_to_end(key)
        except KeyError:  # another thread has dropped it
            return entry[0]
        return entry[0]

    def put(self, key: K, value: V, size: int = 1) -> V:
        """Keep an entry; those that were not used for the longest time go, the last one stays."""
        with self._lock:
            before = self._entries.pop(key, None)
            self.size += size - (0 if before is None else before[1])
            self._entries[key] = value, size
            while self.size > self.most and len(self._entries) > 1:
                self.size -= self._entries.popitem(last=False)[1][1]
        return value

    def pop(self, key: K) -> V | None:
        """Drop an entry; what it was."""
        with self._lock:
            entry = self._entries.pop(key, None)
            self.size -= 0 if entry is None else entry[1]
        return None if entry is None else entry[0]

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()
            self.size = 0

    def items(self) -> list[tuple[K, V]]:
        """All entries with their keys, the one that was used last at the end."""
        return [(key, value) for key, (value, _) in list(self._entries.items())]

    def values(self) -> list[V]:
        """All entries, the one that was used last at the end."""
        return [value for value, _ in list(self._entries.values())]

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def cached(name: str) -> Callable[[F], F]:
    """`functools.lru_cache` with the bound that CACHES has under this name."""

    def decorate(function: F) -> F:
        _functions[name] = functools.lru_cache(maxsize=CACHES[name].most)(function)
        return _functions[name]  # type: ignore[return-value]  # called as the function is

    return decorate


def weak_cache(name: str) -> WeakKeyDictionary[Any, Any]:
    """Entries that go with the objects that they are found by."""
    assert name in CACHES, name
    return _weak.setdefault(name, WeakKeyDictionary())


def guard(name: str) -> Callable[[F], F]:
    """Marks a function that compares for a guard of GUARDS."""
    assert name in GUARDS, name
    return lambda function: function


def described() -> list[str]:
    """A line a cache that has entries now, in this process: how many, how it is bounded, by what they are found."""
    lines = []
    for name, kind in CACHES.items():
        info = getattr(_functions.get(name), "cache_info", None)
        held = [*_live[name], _weak.get(name, ())]
        entries = info().currsize if info is not None else sum(map(len, held))
        if entries:
            bound = f"{kind.most:,} {kind.unit} a {kind.goes_with}"
            lines.append(f"cache: {name}: {entries:,} by {kind.key} (at most {bound}, and gone with it)")
    return lines
