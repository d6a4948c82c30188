"""Objects with an input type and an output type; types flow between them until nothing changes, or two of them clash.

In: parts whose `infer_types` states their rule. Out: their `input_type` and `output_type`, or a BlockTypeError that
names both parts, both types and where in the expression they stand.

    link(vector, "output", fc, "input")     # what one gives is what the other takes

A type, once known, never changes; a rule only ever adds knowledge, so the order of rules does not matter.
"""

from __future__ import annotations

import abc
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fxbatch.blocks.show import call_text, expression, point_at
from fxbatch.blocks.types import (
    ResultType,
    TensorType,
    VoidType,
    canonicalize_type,
    convert_to_type,
    map_tensors,
)
from fxbatch.errors import BlockTypeError

Side = Literal["input", "output"]
_VERB = {"input": "takes", "output": "gives"}
_PACKAGE = __name__.rpartition(".")[0]
# What a part keeps beside its parameters, but a copy or a pickle leaves out: it is made again on demand.
_REMADE = ("_run",)


def _built_at() -> str:
    """The user's line that builds a block: `model.py:31`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith((_PACKAGE, "functools")):
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame is not None else ""


class _InferredWhenBuilt(abc.ABCMeta):
    """The class of classes of parts: their rule runs when the whole constructor has, with all attributes there."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.is_built = True
        again(made)
        return made


class Typed(nn.Module, metaclass=_InferredWhenBuilt):
    """An object with an input type and an output type: a block, or a layer.

    `input_type_classes` and `output_type_classes`: kinds of types that the ends can have, () for any.
    """

    input_type_classes: ClassVar[tuple[type[ResultType], ...]] = ()
    output_type_classes: ClassVar[tuple[type[ResultType], ...]] = ()
    is_built = False  # whether the constructor has run; rules wait for it

    def __init__(self, *, input_type: Any = None, output_type: Any = None, name: str | None = None) -> None:
        super().__init__()
        if name is not None and (not isinstance(name, str) or not name):
            raise BlockTypeError(f"a name is a non-empty string, got {name!r}")
        self.name = name
        self.watchers: list[Typed] = []  # what infers again when a type of this becomes known
        self.origins: dict[str, Typed] = {}  # who told an end its type
        self.built_at = _built_at()
        self._types: dict[Side, ResultType | None] = {"input": None, "output": None}
        self._classes: dict[Side, tuple[type[ResultType], ...]] = {
            "input": self.input_type_classes,
            "output": self.output_type_classes,
        }
        self._place = torch.empty(0)  # follows .to(device); parameters are made there
        self.set_input_type(input_type)
        self.set_output_type(output_type)

    # -- types --------------------------------------------------------------------------------------

    @property
    def input_type(self) -> ResultType | None:
        """The input type, None while it is unknown."""
        return self._types["input"]

    @property
    def output_type(self) -> ResultType | None:
        """The output type, None while it is unknown."""
        return self._types["output"]

    def type_at(self, side: Side) -> ResultType | None:
        """The type of an end as inference knows it."""
        return self._types[side]

    def set_input_type(self, input_type: Any) -> Any:
        """Declare the input type (a type or its shorthand); self. BlockTypeError when it can't be."""
        if input_type is not None:
            give(self, "input", convert_to_type(input_type), self, declared=True)
        return self

    def set_output_type(self, output_type: Any) -> Any:
        """Declare the output type (a type or its shorthand); self. BlockTypeError when it can't be."""
        if output_type is not None:
            give(self, "output", convert_to_type(output_type), self, declared=True)
        return self

    def set_input_type_classes(self, *classes: type[ResultType]) -> Any:
        """Allow these kinds of input types only, of those allowed so far; self. BlockTypeError when none is left."""
        narrow(self, "input", classes)
        return self

    def set_output_type_classes(self, *classes: type[ResultType]) -> Any:
        """Allow these kinds of output types only, of those allowed so far; self. BlockTypeError when none is left."""
        narrow(self, "output", classes)
        return self

    def set_io_types(self, other: Typed) -> Any:
        """Make this and `other` agree on input and output type, from now on; self."""
        self.watch(other)
        other.watch(self)
        link(other, "input", self, "input")
        link(other, "output", self, "output")
        return self

    def settle(self, side: Side, t: ResultType, giver: Typed) -> None:
        """Take a type that has passed all checks, and infer what follows from it."""
        self._types[side] = t
        self.origins[side] = giver
        again(self, *self.watchers)

    def allowed(self, side: Side) -> tuple[type[ResultType], ...]:
        """The kinds of types that an end can have, () for any."""
        return self._classes[side]

    def infer_types(self) -> None:
        """The part's type rule: from what is known, tell ends and other parts more (`give`, `link`)."""

    def complete_types(self) -> bool:
        """Assume what nothing implies, when an expression is about to run and all rules have; whether it did so."""
        return False

    def check(self) -> None:
        """Raise BlockTypeError for what only a whole expression shows, when it is about to run."""

    def watch(self, part: Typed) -> Any:
        """Infer again when a type of `part` becomes known; part."""
        if not any(w is self for w in part.watchers):
            part.watchers.append(self)
        return part

    # -- as a module --------------------------------------------------------------------------------

    def adopt(self, name: str, part: nn.Module) -> str:
        """Register a part under a name that a module attribute can have, and watch its types; the name."""
        name = name.replace(".", "_")
        if not name or hasattr(self, name):
            name = f"part_{name}"
        while name in self._modules:
            name += "_"
        self.add_module(name, part)
        if isinstance(part, Typed):
            self.watch(part)
        return name

    @property
    def device(self) -> torch.device:
        """Where the part makes its tensors: follows `.to(device)`."""
        return self._place.device

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """As for any module; floating point types follow (`.double()` makes a float64 expression)."""
        super()._apply(fn, recurse)
        self._place = fn(self._place)

        def follow(t: TensorType) -> TensorType:
            moved = fn(torch.empty(0, dtype=t.dtype, device=self._place.device))
            return t if moved.dtype == t.dtype else TensorType(t.shape, moved.dtype)

        for side, t in self._types.items():
            self._types[side] = None if t is None else map_tensors(t, follow)
        self.__dict__.pop("_run", None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _REMADE}

    # -- text ---------------------------------------------------------------------------------------

    def expression(self) -> str:
        """The expression that builds this, without marks; see `show.expression`."""
        return call_text(type(self).__name__)

    def place_of(self, part: Typed) -> str:
        """Where a part stands in this one, for errors: `[2]`, `.element`, `['key']`."""
        for name, child in self._modules.items():
            if child is part:
                return f"[{name}]" if name.isdigit() else f".{name}"
        return ""

    def __repr__(self) -> str:
        return expression(self)


def link(source: Typed, source_side: Side, target: Typed, target_side: Side) -> None:
    """Make two ends have one type, whichever of them is known.

    An input of type VoidType takes anything (and ignores it), so nothing flows through it.
    """
    if source.type_at(source_side) is target.type_at(target_side):  # as most are when a rule runs again
        return
    if target_side == "input" and isinstance(target.type_at("input"), VoidType):
        return
    give(target, target_side, source.type_at(source_side), source, source_side)
    if target_side == "input" and isinstance(target.type_at("input"), VoidType):
        return
    give(source, source_side, target.type_at(target_side), target, target_side)


def give(
    target: Typed,
    side: Side,
    t: ResultType | None,
    giver: Typed,
    giver_side: Side | None = None,
    *,
    declared: bool = False,
) -> None:
    """Tell one end of `target` its type, as `giver` implies it. Nothing happens when t is None.

    declared: the user says so; an input of type VoidType, which ignores what it is given, is then no exception.
    """
    if t is None:
        return
    t = canonicalize_type(t)
    known = target.type_at(side)
    if known == t or (side == "input" and isinstance(known, VoidType) and not declared):
        return
    if known is not None:
        raise clash(target, side, known, giver, giver_side, t)
    accepted = target.allowed(side)
    if accepted and not isinstance(t, accepted):
        raise refuse(target, side, t, giver, accepted)
    target.settle(side, t, giver)


def give_nothing(block: Typed, part: Typed, what: str) -> None:
    """Make a part of a block one that takes no input, VoidType; BlockTypeError when it takes one."""
    taken = part.type_at("input")
    accepted = part.allowed("input")
    if taken is None and (not accepted or any(issubclass(VoidType, c) for c in accepted)):
        give(part, "input", VoidType(), block)
    elif not isinstance(taken, VoidType):
        takes = " or ".join(c.__name__ for c in accepted) if taken is None else repr(taken)
        raise complain(block, f"{what} is given no input, but {part!r} takes {takes}", part)


def narrow(target: Typed, side: Side, classes: tuple[type[ResultType], ...]) -> None:
    """Leave of the kinds of types that an end can have those among `classes`; BlockTypeError when none is left."""
    wrong = [c for c in classes if not (isinstance(c, type) and issubclass(c, ResultType))]
    if wrong or not classes:
        raise BlockTypeError(f"kinds of types are classes like TupleType, got {wrong or classes!r}")
    known, old = target.type_at(side), target.allowed(side)
    if known is not None and not isinstance(known, classes):
        raise refuse(target, side, known, target, classes)
    both = [c for c in classes if not old or issubclass(c, old)]
    both += [c for c in old if issubclass(c, classes) and c not in both]
    if not both:
        listed, left = (" or ".join(c.__name__ for c in group) for group in (classes, old))
        raise BlockTypeError(f"bad {side} type {listed} for {target!r}: expected {left}{point_at(target)}")
    target._classes[side] = tuple(both)


class _Pending(threading.local):
    """The parts of this thread whose rules are still to run, in order; None when no one runs them."""

    def __init__(self) -> None:
        self.queue: dict[int, Typed] | None = None


_pending = _Pending()


def again(*parts: Typed) -> None:
    """Run the rules of these parts, and of all that follow from them, before the outermost call returns."""
    built = {id(p): p for p in parts if p.is_built}
    if _pending.queue is not None:
        _pending.queue.update(built)
        return
    queue = _pending.queue = built
    try:
        while queue:
            queue.pop(next(iter(queue))).infer_types()
    finally:
        _pending.queue = None


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Within it, what follows from a type is inferred at once, also inside a rule that is running."""
    queue, _pending.queue = _pending.queue, None
    try:
        yield
    finally:
        _pending.queue = queue


def clash(
    target: Typed, side: Side, known: ResultType, giver: Typed, giver_side: Side | None, t: ResultType
) -> BlockTypeError:
    """The error of two types for one end: both parts, both types, the expression with both marked."""
    origin = target.origins.get(side)
    because = ""
    if origin is not None and origin is not target and origin is not giver:
        because = f" (because of {origin!r})"
    if giver is target:
        says = f"its rule gives {t!r}"
        if origin is not None and origin is not target:
            because = f" as {origin!r} expects" if side == "output" else f" as {origin!r} gives"
        text = f"{target!r} {_VERB[side]} {known!r}{because}, but {says}"
    else:
        verb = _VERB[giver_side] if giver_side else "implies"
        text = f"{target!r} {_VERB[side]} {known!r}{because}, but {giver!r} {verb} {t!r}"
    other = origin if giver is target and origin is not None else giver
    return BlockTypeError(f"type mismatch: {text}{point_at(target, other)}")


def refuse(
    target: Typed, side: Side, t: ResultType, giver: Typed, accepted: tuple[type, ...]
) -> BlockTypeError:
    """The error of a type that an end could never have."""
    names = " or ".join(c.__name__ for c in accepted)
    by = "" if giver is target else f" from {giver!r}"
    return BlockTypeError(
        f"bad {side} type {t!r} for {target!r}{by}: expected {names}{point_at(target, giver)}"
    )


def mismatch(block: Typed, takes: str, other: Typed, gives: str) -> BlockTypeError:
    """The error of a part that takes one thing and is given another, in words."""
    return BlockTypeError(f"type mismatch: {block!r} {takes}, but {other!r} {gives}{point_at(block, other)}")


def complain(
    block: Typed, message: str, other: Typed | None = None, kind: type[BlockTypeError] = BlockTypeError
) -> BlockTypeError:
    """An error of a part's own rule, with its expression."""
    return kind(f"{block!r}: {message}{point_at(block, other or block)}")
