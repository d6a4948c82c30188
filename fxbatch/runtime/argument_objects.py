"""Objects of users' classes among the arguments of a forward, by their attributes: packed as dictionaries are.

In: an argument. Out: the same with an `Opened`, which is a node of a pytree, in place of each such object; and back.

    found = opened(graph, None)      # Opened(Graph, ("x", "edge_index"), [tensor, tensor])
    closed(found)                    # another Graph with these attributes

An attribute that no code names is left out (`names`): it may differ between instances, and hold anything. Of an object
that is made from a dictionary and gives one (`torch_geometric.data.Data`) every tensor counts, since the library's own
code may read it, and what else no code names is `UNREAD` in its copy. Instances whose
arguments are tensors alone are `TensorColumns`: the lists as they were given, an instance made where one is asked for.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload
from weakref import WeakKeyDictionary

import torch

from fxbatch.caches import weak_cache
from fxbatch.torch_private import TreeSpec, children_of, register_node
from fxbatch.trace.plain_objects import is_library
from fxbatch.trace.table import ATOMS

_LISTS, _TENSORS = (list, tuple), {torch.Tensor}
MOST_DEEP = 6  # objects inside objects; what goes deeper may be a circle, or a tree, whose nodes differ


@dataclass(frozen=True, eq=False)
class Opened:
    """An object by its class, and names and values of its attributes."""

    kind: type
    names: tuple[str, ...]
    values: Sequence[Any]
    unread: tuple[str, ...] = ()


class _Unread:
    """Stands for what no code names, in a copy of an object: an error where it is read after all."""

    def _refuse(self, *args: object) -> Any:
        raise TypeError("it reads an attribute that its code does not name")

    __bool__ = __len__ = __iter__ = __str__ = __repr__ = __eq__ = __hash__ = _refuse
    __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __contains__ = __call__ = __getattr__ = _refuse


UNREAD = _Unread()


def _made_of(values: Iterable[object], context: Any) -> Opened:
    kind, names, unread = context
    return Opened(kind, names, list(values), unread)


register_node(Opened, lambda x: (list(x.values), (x.kind, x.names, x.unread)), _made_of)


class DataClass(NamedTuple):
    """A class whose objects are what their attributes hold: a user's class that does not build on C, or one that is
    made of a dictionary."""

    slots: tuple[str, ...]
    of_dictionary: bool  # torch_geometric's `Data`, or what builds on it


def data_class(kind: type) -> DataClass | None:
    """How to read objects of this class by attribute; None if it is no class that only holds data."""
    described = _DATA_CLASSES.get(kind, _NOT_MET)
    if described is _NOT_MET:
        converters = [c for c in kind.__mro__ if "from_dict" in vars(c) and "to_dict" in vars(c)]
        of_dictionary = bool(converters) and converters[-1].__module__.partition(".")[0] == "torch_geometric"
        is_data = kind is types.SimpleNamespace or of_dictionary or _holds_all(kind)
        described = _DATA_CLASSES[kind] = DataClass(_slots(kind), of_dictionary) if is_data else None
    return described


_NOT_MET = DataClass((), False)
_DATA_CLASSES: WeakKeyDictionary[type, DataClass | None] = weak_cache("data classes")


def _holds_all(kind: type) -> bool:
    return (
        not issubclass(kind, (torch.nn.Module, type))
        and not is_library(kind.__module__)
        and kind.__new__ is object.__new__
        and not hasattr(kind, "__del__")
        and _is_transparent(kind)
    )


_PLAIN_BASES = (object, types.SimpleNamespace)


def _made_in_python(module_name: str) -> bool:
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__":
        return True
    return str(getattr(module, "__file__", "")).endswith((".py", ".pyc"))


def _is_transparent(kind: type) -> bool:
    """Whether all state of a class's objects is in their attributes: no base is written in C."""
    for c in kind.__mro__:
        if c in _PLAIN_BASES or c.__module__ == "typing":
            continue
        if not c.__flags__ & (1 << 9) or not _made_in_python(c.__module__):
            return False
    return not issubclass(kind, Iterator)


def _slots(kind: type) -> tuple[str, ...]:
    members = [(n, x) for c in kind.__mro__ for n, x in vars(c).items()]
    return tuple(n for n, x in members if isinstance(x, types.MemberDescriptorType) and n != "__dict__")


def attributes_of(x: Any, form: DataClass) -> dict[str, Any]:
    """The attributes of an object of such a class, by name."""
    if form.of_dictionary:
        return dict(x.to_dict())
    held: dict[str, object] = getattr(x, "__dict__", {})
    return held if not form.slots else {**held, **{n: getattr(x, n) for n in form.slots if hasattr(x, n)}}


def named(x: object, names: Container[str] | None) -> tuple[dict[str, object], tuple[str, ...]]:
    """The attributes of an object that count, and the names of those that don't but are there."""
    described = data_class(type(x)) or _NOT_MET
    held = attributes_of(x, described)
    if not described.of_dictionary:
        return {n: v for n, v in held.items() if names is None or n in names}, ()
    count = {
        n: v is not UNREAD and (names is None or n in names or v is None or type(v) is torch.Tensor)
        for n, v in held.items()
    }
    return {n: v for n, v in held.items() if count[n]}, tuple(n for n in held if not count[n])


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
    if depth >= MOST_DEEP or data_class(kind) is None:
        return x
    held, unread = named(x, names)
    return Opened(kind, tuple(held), [opened(v, names, depth + 1) for v in held.values()], unread)


def closed(x: Any) -> Any:
    """The objects that were opened, made anew."""
    kind = type(x)
    if kind is Opened:
        described = data_class(x.kind) or _NOT_MET
        if described.of_dictionary:
            values = {n: closed(v) for n, v in zip(x.names, x.values, strict=True)}
            return x.kind.from_dict(values | dict.fromkeys(x.unread, UNREAD))
        copy = types.SimpleNamespace() if x.kind is types.SimpleNamespace else object.__new__(x.kind)
        for name, value in zip(x.names, x.values, strict=True):
            if name in described.slots:
                object.__setattr__(copy, name, closed(value))
            else:
                copy.__dict__[name] = closed(value)
        return copy
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
    In an object a number in a tensor counts for nothing: a tree's word; and an object that holds others of its class is
    the root of a tree, whose tensors are those of all its nodes: no more than the root's own are looked at."""
    kind = type(x)
    if kind is torch.Tensor or depth == 0:
        return kind is torch.Tensor
    if kind in (list, tuple) or hasattr(kind, "_make"):
        return bool(x) and holds_tensors(x[0], depth - 1)
    if kind is dict:
        return any(holds_tensors(v, depth - 1) for v in x.values())
    described = None if kind in ATOMS else data_class(kind)
    if described is None:
        return False
    is_tree, parts = False, []
    for v in attributes_of(x, described).values():
        of = type(v)
        if of is torch.Tensor:
            if v.dim():
                return True
        elif of is kind or (of in (list, tuple) and v and type(v[0]) is kind):
            is_tree = True
        elif of not in ATOMS:
            parts.append(v)
    return not is_tree and any(holds_tensors(v, depth - 1) for v in parts)


Instance: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # arguments, the module first


class TensorColumns(Sequence[Instance]):
    """Instances whose arguments are columns of plain tensors: (args, kwargs) of each, made when it is asked for."""

    __slots__ = ("columns", "head")

    def __init__(self, head: tuple[object, ...], columns: Sequence[Sequence[torch.Tensor]]) -> None:
        self.head = head
        self.columns = columns

    @staticmethod
    def of(head: tuple[object, ...], columns: Sequence[Any]) -> TensorColumns | None:
        """The instances of these columns; None where one is no list of tensors alone or has another length."""
        if len(head) != 1:
            return None
        for c in columns:
            if type(c) not in _LISTS or not c or type(c[0]) is not torch.Tensor:
                return None
            if set(map(type, c)) != _TENSORS:
                return None
        return TensorColumns(head, columns) if len(set(map(len, columns))) == 1 else None

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, i: int) -> Instance: ...
    @overload
    def __getitem__(self, i: slice) -> TensorColumns: ...
    def __getitem__(self, i: int | slice) -> TensorColumns | Instance:
        if isinstance(i, slice):
            return TensorColumns(self.head, [c[i] for c in self.columns])
        return (*self.head, *[c[i] for c in self.columns]), {}

    def __iter__(self) -> Iterator[Instance]:
        return (((*self.head, *row), {}) for row in zip(*self.columns, strict=True))
