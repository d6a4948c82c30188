"""Blocks as text: the expression that builds them, and where in an expression some of them stand.

In: blocks. Out: one line like `Map(Vector(3)) >> Sum()`, or the lines of an error that point into it:

      in Map(Vector(3) >> FC(4) >> Scalar())
                          ^^^^^    ^^^^^^^^
      at Map.element / Pipe[2]
"""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from fxbatch.blocks.types import dtype_name

_OPEN, _CLOSE = "\ue000", "\ue001"  # private use: marks around a block's text, taken out again
_marked: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("marked", default=())
_shown: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("shown", default=())
WIDTH = 400


class Shown(Protocol):
    """The objects that can be shown: all that are typed."""

    name: str | None
    built_at: str
    watchers: list[Any]

    def expression(self) -> str:
        """The expression that builds it, without marks."""
        ...

    def place_of(self, part: Any) -> str:
        """Where a part stands in it: `[2]`, `.element`."""
        ...


def expression(block: Shown) -> str:
    """The block as the expression that builds it; a block inside itself is shown as `...`."""
    if id(block) in _shown.get():
        return "..."
    token = _shown.set((*_shown.get(), id(block)))
    try:
        text = block.expression()
    finally:
        _shown.reset(token)
    return f"{_OPEN}{text}{_CLOSE}" if id(block) in _marked.get() else text


def call_text(name: str, *args: Any, **kwargs: Any) -> str:
    """`name(arg, key=value)`; a pair (value, default) as keyword argument is left out when they are equal."""
    parts = [value_text(a) for a in args]
    for key, value in kwargs.items():
        if isinstance(value, tuple) and len(value) == 2:
            value, default = value
            if value is default or value == default:
                continue
        parts.append(f"{key}={value_text(value)}")
    return f"{name}({', '.join(parts)})"


def value_text(x: Any) -> str:
    """An argument as text: functions by name, tensors by type, the rest by repr."""
    if hasattr(x, "expression"):
        return expression(x)
    if isinstance(x, torch.dtype):
        return repr(dtype_name(x))
    if isinstance(x, torch.Tensor):
        return f"<tensor {list(x.shape)} {dtype_name(x.dtype)}>"
    if isinstance(x, torch.nn.Module):
        return type(x).__name__ if not list(x.children()) and not x.extra_repr() else _module_text(x)
    if callable(x):
        if not isinstance(x, (types.FunctionType, type)):
            return getattr(x, "__name__", type(x).__name__)
        return x.__qualname__.rpartition("<locals>.")[2]
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."


def _module_text(x: torch.nn.Module) -> str:
    return f"{type(x).__name__}({x.extra_repr()})" if x.extra_repr() else type(x).__name__


@contextlib.contextmanager
def _marking(blocks: tuple[int, ...]) -> Iterator[None]:
    token = _marked.set(blocks)
    try:
        yield
    finally:
        _marked.reset(token)


def point_at(*blocks: Shown) -> str:
    """The lines `in <expression>`, carets under the blocks, `at <path>`, `built at <line>`."""
    root, _ = _climb(blocks[0])
    with _marking(tuple(id(b) for b in blocks)):
        text = expression(root)
    plain, under, depth = "", "", 0
    for char in text:
        if char == _OPEN:
            depth += 1
        elif char == _CLOSE:
            depth -= 1
        else:
            plain += char
            under += "^" if depth else " "
    lines = ""
    if "^" in under and under.strip() != "^" * len(plain) and len(plain) <= WIDTH:
        lines = f"\n  in {plain}\n     {under.rstrip()}"
    elif root is not blocks[0]:
        lines = f"\n  in {plain[:WIDTH]}{'...' if len(plain) > WIDTH else ''}"
    for block in dict.fromkeys(blocks):
        path = _climb(block)[1]
        if path:
            lines += f"\n  at {path}: {block!r}"
    places = dict.fromkeys(b.built_at for b in blocks if b.built_at)
    return lines + (f"\n  built at {', '.join(places)}" if places else "")


def _climb(block: Shown) -> tuple[Shown, str]:
    """The outermost block that holds this one, and the path from it."""
    path: list[str] = []
    seen = [block]
    while True:
        parent = next((w for w in reversed(block.watchers) if not any(w is s for s in seen)), None)
        if parent is None:
            return block, " / ".join(reversed(path))
        path.append(f"{type(parent).__name__}{parent.place_of(block)}")
        seen.append(parent)
        block = parent
