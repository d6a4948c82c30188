"""What an instance leaves on modules is its own while others wait: each sees what the loop would show it.

In: the first instance that waits. Out: at each switch, the attributes of modules as the instance that goes on would
find them, and in the end as the loop leaves them.

    self.h = self.l(x)
    if self.h.sum() > 0: ...      # others run here: each has an `h` of its own
    self.n += 1                   # waits until all earlier instances are done, then counts on from theirs

Why so, and not an error where values of two instances meet: state in `self` is ordinary Python (an LSTM's `self.h`, a
counter, a log), it batches as well as without, and what one instance leaves to the next may be meant. The rule is the
loop's own: an attribute that an instance has not set itself is the one that the instances before it leave, so whoever
reads it before those are done waits for its turn. Which attributes these are is read from the bytecode of the modules'
classes when the first instance waits; those that are set otherwise are seen as they are set.

    changes = changes_of([Model.forward], [model])
    changes.names         # {"h", "log"}: self.h = ..., self.log.append(...)
    changes.shared        # "COUNT" (model.py:12), "State.h", "" where nothing else is

What is found in the code is only ever too much: then an instance waits for its turn where it might not have to. What
can't be switched is not mixed either: an instance that holds what all share (a lock or another manager of a `with` that
is none of torch's modes, a default dtype, sys.stdout, a global that the code changes) is not left: what it asks for
runs at once. Minibatches in which nobody waits pay for none of this.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import decimal
import dis
import functools
import inspect
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fxbatch.errors import TraceError
from fxbatch.torch_private import are_deterministic
from fxbatch.trace.state import _fast, current_recorder
from fxbatch.trace.user_line import at_line, in_users_code, user_frame

Settings = tuple[Any, ...]
_ABSENT: Any = object()  # an attribute that a module does not have
_CONTAINERS = (list, dict, set, deque, bytearray)
_FEW = 64  # containers of more items are compared by their length alone
_plain_getattr = torch.nn.Module.__getattr__
_OWN_TABLES = ("_parameters", "_buffers", "_modules")


class _Attribute:
    """One attribute of one module, as the instances have it."""

    __slots__ = ("hidden", "module", "name", "own", "settled", "shown")

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.own: dict[int, Any] = {}  # what instances have set that are not all done before
        # As those that are done leave it; as it is now.
        self.settled = self.shown = module.__dict__.get(name, _ABSENT)
        self.hidden = False  # absent now since earlier instances may still set it

    def put(self, x: Any) -> None:
        if x is _ABSENT:
            self.module.__dict__.pop(self.name, None)
        else:
            self.module.__dict__[self.name] = x
        self.shown = x


class Instances:
    """The attributes that instances of one recording set on modules, since the first of them waited."""

    def __init__(
        self,
        roots: Iterable[torch.nn.Module],
        set_before: Mapping[tuple[int, str], torch.nn.Module],
        forget: Callable[[], None],
        fn: Callable[..., Any],
        count: int,
        started: int,
        settings: Settings,
    ) -> None:
        """set_before: what was set until now, by id and name. forget: is called where what is known of the modules may
        not be so any more. settings: when the minibatch began."""
        modules = {id(m): m for r in roots for m in r.modules()}
        changes = changes_of([fn], list(modules.values()))
        self.forget = forget
        self.names = changes.names
        self.shared = changes.shared
        self.done = bytearray(count)
        self.done[:started] = b"\1" * started
        self.settled = started  # all before this one are done
        self.begun = started + 1
        self.turn: Callable[[], None] | None = None  # parks the instance until all earlier ones are done
        self.attributes: dict[tuple[int, str], _Attribute] = {}
        self.order = {key: tuple(m.__dict__) for key, m in modules.items()}
        self.modules = modules
        self.settings = self.entered = settings  # when the minibatch began, and when the instance went on
        for key, m in modules.items():
            for name in m.__dict__:
                if name in self.names and name not in _OWN_TABLES:
                    self.attributes[key, name] = _Attribute(m, name)
        for (key, name), m in set_before.items():
            self.modules.setdefault(key, m)
            self.order.setdefault(key, tuple(m.__dict__))
            self.attributes.setdefault((key, name), _Attribute(m, name))
        self.watched = {
            (key, name): _content(x)
            for key, m in modules.items()
            if not type(m).__module__.startswith("torch.")
            for name, x in m.__dict__.items()
            if isinstance(x, _CONTAINERS) and not name.startswith("_") and (key, name) not in self.attributes
        }

    # Switches

    def enter(self, instance: int) -> None:
        """Show what this instance finds, which has waited: with the settings of the beginning, or it had stayed."""
        self.entered = self.settings
        self._show_own(instance)

    def _show_own(self, instance: int) -> None:
        turn = self.settled >= instance
        for a in self.attributes.values():
            x = a.own.get(instance, a.settled if turn else _ABSENT)
            a.hidden = not turn and instance not in a.own
            self._show(a, x)

    def leave(self, instance: int) -> None:
        """Take what this instance has set, and show what those that are done leave."""
        for a in self.attributes.values():
            now = a.module.__dict__.get(a.name, _ABSENT)
            if now is not a.shown:
                a.own[instance] = now
            a.hidden = False
            self._show(a, a.settled)
        if self.watched:
            self._refuse_changed_containers(instance)

    def end(self, instance: int) -> None:
        """This instance is done."""
        self.leave(instance)
        self._refuse_changed_settings(instance)
        self.done[instance] = 1
        while self.settled < len(self.done) and self.done[self.settled]:
            for a in self.attributes.values():
                x = a.own.pop(self.settled, a.settled)
                if x is not a.settled:
                    a.settled = x
                    self._show(a, x)
            self.settled += 1

    def begin(self, instance: int) -> None:
        """This instance begins."""
        self.begun = max(self.begun, instance + 1)
        self.entered = settings_now()
        self._show_own(instance)

    def close(self) -> None:
        """After the last instance: modules list their attributes in the order in which they did."""
        for key in dict.fromkeys(key for key, _ in self.attributes):
            state, order = self.modules[key].__dict__, self.order.get(key, ())
            for name in (*order, *(n for n in tuple(state) if n not in order)):
                if name in state:
                    state[name] = state.pop(name)

    def _show(self, a: _Attribute, x: Any) -> None:
        if x is not a.module.__dict__.get(a.name, _ABSENT):
            a.put(x)
            if a.name == "training" or isinstance(x, torch.nn.Module):
                self.forget()
        a.shown = x

    # What instances do

    def why_stay(self, holds: Callable[[], bool]) -> str:
        """Why the instance that asks now can't be left, as it holds or changes what all share; "" where it can.
        holds: whether a frame of the user's code holds something."""
        if self.shared:
            return f"the code changes {self.shared}, which all instances share"
        if self.settings != settings_now():
            return "a setting of the process is changed"
        if holds():
            return "it is inside a `with`, or holds a lock, that all instances may share"
        return ""

    def read(self, module: torch.nn.Module, name: str, instance: int) -> None:
        """A module's attribute is not there: where earlier instances may still set it, wait until they are done."""
        a = self.attributes.get((id(module), name))
        if a is None:
            if name not in self.names or self.settled >= instance:
                return
            a = self._new(module, name)
            a.hidden = True
        if a.hidden and self.settled < instance:
            assert self.turn is not None
            self.turn()

    def set(self, module: torch.nn.Module, name: str, instance: int) -> None:
        """A module's attribute is about to be set, or taken away."""
        key = (id(module), name)
        if any(name in module.__dict__.get(table, ()) for table in _OWN_TABLES):
            if self._others(instance):
                raise self._mixed(module, name)
            return
        if key in self.attributes:
            return
        if name in module.__dict__ and instance + 1 < self.begun:
            raise self._mixed(module, name)
        self._new(module, name)

    def _new(self, module: torch.nn.Module, name: str) -> _Attribute:
        self.modules.setdefault(id(module), module)
        self.order.setdefault(id(module), tuple(module.__dict__))
        a = self.attributes[id(module), name] = _Attribute(module, name)
        return a

    def _others(self, instance: int) -> bool:
        """Whether others have begun and are not done."""
        return any(not self.done[i] for i in range(self.settled, self.begun) if i != instance)

    def _mixed(self, module: torch.nn.Module, name: str) -> TraceError:
        return TraceError(
            f"{type(module).__name__}.{name} is changed while other instances wait for values, which may have read it "
            f"already: set it in a method of a module by its name, keep it in a local variable, or give it back as a "
            f"result{at_line()}"
        )

    def _refuse_changed_containers(self, instance: int) -> None:
        for (key, name), before in self.watched.items():
            module = self.modules[key]
            now = _content(module.__dict__.get(name))
            if now != before:
                if self._others(instance):
                    raise self._mixed(module, name)
                self.attributes.setdefault((key, name), _Attribute(module, name))
        for changed in [k for k in self.watched if k in self.attributes]:
            del self.watched[changed]

    def _refuse_changed_settings(self, instance: int) -> None:
        now = settings_now()
        if now != self.entered and self._others(instance):
            what = next(name for name, a, b in zip(_SETTINGS, self.entered, now, strict=True) if a != b)
            raise TraceError(
                f"instance {instance} leaves {what} changed while other instances wait for values, which have begun "
                "without: change it back, or before the call"
            )


_SETTINGS = ("the default dtype", "sys.stdout", "sys.stderr", "deterministic algorithms")


def settings_now() -> Settings:
    """What a process has once, and a forward may change without a `with`."""
    return torch.get_default_dtype(), id(sys.stdout), id(sys.stderr), are_deterministic()


def _content(x: Any) -> Any:
    """What tells whether a container was changed."""
    if not isinstance(x, _CONTAINERS):
        return id(x)
    items: Sequence[Any] = () if len(x) > _FEW else [*x.items()] if isinstance(x, dict) else [*x]
    flat = [y for item in items for y in (item if isinstance(x, dict) else (item,))]
    return id(x), len(x), [y if type(y) in (int, float, str, bool) else id(y) for y in flat]


def traced_getattr(self: torch.nn.Module, name: str) -> Any:
    """`nn.Module.__getattr__` while instances of some thread's recording wait."""
    state = self.__dict__
    for table in _OWN_TABLES:
        own = state.get(table)
        if own and name in own:
            return own[name]
    recorder = current_recorder()
    if recorder is not None and recorder.waiting is not None:
        recorder.waiting.read(self, name, recorder.running)
        if name in state:
            return state[name]
    return _plain_getattr(self, name)


_MUTATORS = frozenset({
    "append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear",
    "update", "add", "discard", "setdefault", "sort", "reverse", "rotate", "put", "write", "difference_update",
    "intersection_update", "symmetric_difference_update",
})  # fmt: skip
_STORES_ITEM = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_STORES_ATTRIBUTE = ("STORE_ATTR", "DELETE_ATTR")
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_FREE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")


_SELF = "."  # no name of an attribute


class Changes(NamedTuple):
    """What code may change: attributes by name, and the first global, closure or plain object ("" for none)."""

    names: frozenset[str]
    shared: str


class _Found:
    """The same of one code object, each in the order of the code."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.rebound: dict[str, None] = {}  # globals and closure variables that are assigned
        self.shared: dict[str, None] = {}  # those whose attributes or items are, if they are containers
        self.called: dict[str, None] = {}  # names of functions that it may call
        # Attributes that are set, or whose contents are changed (""): of its first parameter (_SELF), of what was read
        # from an attribute of that name, or of anything ("").
        self.changed: dict[tuple[str, str], None] = {}
        self.methods: dict[str, None] = {}  # attributes that are read: its methods may be called

    def add(self, inner: _Found, cells: Sequence[str]) -> None:
        """A function within it, whose first parameter is another, and which shares these variables with it."""
        for name in ("names", "called", "methods"):
            getattr(self, name).update(getattr(inner, name))
        for name in ("rebound", "shared"):
            getattr(self, name).update({x: None for x in getattr(inner, name) if x not in cells})
        self.changed.update({("" if owner == _SELF else owner, name): None for owner, name in inner.changed})


@functools.lru_cache(maxsize=4096)
def _found(code: types.CodeType) -> _Found:
    found = _Found()
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    for k, step in enumerate(steps):
        name, changed = str(step.argval), range(0)  # where what changes was read
        if step.opname in _FREE:
            found.called[name] = None
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            step.opname in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars
        ):
            found.rebound[name] = None
        elif step.opname in _STORES_ATTRIBUTE:
            found.names[name] = None
            changed = _read(steps, k)
            owned = len(changed) == 1 and _is_first(code, steps[changed.start])
            found.changed[_SELF if owned else ["", *_path(steps, changed)][-1], name] = None
            changed = changed[:1]
        elif step.opname in _STORES_ITEM:
            key = _expression(steps, k)
            changed = (key and _expression(steps, key.start)) or _line(steps, k)
        elif step.opname in _LOADS_ATTRIBUTE and name in _MUTATORS:
            changed = _read(steps, k)
        if step.opname in _LOADS_ATTRIBUTE:
            found.methods[name] = None
        path = _path(steps, changed)
        if path and step.opname not in _STORES_ATTRIBUTE:
            found.changed[_SELF, path[0]] = None
            found.changed.update({(x, ""): None for x in path})
        found.names.update({x: None for x in path if x not in _MUTATORS})
        for x in (steps[at] for at in changed):
            if x.opname in _FREE and (x.opname != "LOAD_DEREF" or x.argval in code.co_freevars):
                found.shared[str(x.argval)] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.add(_found(inner), code.co_cellvars)
    return found


def _path(steps: Sequence[dis.Instruction], where: range) -> list[str]:
    """The attributes that some steps read."""
    return [str(steps[at].argval) for at in where if steps[at].opname in _LOADS_ATTRIBUTE]


def _read(steps: Sequence[dis.Instruction], end: int) -> range:
    """The steps that compute what is on top of the stack before step `end`, or all before it on its line."""
    return _expression(steps, end) or _line(steps, end)


def _is_first(code: types.CodeType, step: dis.Instruction) -> bool:
    """Whether a step reads the first parameter, `self` in a method."""
    return bool(code.co_argcount) and step.opname == "LOAD_FAST" and step.argval == code.co_varnames[0]


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
    lines = [None if x.positions is None else x.positions.lineno for x in steps[: k + 1]]
    start = k
    while start > 0 and lines[start - 1] == lines[k]:
        start -= 1
    return range(start, k)


def changes_of(functions: Iterable[Callable[..., Any]], modules: Sequence[torch.nn.Module]) -> Changes:
    """What these functions, the methods of these modules' classes and of the plain objects that modules hold, and the
    functions that they name may change."""
    names: dict[str, None] = {}
    read: dict[str, None] = {}  # names of attributes that are read
    shared = ""
    held: dict[int, tuple[str, Any]] = {}  # plain objects, by id, and the attribute where each was found
    for name, x in itertools.chain.from_iterable(m.__dict__.items() for m in modules):
        if name not in _TABLES:
            _find_held(name, x, held, 0)
    ahead = list(map(inspect.unwrap, functions))
    for cls in dict.fromkeys(map(type, modules)):
        ahead.extend(_methods(cls))
    seen: set[types.CodeType] = set()  # only looked up
    while ahead:
        f = ahead.pop()
        f = getattr(f, "__func__", f)
        code = getattr(f, "__code__", None)
        if not isinstance(code, types.CodeType) or code in seen or not in_users_code(code, f.__globals__):
            continue
        seen.add(code)
        found, known = _found(code), _variables(f)
        names.update(found.names)
        read.update(found.methods)
        changed = (*found.rebound, *(x for x in found.shared if _may_hold(known.get(x))))
        shared = shared or (f"{changed[0]} ({f.__qualname__})" if changed else "")
        shared = shared or _changed_of_held(found.changed, held)
        ahead.extend(x for n in found.called if isinstance(x := known.get(n), types.FunctionType))
    return Changes(frozenset(names), shared or _changed_by_methods(read, held))


# What modules hold that can't be changed, or is looked at elsewhere; their tables of parameters and submodules.
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
)  # fmt: skip
_TABLES = tuple(torch.nn.Module().__dict__)
_DEPTH = 3  # of plain objects within plain objects
_ITEMS = 64  # of a container that are looked at
_KNOWN = (
    "torch", "fxbatch", "builtins", "numpy", "collections", "functools", "types", "enum", "random", "logging", "re",
)  # fmt: skip


def _find_held(name: str, x: Any, held: dict[int, tuple[str, Any]], depth: int) -> None:
    """Note plain objects of users' classes that an attribute leads to, through objects and containers."""
    if type(x) in _PLAIN or depth == _DEPTH or id(x) in held:
        return
    if isinstance(x, (list, tuple, dict, set, frozenset, deque)):
        for y in itertools.islice(x.values() if isinstance(x, dict) else x, _ITEMS):
            _find_held(name, y, held, depth + 1)
    elif not isinstance(x, (torch.nn.Module, type)) and (
        type(x) is types.SimpleNamespace or type(x).__module__.split(".")[0] not in _KNOWN
    ):
        held[id(x)] = name, x
        for inner, y in getattr(x, "__dict__", {}).items():
            _find_held(inner, y, held, depth + 1)


def _changed_of_held(changed: Iterable[tuple[str, str]], held: dict[int, tuple[str, Any]]) -> str:
    """The attribute of a plain object that `owner.name = ...` may set, or whose contents `owner.add(...)` changes."""
    for (owner, name), (at, x) in itertools.product(changed, held.values()):
        unknown = name and not owner  # where it was read from: any object with such an attribute
        if (name in getattr(x, "__dict__", ()) or hasattr(type(x), name)) if unknown else owner == at:
            return f"{type(x).__name__}.{name}" if name else f"{type(x).__name__} ({at})"
    return ""


def _changed_by_methods(read: Iterable[str], held: dict[int, tuple[str, Any]]) -> str:
    """The attribute of a plain object that one of its methods sets or changes, of those that may be called."""
    for cls in dict.fromkeys(type(x) for _, x in held.values()):
        ahead = [*read, "__call__", "__setitem__", "__iadd__"]
        seen: dict[str, None] = {}
        while ahead:
            name = ahead.pop()
            f = inspect.unwrap(x) if callable(x := getattr(cls, name, None)) else None
            if name in seen or not isinstance(f, types.FunctionType):
                continue
            seen[name] = None
            found = _found(f.__code__)
            for owner, changed in found.changed:
                return f"{cls.__name__}.{changed or owner} ({f.__qualname__})"
            ahead.extend(found.methods)
    return ""


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


# What a variable holds that can't change by itself; torch's modules are looked at by their attributes.
_FIXED = (
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type(None), bool, int, float, str, bytes, tuple,
    frozenset, torch.nn.Module, torch.Tensor,
)  # fmt: skip


def _may_hold(x: Any) -> bool:
    """Whether what a variable holds may change."""
    return not isinstance(x, _FIXED)


# With blocks

# What these hold is this thread's torch modes, which each instance has of its own, or nothing.
_OWN = (
    torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast,
    torch.autograd.profiler.record_function, contextlib.nullcontext, contextlib.suppress, decimal.localcontext,
    torch.nn.attention.sdpa_kernel, torch.overrides.TorchFunctionMode,
)  # fmt: skip


class _Manager(NamedTuple):
    """How the manager of a `with` is named: a variable ("" where that can't be told), and attributes of it."""

    root: str
    path: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _handlers(code: types.CodeType) -> tuple[tuple[int, int, int, _Manager | None], ...]:
    """(start, end, handler, manager where it is a `with`'s) of each protected range of instructions."""
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    place = {i.offset: k for k, i in enumerate(steps)}
    protected: Any = dis.Bytecode(code)  # whose table of exceptions typeshed does not know
    rows = [(x.start, x.end, x.target) for x in protected.exception_entries]
    first = {target: min(start for start, _, t in rows if t == target) for _, _, target in rows}

    def manager(target: int) -> _Manager | None:
        handles = steps[place[target] : place[target] + 2]
        return (
            _manager(steps, first[target]) if any(i.opname == "WITH_EXCEPT_START" for i in handles) else None
        )

    return tuple((start, end, target, manager(target)) for start, end, target in rows)


def _manager(steps: list[dis.Instruction], inside: int) -> _Manager:
    """The manager of the `with` whose body begins at an offset: its expression ends where it is entered."""
    enters = [
        i.opname == "BEFORE_WITH" or (i.opname == "LOAD_SPECIAL" and "exit" in i.argrepr) for i in steps
    ]
    entered = [k for k, i in enumerate(steps) if enters[k] and i.offset < inside]
    k = entered[-1] if entered else 0
    if steps[k].opname == "LOAD_SPECIAL":
        k -= 1  # behind a COPY of the manager
    named = _expression(steps, k)
    if named is None or steps[named.start].opname not in (*_FREE, "LOAD_FAST"):
        return _Manager("", ())
    path = itertools.takewhile(lambda i: i.opname in _LOADS_ATTRIBUTE, steps[named.start + 1 : k])
    return _Manager(str(steps[named.start].argval), tuple(str(i.argval) for i in path))


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


# By id of a code, whose hash reads its constants: it, whether it is the user's, and whether it may hold something. C
# walks the stack with it.
_frames: dict[int, tuple[types.CodeType, bool, bool]] = {}


def _known(frame: types.FrameType) -> tuple[types.CodeType, bool, bool]:
    code = frame.f_code
    found = _frames.get(id(code))
    if found is None:
        if len(_frames) >= 4096:
            _frames.clear()
        own = in_users_code(code, frame.f_globals)
        holds = own and ("acquire" in code.co_names or any(row[3] is not None for row in _handlers(code)))
        found = _frames[id(code)] = code, own, holds
    return found


def waiting_frame() -> tuple[types.FrameType | None, Callable[[], bool]]:
    """The innermost frame of the user's code, and what says whether it, or one further out, holds what all share."""
    found = None if _fast is None else _fast.waiting_frame(_frames)
    if found is not None:
        return found, lambda: False
    outer: types.FrameType | None = sys._getframe(0)
    while outer is not None:
        _known(outer)
        outer = outer.f_back
    frame = user_frame()
    return frame, functools.partial(holds_what_is_shared, frame)


def holds_what_is_shared(frame: types.FrameType | None) -> bool:
    """Whether a frame of the user's code, from this one outwards, is inside a `with` whose manager may hold what all
    instances share (a lock, a file, a global setting), or takes a lock itself."""
    while frame is not None:
        code, _, may_hold = _known(frame)
        if may_hold and (
            "acquire" in code.co_names
            or not all(_is_own(manager, frame) for manager in _entered(code, frame.f_lasti))
        ):
            return True
        frame = frame.f_back
    return False


def _is_own(manager: _Manager, frame: types.FrameType) -> bool:
    """Whether what is named so is one of torch's modes, or of what holds nothing."""
    variables = collections.ChainMap(frame.f_locals, frame.f_globals, vars(builtins))
    if manager.root not in variables:
        return False
    found = variables[manager.root]
    for attribute in manager.path:
        found = getattr(found, attribute, None)
    kind = found if isinstance(found, type) else type(found)
    return any(found is own or (isinstance(own, type) and issubclass(kind, own)) for own in _OWN)
