"""What a forward's code may change that outlives an instance, read from its bytecode.

In: functions, and the classes of modules. Out: names of attributes that are set or whose containers are changed, and
whether globals, closures or the contents of either are; whether a frame is inside a `with` whose manager may hold
something that all instances share.

    changes = changes_of([Model.forward], [Model])
    changes.names         # {"h", "log"}: self.h = ..., self.log.append(...)
    changes.shared        # "COUNT" (model.py:12), "" where nothing but attributes is changed

An instance that waits lets others run, and what they share would be mixed. What is found here is only ever too much:
then an instance waits for its turn, or isn't left, where it might have been.
"""

from __future__ import annotations

import builtins
import contextlib
import decimal
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxbatch.trace.location import in_users_code

_MUTATORS = frozenset(
    {
        "append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear",
        "update", "add", "discard", "setdefault", "sort", "reverse", "rotate", "put", "write", "difference_update",
        "intersection_update", "symmetric_difference_update",
    }
)  # fmt: skip
_STORES_ITEM = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_STORES_ATTRIBUTE = ("STORE_ATTR", "DELETE_ATTR")
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_FREE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")


@dataclass(frozen=True)
class Changes:
    """What code may change: attributes by name, and the first global or closure variable ("" for none)."""

    names: frozenset[str]
    shared: str


@dataclass(frozen=True)
class _Found:
    """The same of one code object. Whether what `shared` names is a container is not known from the code."""

    names: tuple[str, ...]
    rebound: tuple[str, ...]  # globals and closure variables that are assigned
    shared: tuple[str, ...]  # those whose attributes or items are
    called: tuple[str, ...]  # names of functions that it may call


@functools.lru_cache(maxsize=4096)
def _found(code: types.CodeType) -> _Found:
    names: dict[str, None] = {}
    rebound: dict[str, None] = {}
    shared: dict[str, None] = {}
    called: dict[str, None] = {}
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    for k, i in enumerate(steps):
        changed: range | None = None  # where what changes was read
        if i.opname in _FREE:
            called[str(i.argval)] = None
        if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars
        ):
            rebound[str(i.argval)] = None
        elif i.opname in _STORES_ATTRIBUTE:
            names[str(i.argval)] = None
            changed = _expression(steps, k) or _line(steps, k)
            changed = range(changed.start, changed.start + 1)
        elif i.opname in _STORES_ITEM:
            key = _expression(steps, k)
            changed = (key and _expression(steps, key.start)) or _line(steps, k)
        elif i.opname in _LOADS_ATTRIBUTE and i.argval in _MUTATORS:
            changed = _expression(steps, k) or _line(steps, k)
        for x in (steps[at] for at in changed or ()):
            if x.opname in _LOADS_ATTRIBUTE and x.argval not in _MUTATORS:
                names[str(x.argval)] = None
            elif x.opname in _FREE and (x.opname != "LOAD_DEREF" or x.argval in code.co_freevars):
                shared[str(x.argval)] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found = _found(inner)
            names.update(dict.fromkeys(found.names))
            called.update(dict.fromkeys(found.called))
            own = set(code.co_cellvars)  # only looked up
            rebound.update({x: None for x in found.rebound if x not in own})
            shared.update({x: None for x in found.shared if x not in own})
    return _Found(tuple(names), tuple(rebound), tuple(shared), tuple(called))


def _expression(steps: Sequence[dis.Instruction], end: int) -> range | None:
    """The steps that compute what is on top of the stack before step `end`; None where jumps or swaps hide it."""
    wanted, k = 1, end
    while k > 0 and wanted > 0:
        if steps[k].is_jump_target:
            return None
        k -= 1
        if steps[k].opname in ("SWAP", "COPY"):
            return None
        wanted -= dis.stack_effect(steps[k].opcode, steps[k].arg, jump=False)
    return range(k, end) if wanted <= 0 else None


def _line(steps: Sequence[dis.Instruction], k: int) -> range:
    """The steps before step k on its line."""
    start = k
    while start > 0 and _at(steps, start - 1) == _at(steps, k):
        start -= 1
    return range(start, k)


def _at(steps: Sequence[dis.Instruction], k: int) -> int | None:
    positions = steps[k].positions
    return None if positions is None else positions.lineno


def changes_of(functions: Iterable[Callable[..., Any]], classes: Iterable[type]) -> Changes:
    """What these functions, the methods of these classes, and the functions that they name may change."""
    names: dict[str, None] = {}
    shared = ""
    ahead = list(map(inspect.unwrap, functions))
    for cls in dict.fromkeys(classes):
        ahead.extend(_methods(cls))
    seen: set[types.CodeType] = set()  # only looked up
    while ahead:
        f = ahead.pop()
        f = getattr(f, "__func__", f)
        code = getattr(f, "__code__", None)
        if not isinstance(code, types.CodeType) or code in seen or not in_users_code(code, f.__globals__):
            continue
        seen.add(code)
        found = _found(code)
        names.update(dict.fromkeys(found.names))
        known = _variables(f)
        if not shared:
            changed = (*found.rebound, *(x for x in found.shared if _may_hold(known.get(x))))
            shared = f"{changed[0]} ({f.__qualname__})" if changed else ""
        ahead.extend(x for n in found.called if isinstance(x := known.get(n), types.FunctionType))
    return Changes(frozenset(names), shared)


def _methods(cls: type) -> Iterator[Callable[..., Any]]:
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins", "fxbatch"):
            continue
        for name, x in vars(base).items():
            if isinstance(x, property):
                yield from (f for f in (x.fget, x.fset) if f is not None)
            elif name != "__init__" and (callable(x) or isinstance(x, (staticmethod, classmethod))):
                yield inspect.unwrap(getattr(x, "__func__", x))


def _variables(f: Any) -> dict[str, Any]:
    """Globals and closure variables that a function names."""
    found = {n: f.__globals__[n] for n in _found(f.__code__).called if n in f.__globals__}
    for n, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            found[n] = inspect.unwrap(x) if callable(x := cell.cell_contents) else x
    return found


def _may_hold(x: Any) -> bool:
    """Whether what a variable holds may change: modules of Python, functions and numbers don't, torch's modules are
    looked at by their attributes."""
    kept = (
        types.ModuleType,
        types.FunctionType,
        types.BuiltinFunctionType,
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
    )
    return not isinstance(x, (*kept, tuple, frozenset, torch.nn.Module, torch.Tensor))


# With blocks

# What these hold is this thread's torch modes, which each instance has of its own, or nothing.
_OWN = (
    torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast,
    torch.autograd.profiler.record_function, contextlib.nullcontext, contextlib.suppress, decimal.localcontext,
    torch.nn.attention.sdpa_kernel, torch.overrides.TorchFunctionMode,
)  # fmt: skip


@dataclass(frozen=True)
class _Manager:
    """How the manager of a `with` is named: a variable ("" where that can't be told), and attributes of it."""

    root: str
    path: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _handlers(code: types.CodeType) -> tuple[tuple[int, int, int, _Manager | None], ...]:
    """(start, end, handler, manager where it is a `with`'s) of each protected range of instructions."""
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    place = {i.offset: k for k, i in enumerate(steps)}
    rows = list(_protected(code))
    first: dict[int, int] = {}
    for start, _, target in rows:
        first[target] = min(start, first.get(target, start))
    managers: dict[int, _Manager | None] = {}
    for target, start in first.items():
        handles = steps[place[target] : place[target] + 2]
        is_with = any(i.opname == "WITH_EXCEPT_START" for i in handles)
        managers[target] = _manager(steps, start) if is_with else None
    return tuple((start, end, target, managers[target]) for start, end, target in rows)


def _manager(steps: list[dis.Instruction], inside: int) -> _Manager:
    """The manager of the `with` whose body begins at an offset: its expression ends where it is entered."""
    entered = [
        k
        for k, i in enumerate(steps)
        if i.offset < inside
        and (i.opname == "BEFORE_WITH" or (i.opname == "LOAD_SPECIAL" and "exit" in i.argrepr))
    ]
    k = entered[-1] if entered else 0
    if steps[k].opname == "LOAD_SPECIAL":
        k -= 1  # behind a COPY of the manager
    named = _expression(steps, k)
    if named is None or steps[named.start].opname not in (*_FREE, "LOAD_FAST"):
        return _Manager("", ())
    path = []
    for i in steps[named.start + 1 : k]:
        if i.opname not in _LOADS_ATTRIBUTE:
            break
        path.append(str(i.argval))
    return _Manager(str(steps[named.start].argval), tuple(path))


def _entered(code: types.CodeType, offset: int) -> Iterator[_Manager]:
    """The managers of the `with` blocks around an instruction, innermost first: a handler is protected by the next."""
    rows = _handlers(code)
    for _ in rows:
        found = next((row for row in rows if row[0] <= offset < row[1]), None)
        if found is None:
            return
        offset = found[2]
        if found[3] is not None:
            yield found[3]


def _protected(code: types.CodeType) -> Iterator[tuple[int, int, int]]:
    """(start, end, handler) of each protected range of instructions, in bytes (CPython's exception_handling_notes)."""
    data = iter(code.co_exceptiontable)

    def number() -> int | None:
        byte = next(data, None)
        if byte is None:
            return None
        n = byte & 63
        while byte & 64:
            byte = next(data)
            n = (n << 6) | (byte & 63)
        return n

    while (start := number()) is not None:
        length, target, _ = number() or 0, number() or 0, number()
        yield 2 * start, 2 * (start + length), 2 * target


@functools.lru_cache(maxsize=4096)
def _is_suspect(code: types.CodeType) -> bool:
    return "acquire" in code.co_names or any(row[3] is not None for row in _handlers(code))


def holds_what_is_shared(frame: types.FrameType | None) -> bool:
    """Whether a frame of the user's code, from this one outwards, is inside a `with` whose manager may hold what all
    instances share (a lock, a file, a global setting), or takes a lock itself."""
    while frame is not None:
        code = frame.f_code
        if _is_suspect(code) and in_users_code(code, frame.f_globals):
            if "acquire" in code.co_names:
                return True
            if not all(_is_own(manager, frame) for manager in _entered(code, frame.f_lasti)):
                return True
        frame = frame.f_back
    return False


def _is_own(manager: _Manager, frame: types.FrameType) -> bool:
    """Whether what is named so is one of torch's modes, or of what holds nothing."""
    for where in (frame.f_locals, frame.f_globals, vars(builtins)):
        if manager.root in where:
            found = where[manager.root]
            break
    else:
        return False
    for attribute in manager.path:
        found = getattr(found, attribute, None)
    kind = found if isinstance(found, type) else type(found)
    return any(found is own or (isinstance(own, type) and issubclass(kind, own)) for own in _OWN)
