"""Tensors in objects of the user's own classes: found by attribute, where torch's pytree knows nothing of them.

In: a dataclass instance, or any object with attributes or slots. Out: the values in it, the object with real tensors in
their place, or its attributes taken apart and put together again.

    values_in(State(h=value))                                 # [value]
    fill(State(h=value), {value.id: tensor})                  # the same object, its h a tensor
    leaves, structure = take_apart({"state": State(h=value)})
    put_together(leaves, structure)                           # {"state": State(h=value)}, another State
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fxbatch.errors import ResultError
from fxbatch.torch_private import TreeSpec, is_pytree_node, tree_flatten, tree_leaves, tree_unflatten
from fxbatch.trace.values import Value, is_flat

# What is never looked into.
_CLOSED = (
    torch.Tensor, torch.nn.Module, torch.Generator, torch.dtype, torch.device, np.ndarray, np.generic, str, bytes,
    int, float, complex, type, BaseException, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.GeneratorType, type(None),
)  # fmt: skip


def leaves_of(x: object) -> Sequence[object]:
    """The leaves of a pytree, at once where they are plain."""
    if (type(x) is list or type(x) is tuple) and is_flat(x):
        return x
    return (x,) if is_flat((x,)) else tree_leaves(x)


def has_attributes(x: object) -> bool:
    """Whether an object is of a class whose instances have attributes of their own, and may hold tensors."""
    return not isinstance(x, _CLOSED) and not is_pytree_node(type(x)) and bool(_names(x))


def values_in(x: object) -> list[Value]:
    """The values that an object, and whatever it refers to, holds; each object is looked at once."""
    return [t for t in _tensors(x, {}) if type(t) is Value]


def _tensors(x: object, seen: dict[int, object]) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif not isinstance(x, _CLOSED) and id(x) not in seen:
        seen[id(x)] = x
        for part in _parts(x):
            yield from _tensors(part, seen)


def _parts(x: object) -> Sequence[object]:
    """The parts of an object: the items of a container, the attributes of others."""
    if is_pytree_node(type(x)):
        return [leaf for leaf in tree_flatten(x, is_leaf=lambda y: y is not x)[0] if leaf is not x]
    return [getattr(x, name) for name in _names(x)]


def _names(x: object) -> tuple[str, ...]:
    """The attributes that an object has now, in its dictionary or its slots."""
    attributes = list(getattr(x, "__dict__", ()))
    slots: list[str] = []
    for kind in type(x).__mro__:
        names = kind.__dict__.get("__slots__", ())
        slots += [names] if isinstance(names, str) else names
    return (*attributes, *[s for s in slots if s not in ("__dict__", "__weakref__") and hasattr(x, s)])


def fill(x: Any, tensors: Mapping[int, torch.Tensor], seen: dict[int, Any] | None = None) -> object:
    """The object with real tensors in place of its values, written into it and into lists and dictionaries in it."""
    seen = {} if seen is None else seen
    if type(x) is Value:
        return tensors[x.id]
    if isinstance(x, _CLOSED):
        return x
    if id(x) in seen:
        return seen[id(x)][1]
    seen[id(x)] = x, x  # held: the number of a dead object may come again
    if type(x) in (list, dict):
        for key, part in list(x.items() if type(x) is dict else enumerate(x)):
            x[key] = fill(part, tensors, seen)
    elif is_pytree_node(type(x)):
        parts, spec = tree_flatten(x, is_leaf=lambda y: y is not x)
        filled = [fill(part, tensors, seen) for part in parts]
        if any(a is not b for a, b in zip(parts, filled, strict=True)):
            seen[id(x)] = x, tree_unflatten(filled, spec)
    else:
        for name in _names(x):
            before = getattr(x, name)
            after = fill(before, tensors, seen)
            if after is not before:
                object.__setattr__(x, name, after)  # frozen or not: it was incomplete until now
    return seen[id(x)][1]


@dataclass(frozen=True)
class Structure:
    """A pytree some of whose leaves, by number, are objects that were taken apart."""

    spec: TreeSpec
    objects: tuple[tuple[int, Taken], ...]

    def __str__(self) -> str:
        kinds = ", ".join(f"{taken.kind.__name__}({', '.join(taken.names)})" for _, taken in self.objects)
        return f"{self.spec} of {kinds}"


@dataclass(frozen=True)
class Taken:
    """An object that was taken apart: its class, and its attributes."""

    kind: type
    names: tuple[str, ...]
    inside: TreeSpec | Structure = field(repr=False)


def take_apart(x: object, around: tuple[int, ...] = ()) -> tuple[list[object], TreeSpec | Structure]:
    """The leaves of a pytree, objects with tensors among them taken apart by attribute; and how it was."""
    flat, spec = tree_flatten(x)
    leaves: list[object] = []
    objects: list[tuple[int, Taken]] = []
    for i, leaf in enumerate(flat):
        if not has_attributes(leaf) or next(_tensors(leaf, {}), None) is None:
            leaves.append(leaf)
            continue
        _check_can_be_made(leaf, around)
        names = _names(leaf)
        inner, inside = take_apart([getattr(leaf, name) for name in names], (*around, id(leaf)))
        leaves += inner
        objects.append((i, Taken(type(leaf), names, inside)))
    return leaves, Structure(spec, tuple(objects)) if objects else spec


def _check_can_be_made(x: object, around: tuple[int, ...]) -> None:
    """ResultError for objects that attributes alone don't make again."""
    kind, why = type(x), ""
    if id(x) in around:
        why = "it refers to itself"
    elif kind.__module__.partition(".")[0] == "torch":
        why = "it keeps more about its tensors than they say"
    elif isinstance(x, (list, tuple, dict, set, frozenset)):
        why = "it is a container of its own kind"
    if why:
        raise ResultError(
            f'{kind.__qualname__} can\'t be stacked by attribute: {why}; use out="list", return its tensors, or '
            f"register it: torch.utils._pytree.register_pytree_node({kind.__name__}, ...)"
        )


def put_together(leaves: Sequence[object], structure: TreeSpec | Structure) -> Any:
    """The pytree of these leaves; objects are made anew, without their `__init__`."""
    return _put(iter(leaves), structure)


def _put(leaves: Iterator[object], structure: TreeSpec | Structure) -> Any:
    if not isinstance(structure, Structure):
        return tree_unflatten([next(leaves) for _ in range(structure.num_leaves)], structure)
    objects = dict(structure.objects)
    flat = []
    for i in range(structure.spec.num_leaves):
        taken = objects.get(i)
        if taken is None:
            flat.append(next(leaves))
            continue
        copy: object = object.__new__(taken.kind)
        for name, part in zip(taken.names, _put(leaves, taken.inside), strict=True):
            object.__setattr__(copy, name, part)
        flat.append(copy)
    return tree_unflatten(flat, structure.spec)


def in_order_of(x: Any, like: Any) -> object:
    """x with the keys of its dictionaries in the order of like's, and shapes as tuples or sizes, as there."""
    if {type(x), type(like)} == {tuple, torch.Size}:
        return type(like)(x)
    if type(x) is not type(like):
        return x
    if type(x) is dict and x.keys() == like.keys():
        return {key: in_order_of(x[key], like[key]) for key in like}
    if type(x) in (list, tuple) and len(x) == len(like):
        return type(x)(in_order_of(a, b) for a, b in zip(x, like, strict=True))
    return x
