"""Objects of users' classes among the arguments of a forward, by their attributes: packed as dictionaries are.

In: an argument. Out: the same with an `Opened`, which is a node of a pytree, in place of each such object; and back.

    found = opened(graph, None)      # Opened(Graph, ("x", "edge_index"), [tensor, tensor])
    closed(found)                    # another Graph with these attributes

An attribute that no code names is left out (`names`): it may differ between instances, and hold anything.
"""

from __future__ import annotations

import types
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxbatch.torch_private import TreeSpec, children_of, register_node
from fxbatch.trace.body_reads import is_library, is_transparent
from fxbatch.trace.table import ATOMS

MOST_DEEP = 6  # objects inside objects; what goes deeper may be a circle, or a tree, whose nodes differ


@dataclass(frozen=True, eq=False)
class Opened:
    """An object by its class, and names and values of its attributes."""

    kind: type
    names: tuple[str, ...]
    values: Sequence[Any]


def _made_of(values: Iterable[Any], context: Any) -> Opened:
    return Opened(context[0], context[1], list(values))


register_node(Opened, lambda x: (list(x.values), (x.kind, x.names)), _made_of)


def is_data_class(kind: type) -> bool:
    """Whether objects of a class are what their attributes hold: a user's class that does not build on C."""
    if kind not in _SLOTS:
        _SLOTS[kind] = _slots(kind) if kind is types.SimpleNamespace or _holds_all(kind) else None
    return _SLOTS[kind] is not None


_SLOTS: WeakKeyDictionary[type, tuple[str, ...] | None] = WeakKeyDictionary()  # None: of no such class


def _holds_all(kind: type) -> bool:
    return (
        not issubclass(kind, (torch.nn.Module, type))
        and not is_library(kind.__module__)
        and kind.__new__ is object.__new__
        and not hasattr(kind, "__del__")
        and is_transparent(kind)
    )


def _slots(kind: type) -> tuple[str, ...]:
    found = [(n, x) for c in kind.__mro__ for n, x in vars(c).items()]
    return tuple(n for n, x in found if isinstance(x, types.MemberDescriptorType) and n != "__dict__")


def attributes_of(x: Any) -> dict[str, Any]:
    """What an object of such a class holds."""
    held = getattr(x, "__dict__", {})
    slots = _SLOTS[type(x)]
    return held if not slots else {**held, **{n: getattr(x, n) for n in slots if hasattr(x, n)}}


def opened(x: Any, names: Container[str] | None, depth: int = 0) -> Any:
    """x with all objects in it opened; names: of the attributes that count, None for all."""
    kind = type(x)
    if kind is torch.Tensor or kind in ATOMS:
        return x
    if kind is list or kind is tuple:
        return kind([opened(y, names, depth) for y in x])
    if kind is dict:
        return {k: opened(y, names, depth) for k, y in x.items()}
    if isinstance(x, tuple) and hasattr(kind, "_make"):
        return kind._make([opened(y, names, depth) for y in x])
    if depth >= MOST_DEEP or not is_data_class(kind):
        return x
    held = {n: v for n, v in attributes_of(x).items() if names is None or n in names}
    return Opened(kind, tuple(held), [opened(v, names, depth + 1) for v in held.values()])


def closed(x: Any) -> Any:
    """The objects that were opened, made anew."""
    kind = type(x)
    if kind is Opened:
        made = types.SimpleNamespace() if x.kind is types.SimpleNamespace else object.__new__(x.kind)
        slots = _SLOTS[x.kind] or ()
        for name, value in zip(x.names, x.values, strict=True):
            if name in slots:
                object.__setattr__(made, name, closed(value))
            else:
                made.__dict__[name] = closed(value)
        return made
    if kind is list or kind is tuple:
        return kind([closed(y) for y in x])
    if kind is dict:
        return {k: closed(y) for k, y in x.items()}
    return kind._make([closed(y) for y in x]) if isinstance(x, tuple) and hasattr(kind, "_make") else x


def classes_of(spec: TreeSpec) -> Iterator[type]:
    """The classes of the objects in a structure that was opened."""
    if spec.type is Opened:
        yield spec.context[0]
    for child in children_of(spec):
        yield from classes_of(child)


def holds_tensors(x: Any, depth: int = 3) -> bool:
    """Whether an argument is a tensor, or a container or an object that holds one: a look that costs nothing for trees.
    In an object a number in a tensor counts for nothing: a tree's word."""
    kind = type(x)
    if kind is torch.Tensor or depth == 0:
        return kind is torch.Tensor
    if kind in (list, tuple) or hasattr(kind, "_make"):
        return bool(x) and holds_tensors(x[0], depth - 1)
    if kind is dict:
        return any(holds_tensors(v, depth - 1) for v in x.values())
    if kind in ATOMS or not is_data_class(kind):
        return False
    held = attributes_of(x).values()
    return any(v.dim() > 0 if type(v) is torch.Tensor else holds_tensors(v, depth - 1) for v in held)
