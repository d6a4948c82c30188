"""Type inference in both directions: types flow along links until nothing changes, or two of them clash.

In: blocks whose `infer_types` states its rule. Out: their `input_type` and `output_type`, or a BlockTypeError
that names both blocks, both types and where in the expression they stand.

    link(vector, "output", fc, "input")     # what one gives is what the other takes

A type, once known, never changes; a rule only ever adds knowledge, so the order of rules does not matter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from fxbatch.blocks.show import point_at
from fxbatch.blocks.types import ResultType, VoidType, canonicalize_type
from fxbatch.errors import BlockTypeError

if TYPE_CHECKING:
    from fxbatch.blocks.block import Typed

Side = Literal["input", "output"]
_VERB = {"input": "takes", "output": "gives"}


def link(source: Typed, source_side: Side, target: Typed, target_side: Side) -> None:
    """Make two ends have one type, whichever of them is known.

    An input of type VoidType takes anything (and ignores it), so nothing flows through it.
    """
    if target_side == "input" and isinstance(target.input_type, VoidType):
        return
    give(target, target_side, source.type_at(source_side), source, source_side)
    if target_side == "input" and isinstance(target.input_type, VoidType):
        return
    give(source, source_side, target.type_at(target_side), target, target_side)


def give(
    target: Typed, side: Side, t: ResultType | None, giver: Typed, giver_side: Side | None = None
) -> None:
    """Tell one end of `target` its type, as `giver` implies it. Nothing happens when t is None."""
    if t is None:
        return
    t = canonicalize_type(t)
    known = target.type_at(side)
    if known == t or (side == "input" and isinstance(known, VoidType)):
        return
    if known is not None:
        raise clash(target, side, known, giver, giver_side, t)
    accepted = target.input_type_classes if side == "input" else target.output_type_classes
    if accepted and not isinstance(t, accepted):
        raise refuse(target, side, t, giver, accepted)
    target.settle(side, t, giver)


class _Pending(threading.local):
    """The blocks of this thread whose rules are still to run, in order; None when no one runs them."""

    def __init__(self) -> None:
        self.queue: dict[int, Typed] | None = None


_pending = _Pending()


def again(*blocks: Typed) -> None:
    """Run the rules of these blocks, and of all that follow from them, before the outermost call returns."""
    if _pending.queue is not None:
        _pending.queue.update((id(b), b) for b in blocks)
        return
    queue = _pending.queue = {id(b): b for b in blocks}
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
    """The error of two types for one end: both blocks, both types, the expression with both marked."""
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


def complain(block: Typed, message: str, other: Typed | None = None) -> BlockTypeError:
    """An error of a block's own rule, with its expression."""
    return BlockTypeError(f"{block!r}: {message}{point_at(block, other or block)}")
