"""Things: objects that the names in a body stand for, while its code is walked (`plain_body`).

In: objects that names lead to. Out: Things, compared by identity, in sets.

    frozenset({Thing(model.cell, "self.cell")})
    DATA                             # whatever is computed
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from fxbatch.trace.source import Function


class NotPlain(Exception):
    """The body is not plain; the message is the reason."""


class Thing:
    """An object that code names, and how; compared by identity."""

    __slots__ = ("object", "path")

    def __init__(self, held: Any, path: str = "") -> None:
        self.object = held
        self.path = path

    def __eq__(self, other: object) -> bool:
        return type(other) is Thing and other.object is self.object

    def __hash__(self) -> int:
        return id(self.object)


Things = frozenset[Thing]
COMPUTED = Thing(object(), "data")
CONTEXT = Thing(object(), "ctx")  # of a torch.autograd.Function
DATA: Things = frozenset({COMPUTED})
NOTHING: Things = frozenset()


@dataclasses.dataclass(eq=False)
class Bound:
    """A function with its first argument."""

    function: Any
    owner: Things


@dataclasses.dataclass(eq=False)
class Parent:
    """The result of `super()`: the classes after one, for a module."""

    after: type
    module: torch.nn.Module


@dataclasses.dataclass(eq=False)
class Scope:
    """The variables of a function that is walked."""

    node: Function
    globals: dict[str, object]
    cells: dict[str, Any]
    around: Scope | None
    names: tuple[frozenset[str], frozenset[str]]  # `stored_names`
    variables: dict[str, Things] = dataclasses.field(default_factory=dict)
    results: Things = NOTHING


@dataclasses.dataclass(eq=False)
class Local:
    """A function that the body defines."""

    node: Function
    scope: Scope
    defaults: dict[str, Things] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Row:
    """A tuple whose parts stand for these; or what gives such tuples one after another."""

    parts: tuple[Things, ...]


class Roots(NamedTuple):
    """The module or function that is looked at, and how."""

    module: torch.nn.Module | None
    method: str
    function: object
    classes: tuple[type, ...] = ()  # classes of objects among its arguments
    loose: bool = False  # whether it need not be plain: what can't be compared is left out
