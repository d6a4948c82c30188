"""What a body reads besides its tensors, by content: attributes, globals, closures; and what it changes.

In: a module (or a function) that is to be one operation. Out: its Reads: a key that is equal exactly where the body
does the same, places to look whether anything has changed, and what makes the body impossible to know.

    reads = Reads.of_module(module, "forward")
    reads.key                        # part of the key of the operation
    reads.unchanged()                # whether every place still holds what it held
    reads.changed_by(run)            # "" or the name of what a run changed, which is put back

What is read is found in the code: the names of attributes and globals of every function that can be reached from
the body, in the user's modules. Plain data and users' own objects are compared by content, code, classes and library
functions by identity. A list that holds tensors, an iterator, a lock or a random generator can't be compared:
`opaque` says which, and the body is traced through. What runs without having been found (`sys.setprofile` sees it) is
looked at too, and the body runs again.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import enum
import functools
import gc
import hashlib
import io
import itertools
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import (
    CodeType,
    FrameType,
    FunctionType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch

from fxbatch.trace.fake_run import BodyError
from fxbatch.trace.reached import (
    CODELESS,
    CONTENT,
    IN_CELL,
    IN_DICT,
    IN_SLOT,
    IN_TYPE,
    MISSING,
    START,
    VALUES,
    BodyRoots,
    Extra,
    Item,
    Walk,
    first_other,
    holds_now,
    is_library,
)
from fxbatch.trace.table import ATOMS, static_key

Guards = tuple[Any, ...]  # dictionary, key, object it held; and again

# What has an effect that is seen outside, or reads what no key holds.
_EFFECTS: dict[Any, str] = {
    builtins.print: "prints", builtins.open: "opens a file", builtins.input: "asks for input",
    **{getattr(time, name): "reads the clock" for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
        "process_time_ns", "thread_time", "sleep", "localtime", "gmtime", "ctime", "strftime",
    )},
}  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    """Whether what is in a place is what was there: the same object, or equal plain data."""
    return a is b or (type(a) is type(b) and type(a) in ATOMS and static_key(a) == static_key(b))


def _same_content(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and (all(map(operator.is_, a, b)) or all(map(_same, a, b)))


class Reads:
    """What a body reads besides its tensors, as it was when this was made."""

    __slots__ = ("codes", "items", "key", "names", "opaque", "roots", "stored")

    def __init__(
        self, roots: BodyRoots, names: frozenset[str] | None = None, stored: frozenset[str] = frozenset()
    ) -> None:
        self.roots = roots
        names = START | {roots.method} if names is None else names
        while True:
            walk = Walk(roots, names, stored)
            if walk.opaque or (walk.names <= names and walk.stored <= stored):
                break
            names, stored = names | walk.names, stored | walk.stored
        self.names = names  # of attributes, in all code that was found
        self.stored = stored  # of attributes that it sets
        self.items = walk.items
        self.key: Any = walk.key
        self.opaque = walk.opaque  # why the body can't be known, "" when it can
        self.codes = walk.codes

    @staticmethod
    def of_module(module: torch.nn.Module, method: str | None = None, extra: Sequence[Extra] = ()) -> Reads:
        """Of a module's forward, or another method of it. extra: code that was seen to run."""
        return Reads(BodyRoots(module, method or "forward", None, tuple(extra)))

    @staticmethod
    def of_function(function: Any, extra: Sequence[Extra] = ()) -> Reads:
        """Of a function, a class, or a module's forward."""
        if isinstance(function, torch.nn.Module):
            return Reads.of_module(function, extra=extra)
        return Reads(BodyRoots(None, "forward", function, tuple(extra)))

    @staticmethod
    def of_forward(function: Any, module: torch.nn.Module | None) -> Reads:
        """Of a forward that is traced through, and of all modules of its model: what a trace of it depends on."""
        return Reads(BodyRoots(module, "forward", function, (), loose=True))

    def again(self, extra: Sequence[Extra] = ()) -> Reads:
        """The same body looked at again, as things are now. extra: more code that was seen to run."""
        return Reads(self.roots._replace(extra=(*self.roots.extra, *extra)), self.names, self.stored)

    def unchanged(self) -> bool:
        """Whether every place still holds what it held."""
        return self._changed(far=True) is None

    def _changed(self, *, far: bool) -> Item | None:
        """The first place that holds something else than it held. far: whether those that user code may change unseen
        are looked at too."""
        items, k = self.items, -1
        while (k := first_other(items, k + 1)) < len(items):
            if (far or not items[k].far) and not _holds(items[k]):
                return items[k]
        return None

    def guards(self) -> Guards | None:
        """What C compares at each call: places that user code may change between two calls without being seen.
        None where some of them are no items of dictionaries."""
        if any(x.far and x.kind != IN_DICT for x in self.items):
            return None
        return tuple(
            [x for item in self.items if item.far for x in (item.holder, item.name, holds_now(*item[:3]))]
        )

    def near(self) -> bool:
        """Whether those places hold what they held."""
        return all(_holds(x) for x in self.items if x.far)

    def differs_from(self, other: Reads) -> str:
        """The name of the first place where another look found something else, "" if there is none."""
        before = {x.path: x for x in self.items}
        for item in other.items:
            was = before.get(item.path)
            same = _same_content if item.kind == CONTENT else _same
            if was is None or was.kind != item.kind or not same(was.value, item.value):
                return item.path
        return ""

    def unseen(self) -> str:
        """The name of another place that holds something else, "" if none does."""
        changed = self._changed(far=False)
        return "" if changed is None else changed.path

    def changes(self) -> list[tuple[Item, Any]]:
        """The places that hold something else than they held, with what they hold now."""
        return [(x, holds_now(x.kind, x.holder, x.name)) for x in self.items if not _holds(x)]

    def restore(self, changed: Sequence[tuple[Item, Any]]) -> None:
        """Put back what places held."""
        for item, _ in reversed(changed):
            _put(item, item.value)

    @contextlib.contextmanager
    def reinstated(self) -> Iterator[None]:
        """Everything that the body reads outside its own modules as it was when this was made."""
        differing = [(x, now) for x, now in self.changes() if not x.own]
        try:
            self.restore(differing)
            yield
        finally:
            for item, now in differing:
                _put(item, now)

    def run(self, body: Callable[[], Any]) -> tuple[Any, Effects]:
        """Run a body, and what it did besides: what it changed is put back."""
        watch = _Watch(self.codes)
        try:
            result = watch.run(body)
        finally:
            changed = self.changes()
            self.restore(changed)
        return result, Effects(
            changed[0][0].path if changed else "", watch.effect, tuple(watch.unknown.values())
        )

    def lines(self) -> tuple[str, ...]:
        """The same as text that does not depend on the process: for traces that are kept."""
        return tuple(sorted({f"{x.path}: {_text(x)}" for x in self.items}))


class Effects(NamedTuple):
    """What a run did besides its result."""

    changed: str  # the name of something that it changed
    effect: str  # "prints"
    unknown: tuple[Extra, ...]  # code that had not been found


def _holds(item: Item) -> bool:
    now = holds_now(item.kind, item.holder, item.name)
    return _same_content(now, item.value) if item.kind == CONTENT else _same(now, item.value)


def _put(item: Item, value: Any) -> None:
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


class _Watch:
    """Sees which of the user's code runs, and calls that have effects."""

    def __init__(self, known: frozenset[CodeType]) -> None:
        self.known = known
        self.unknown: dict[CodeType, Extra] = {}
        self.effect = ""

    def run(self, body: Callable[[], Any]) -> Any:
        before, collecting = sys.getprofile(), gc.isenabled()
        try:
            gc.disable()  # what a collection would run is none of the body's code
            sys.setprofile(self._event)
            return body()
        finally:
            sys.setprofile(before)
            if collecting:
                gc.enable()

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code in self.known or code in self.unknown:
                return
            name = frame.f_globals.get("__name__", "")
            if is_library(name):
                if name.startswith("logging") and not self.effect and _by_user(frame.f_back):
                    self.effect = "logs"
                    raise BodyError("logs")
                return
            if not (code.co_filename == "<string>" and code.co_freevars):  # what dataclasses make
                self.unknown[code] = Extra(code, frame.f_globals)
        elif event == "c_call" and not self.effect:
            effect = _EFFECTS.get(arg, "")
            if not effect and isinstance(getattr(arg, "__self__", None), io.IOBase):
                effect = "reads or writes a file"
            if effect and _by_user(frame):
                self.effect = effect
                raise BodyError(effect)  # before it happens


def _by_user(frame: FrameType | None) -> bool:
    return frame is not None and not is_library(frame.f_globals.get("__name__", ""))


def _text(item: Item) -> str:
    """What a place held, as text that does not depend on the process."""
    if item.kind == CONTENT:
        return ", ".join(map(_value_text, itertools.islice(item.value, 1000))) + f" ({len(item.value)})"
    return _value_text(item.value)


def _value_text(x: Any) -> str:
    if type(x) in ATOMS or isinstance(x, (*VALUES, enum.Enum)):
        return repr(x)
    if isinstance(x, (staticmethod, classmethod)):
        x = x.__func__
    if isinstance(x, property):
        x = x.fget
    if isinstance(x, FunctionType):
        return f"{x.__qualname__} {_digest(x.__code__)}"
    if isinstance(x, (type, *CODELESS)):
        return f"{x.__module__}.{x.__qualname__}" if isinstance(x, type) else str(getattr(x, "__name__", x))
    if isinstance(x, ModuleType):
        return x.__name__
    return f"a {type(x).__qualname__}"


@functools.lru_cache(maxsize=4096)
def _digest(code: CodeType) -> str:
    constants = [_digest(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    text = repr((code.co_code, code.co_names, code.co_freevars, constants))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
