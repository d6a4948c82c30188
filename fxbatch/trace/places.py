"""Places that were looked at, and what they held: whether modules, and all that code reads, are as they were.

In: dictionaries, classes, cells, slots, containers, modules. Out: Items, which are asked later.

    places = places_of_modules(model.modules())
    first_changed(places)            # None while every place holds what it held
    put(places[0], places[0].value)  # as it was

One list says how modules are (class, names and types of attributes, mode, whether there are hooks, submodules,
parameters and buffers, their types), another what a body's code reads (`body_reads`); both are compared here, in C
where there is the extension.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from fxbatch.trace.columns import ExtensionSwitch, _fast
from fxbatch.trace.table import ATOMS, static_key
from fxbatch.trace.values import Value

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

# What a place is. The first five are put back where a run has changed them, the others say how a module is; C has the
# same numbers.
IN_DICT, IN_TYPE, IN_CELL, IN_SLOT, CONTENT = range(5)
TYPES, MEMBERS, FILLED, TENSORS = range(5, 9)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")
_Module = torch.nn.Module


class Item(NamedTuple):
    """One place, and what it held."""

    kind: int
    holder: Any  # a dict, a class, a cell, an object with slots, a container; for TENSORS a tuple of them
    name: Any
    value: Any  # of CONTENT: a copy of what the container held; of MEMBERS and TYPES: names, and objects or types
    path: str = ""
    own: bool = True  # an attribute of a module of the body's own tree: seen when it is set
    far: bool = False  # data that the user's code may change between two calls, unseen

    def now(self) -> Any:
        """What it holds now."""
        return holds_now(self.kind, self.holder, self.name)

    def holds(self) -> bool:
        """Whether it holds what it held: the same object, or equal plain data."""
        now, before = self.now(), self.value
        if self.kind == CONTENT:
            return same_content(now, before)
        if self.kind == MEMBERS:
            return bool(now[0] == before[0]) and all(map(operator.is_, now[1], before[1]))
        return bool(now == before) if self.kind in (TYPES, FILLED, TENSORS) else same(now, before)


def holds_now(kind: int, holder: Any, name: Any) -> Any:
    """What such a place holds."""
    if kind == IN_DICT:
        return holder.get(name, MISSING)
    if kind == IN_TYPE:
        return found_in(holder, name)[1]
    if kind == IN_CELL:
        try:
            return holder.cell_contents
        except ValueError:
            return MISSING
    if kind == IN_SLOT:
        try:
            return found_in(type(holder), name)[1].__get__(holder)
        except AttributeError:
            return MISSING
    if kind == TYPES:
        return tuple(holder), tuple(map(_type_of, holder.values()))
    if kind == MEMBERS:
        return tuple(holder[name]), tuple(holder[name].values())
    if kind == FILLED:
        return tuple(bool(holder.get(n)) for n in name)
    return tuple((t.shape, t.dtype, t.device) for t in holder) if kind == TENSORS else copy_of(holder)


def found_in(kind: type, name: str) -> tuple[type | None, Any]:
    """The class of a type's bases that has an attribute, and what it has; (None, MISSING) for none."""
    for c in kind.__mro__:
        if name in c.__dict__:
            return c, c.__dict__[name]
    return None, MISSING


def copy_of(container: Any) -> tuple[Any, ...]:
    """What a container holds."""
    if isinstance(container, np.ndarray):
        return container.dtype, container.shape, container.tobytes()
    if isinstance(container, (dict, MappingProxyType)):
        return (*container.keys(), *container.values())
    return tuple(container)


def _type_of(x: Any) -> Any:
    """The type of an attribute. Tensors among them are not held: they may be results, with all behind them."""
    plain = isinstance(x, torch.Tensor) and type(x) is not Value
    return (x.shape, x.dtype, x.device, type(x)) if plain else type(x)


def same(a: Any, b: Any) -> bool:
    """Whether what is in a place is what was there: the same object, or equal plain data."""
    return a is b or (type(a) is type(b) and type(a) in ATOMS and static_key(a) == static_key(b))


def same_content(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """The same of copies of containers."""
    return len(a) == len(b) and (all(map(operator.is_, a, b)) or all(map(same, a, b)))


def first_changed(places: list[Item], *, far: bool = True) -> Item | None:
    """The first place that holds something else than it held. far: whether those that user code may change unseen are
    looked at too."""
    k = -1
    while True:
        k = _fast.first_other(places, k + 1, MISSING) if ExtensionSwitch.on else k + 1
        if k >= len(places):
            return None
        if (far or not places[k].far) and not places[k].holds():
            return places[k]


def put(item: Item, value: Any) -> None:
    """Let a place hold this: a value, or of a container the copy of its content."""
    kind, holder, name = item.kind, item.holder, item.name
    if kind == IN_DICT:
        if value is MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif kind in (IN_TYPE, IN_SLOT):
        if value is MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, value)
    elif kind == IN_CELL:
        if value is MISSING:
            del holder.cell_contents
        else:
            holder.cell_contents = value
    elif isinstance(holder, np.ndarray):
        holder[...] = np.frombuffer(value[2], dtype=value[0]).reshape(value[1])
    elif isinstance(holder, dict):
        half = len(value) // 2
        holder.clear()
        for k, v in zip(value[:half], value[half:], strict=True):
            holder[k] = v
    elif isinstance(holder, (set, collections.deque)):
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(value)
    elif isinstance(holder, (list, bytearray)):
        holder[:] = value


def places_of_modules(modules: Sequence[torch.nn.Module]) -> list[Item] | None:
    """How modules are; None where what can change isn't all seen."""
    return [p for m in modules for p in _places_of(m)] if all(map(_lists_its_own, modules)) else None


def _lists_its_own(module: torch.nn.Module) -> bool:
    """Whether all that can change is seen: modules that torch's own method lists, no parameters yet to be made."""
    cls, state = type(module), module.__dict__
    plain = cls.named_modules is _Module.named_modules and cls.modules is _Module.modules
    kept_here = all(isinstance(state.get(name), dict) for name in _TABLES)  # not so in TorchScript
    return plain and kept_here and not any(is_lazy(p) for p in state["_parameters"].values())


def _places_of(module: torch.nn.Module) -> list[Item]:
    state = module.__dict__
    tensors = [t for t in (*state["_parameters"].values(), *state["_buffers"].values()) if t is not None]
    return [
        Item(IN_SLOT, module, "__class__", type(module)),
        *(
            Item(kind, holder, name, holds_now(kind, holder, name))
            for kind, holder, name in (
                (TYPES, state, None), (IN_DICT, state, "training"), (FILLED, state, HOOKS),
                *((MEMBERS, state, name) for name in _TABLES), (TENSORS, tuple(tensors), None),
            )
        ),
    ]  # fmt: skip
