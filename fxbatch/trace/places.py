"""Places that were looked at, and what they held: whether modules, and all that code reads, are as they were.

In: dictionaries, classes, cells, slots, containers, modules. Out: Items, which are asked later.

    places = places_of_modules(model.modules())
    first_changed(places)            # None while every place holds what it held
    put(places[0], places[0].value)  # as it was

One list says how modules are (class, names and types of attributes, mode, whether there are hooks, submodules,
parameters and buffers, their types), another what a body's code reads (`plain_body`); both are compared here.

Compiled by Cython (see uncompiled.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.parameter import is_lazy

from fxbatch.caches import guard
from fxbatch.trace.state import _fast
from fxbatch.trace.table import ATOMS, static_key
from fxbatch.trace.values import Value

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Owner = TypeVar("Owner")

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

# What a place is. The first four are put back where a run has changed them, and lists; the others say how a module is.
IN_DICT, IN_TYPE, IN_CELL, IN_SLOT = range(4)
TYPES, MEMBERS, FILLED, TENSORS, ITEMS = range(4, 9)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TABLES = ("_modules", "_parameters", "_buffers")
_Module, _Tensor = torch.nn.Module, torch.Tensor


class Item(NamedTuple):
    """One place, and what it held."""

    kind: int
    holder: Any  # a dict, a class, a cell, an object with slots; for TENSORS a tuple of them, for ITEMS a list or dict
    name: Any
    value: Any  # of MEMBERS and TYPES: names, and objects or types
    path: str = ""
    own: bool = True  # an attribute of a module of the body's own tree: seen when it is set
    far: bool = False  # data that the user's code may change between two calls, unseen

    def now(self) -> Any:
        """The content of the place, now."""
        return holds_now(self.kind, self.holder, self.name)

    def holds(self) -> bool:
        """Whether it holds what it held: the same object, or equal plain data."""
        return as_it_was(self.kind, self.holder, self.name, self.value)


@cython.ccall
def as_it_was(kind: cython.int, holder: object, name: object, before: object) -> cython.bint:
    """Whether a place holds what it held."""
    if kind == 0:  # IN_DICT, by far the most
        now = cython.cast(dict, holder).get(name, MISSING)
        return now is before or same(now, before)
    if kind < 4:
        if kind == 3 and name == "__class__":  # of a module
            return type(holder) is before
        now = holds_now(kind, holder, name)
        return now is before or same(now, before)
    if kind == 6:  # FILLED
        return bool(_filled(holder, name) == before)
    if kind == 7:  # TENSORS
        return tensors_are(holder, before)
    if kind == 8:  # ITEMS
        return items_are(holder, before)
    return members_are(holder if kind == 4 else holder.get(name), before, kind == 4)


@cython.cfunc
def members_are(found: object, before: tuple, kinds: cython.bint) -> cython.bint:
    """Whether a dictionary has these (names, values) in this order; kinds: values of these types."""
    names: tuple = before[0]
    values: tuple = before[1]
    if not isinstance(found, dict) or len(found) != len(names):
        return False
    i: cython.Py_ssize_t = 0
    for name, value in found.items():  # as a loop in C: without enumerate
        if name is not names[i] and name != names[i]:
            return False
        same_kind = kinds and (type(value) is values[i] or _type_of(value) == values[i])
        if not (same_kind or (value is values[i] and not kinds)):
            return False
        i += 1  # noqa: SIM113
    return True


@cython.cfunc
def items_are(items: object, before: tuple) -> cython.bint:
    """Whether these are the items of a list, or the keys of a dictionary."""
    if len(items) != len(before):
        return False
    for now, was in zip(items, before):  # noqa: SIM110 - as a loop in C
        if now is not was and not same(now, was):
            return False
    return True


@cython.cfunc
def tensors_are(tensors: tuple, before: tuple) -> cython.bint:
    for t, was in zip(tensors, before):
        shape, dtype, device = cython.cast(tuple, was)
        if t.dtype is not dtype or t.shape != shape or t.device != device:
            return False
    return True


def holds_now(kind: int, holder: Any, name: Any) -> Any:
    """The content of a place of this kind, now."""
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
        return _filled(holder, name)
    if kind == ITEMS:
        return tuple(holder)
    return tuple((t.shape, t.dtype, t.device) for t in holder)


def found_in(kind: Any, name: str) -> tuple[type | None, Any]:
    """The class of a type's bases that has an attribute, and what it has; (None, MISSING) for none."""
    for c in kind.__mro__:
        members = c.__dict__
        if name in members:
            return c, members[name]
    return None, MISSING


def _filled(holder: Any, names: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple([bool(holder.get(name)) for name in names])


def _type_of(x: Any) -> Any:
    """The type of an attribute. Tensors among them are not held: they may be results, with all behind them."""
    plain = isinstance(x, torch.Tensor) and type(x) is not Value
    return (x.shape, x.dtype, x.device, type(x)) if plain else type(x)


def without_sizes(places: list[Item], but: set[int]) -> list[Item]:
    """These places of modules, where tensors that are plain attributes may have other sizes. but: ids of dictionaries
    of modules whose sizes count."""
    return [
        x._replace(value=(x.value[0], tuple([t[3] if type(t) is tuple else t for t in x.value[1]])))
        if x.kind == TYPES and id(x.holder) not in but else x for x in places
    ]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Whether what is in a place is what was there: the same object, or equal plain data."""
    return a is b or (type(a) is type(b) and type(a) in ATOMS and static_key(a) == static_key(b))


@guard("places")
def first_changed(places: list[Item], *, far: bool = True) -> Item | None:
    """The first place that holds something else than it held. far: whether those that user code may change unseen are
    looked at too."""
    for item in places:
        p = cython.cast(tuple, item)
        if (far or not p[6]) and not as_it_was(p[0], p[1], p[2], p[3]):
            return item
    return None


def written_to(tensors: Sequence[tuple[Owner, torch.Tensor, int | None]]) -> Owner | None:
    """Whose tensor was the first that was written to since it was met, at that version; None if none was."""
    if _fast is not None:
        found: Owner | None = _fast.written_to(tensors)
        return found
    for owner, tensor, version in tensors:
        if version is not None and tensor._version != version:
            return owner
    return None


def versions_now(tensors: Sequence[tuple[Owner, torch.Tensor, int]]) -> list[tuple[Owner, torch.Tensor, int]]:
    """These tensors, each with the version that it has now."""
    return [(owner, tensor, tensor._version) for owner, tensor, _ in tensors]


def put(item: Item, value: Any) -> None:
    """Let a place hold this."""
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
    elif kind == ITEMS and type(holder) is list:
        holder[:] = value
    elif kind == IN_CELL:
        if value is MISSING:
            del holder.cell_contents
        else:
            holder.cell_contents = value


def places_of_modules(modules: Sequence[torch.nn.Module]) -> list[Item] | None:
    """How modules are; None where what can change isn't all seen."""
    return [p for m in modules for p in _places_of(m)] if all(map(_lists_its_own, modules)) else None


def _lists_its_own(module: torch.nn.Module) -> bool:
    """Whether all that can change is seen: modules that torch's own method lists, no parameters yet to be made."""
    cls, state = type(module), module.__dict__
    plain = cls.named_modules is _Module.named_modules and cls.modules is _Module.modules
    kept_here = all(isinstance(state.get(name), dict) for name in TABLES)  # not so in TorchScript
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
                *((MEMBERS, state, name) for name in TABLES), (TENSORS, tuple(tensors), None),
            )
        ),
    ]  # fmt: skip
