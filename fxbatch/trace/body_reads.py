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
import datetime
import decimal
import dis
import enum
import fractions
import functools
import gc
import hashlib
import io
import itertools
import pathlib
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
import torch

from fxbatch.torch_fakes import import_for_fakes
from fxbatch.trace.operations import BodyError
from fxbatch.trace.places import (
    CONTENT,
    IN_CELL,
    IN_DICT,
    IN_SLOT,
    IN_TYPE,
    MISSING,
    Item,
    copy_of,
    first_changed,
    found_in,
    holds_now,
    put,
    same,
    same_content,
)
from fxbatch.trace.table import ATOMS, ByIdentity, static_key

_MOST = 20_000  # objects looked at for one body
_BYTES = 65_536  # of a numpy array that is compared
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "greenlet", "networkx", "fxbatch", "torchgen",
    # What torch itself uses while it runs on fakes, and what watches tests.
    "typing_extensions", "sympy", "mpmath", "jinja2", "markupsafe", "filelock", "fsspec", "triton", "optree",
    "opt_einsum", "setuptools", "yaml", "coverage", "pytest", "_pytest", "pluggy", "xdist", "execnet", "pytest_timeout",
    "hypothesis",
    "torch_geometric",  # its `Data` objects are arguments, its layers are modules
}  # fmt: skip
_LIBRARIES -= {"__main__", "test", "this"}
VALUES = (
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    pathlib.PurePath, re.Pattern, range, uuid.UUID, np.dtype, np.generic, slice,
)  # fmt: skip
CODELESS = (
    BuiltinFunctionType, WrapperDescriptorType, MethodDescriptorType, MethodWrapperType, GetSetDescriptorType,
    MemberDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_CODE = (FunctionType, type, ModuleType, MethodType, property, staticmethod, classmethod, *CODELESS)
_PLAIN_BASES = (object, Generic, Protocol, SimpleNamespace)
_DYNAMIC = frozenset({"getattr", "hasattr", "vars", "dir", "__dict__", "attrgetter", "methodcaller"})
_UNKNOWABLE = frozenset({"globals", "locals", "eval", "exec", "__import__", "import_module"})
_IDENTITY = frozenset({"id", "hash", "type", "set", "frozenset", "__class__", "__dict__", "get", "index"})
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})  # a library's object, which holds data
_OWN = frozenset(torch.nn.Module().__dict__) | {"_flat_weights", "_flat_weight_refs", "_all_weights"}
_LEFT_OUT = frozenset({
    "__init_subclass__", "__class_getitem__", "__reduce__", "__repr__", "__str__", "__module__", "__dict__",
    "__weakref__", "__doc__", "__annotations__", "__qualname__",
})  # fmt: skip

Guards = tuple[Any, ...]  # dictionary, key, object it held; and again

# What has an effect that is seen outside, or reads what no key holds.
_EFFECTS: dict[Any, str] = {
    builtins.print: "prints", builtins.open: "opens a file", builtins.input: "asks for input",
    **{getattr(time, name): "reads the clock" for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
        "process_time_ns", "thread_time", "sleep", "localtime", "gmtime", "ctime", "strftime",
    )},
}  # fmt: skip


class CodeNames(NamedTuple):
    """What a function's code names, with the functions inside it."""

    globals: tuple[str, ...]
    attributes: frozenset[str]
    stored: frozenset[str]  # attributes that it sets
    written: tuple[str, ...]  # globals that it sets
    imports: tuple[str, ...]
    codes: tuple[CodeType, ...]  # itself and those inside it
    identity: bool  # whether it may ask which object something is: `x is y`, `x in known`, `id(x)`


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> CodeNames:
    """What some code names."""
    globals_: dict[str, None] = {}
    written: dict[str, None] = {}
    imports: dict[str, None] = {}
    attributes: set[str] = set()
    stored: set[str] = set()
    codes = [code]
    identity, before = False, ""
    for c in codes:
        codes.extend(x for x in c.co_consts if isinstance(x, CodeType))
        for instruction in dis.get_instructions(c):
            op, name = instruction.opname, instruction.argval
            identity |= op in ("CONTAINS_OP", "BUILD_SET", "SET_ADD") or (
                op == "IS_OP" and before != "LOAD_CONST"
            )
            before = op
            if op in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
                globals_[name] = None
                if op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    written[name] = None
            elif op == "IMPORT_NAME":
                imports[name] = None
            elif isinstance(name, str) and ("ATTR" in op or "METHOD" in op or op == "IMPORT_FROM"):
                attributes.add(name)
                if op in ("STORE_ATTR", "DELETE_ATTR"):
                    stored.add(name)
    identity = identity or not _IDENTITY.isdisjoint(attributes.union(globals_))
    return CodeNames(
        tuple(globals_), frozenset(attributes), frozenset(stored), tuple(written), tuple(imports), tuple(codes),
        identity,
    )  # fmt: skip


def is_library(module_name: Any) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


class Extra(NamedTuple):
    """Code that was seen to run, with its globals."""

    code: CodeType
    globals: dict[str, Any]


class BodyRoots(NamedTuple):
    module: torch.nn.Module | None
    method: str
    function: Any
    extra: tuple[Extra, ...]
    loose: bool = False  # real tensors and functions that keep results may be met: the body runs as it is
    given: tuple[type, ...] = ()  # classes of objects among its arguments, which are made elsewhere


START = frozenset({"forward", "__call__"})


def is_own(name: str) -> bool:
    """Whether an attribute of a module is the user's, not the bookkeeping of torch or fxbatch."""
    return name not in _OWN and not name.startswith("_fxbatch")


class Walk:
    """One walk over all that can be reached from a body by the names that its code has."""

    def __init__(self, roots: BodyRoots, names: frozenset[str], stored: frozenset[str]) -> None:
        self.look_for = names
        self.may_be_set = stored
        self.loose = roots.loose
        self.everything = bool(names & _DYNAMIC)
        self.names: set[str] = set()
        self.stored: set[str] = set()
        self.items: list[Item] = []
        self.codes: frozenset[CodeType] = frozenset()
        self.opaque = ""
        self._codes: set[CodeType] = set()
        self._memo: dict[int, int] = {}
        self._held: list[Any] = []  # so that ids stay theirs
        self._tree: set[int] = set()
        self._of_classes: dict[type, Any] = {}  # tokens of their members
        self._library = False  # whether what is looked at belongs to one of torch's modules
        self.key: Any = (*self._roots(roots), *self._of_classes.values())
        self.codes = frozenset(self._codes)

    def _roots(self, roots: BodyRoots) -> Iterator[Any]:
        if roots.module is not None:
            tree = list(roots.module.named_modules(remove_duplicate=False))
            self._tree = {id(m) for _, m in tree}
            for _, m in tree:
                self._members(type(m))
            for prefix, m in tree:
                yield prefix, self._own_module(m, f"self.{prefix}" if prefix else "self")
        if roots.function is not None:
            yield self.visit(roots.function, getattr(roots.function, "__qualname__", "function"))
        for kind in roots.given:
            self._members(kind, made=False)
        for code, globals_ in roots.extra:
            if code.co_freevars and code not in self._codes:
                self._cannot(code.co_qualname, "a function whose closure was not found")
            yield self._code(code, globals_, code.co_qualname)

    # What is found in a place

    def _place(self, kind: int, holder: Any, name: Any, value: Any, path: str, *, own: bool = False) -> Any:
        far = not isinstance(value, _CODE) and not own and not self._library
        self.items.append(Item(kind, holder, name, value, path, own, far))
        return None if value is MISSING else self.visit(value, path)

    def _content(self, container: Any, path: str) -> tuple[Any, ...]:
        copy = copy_of(container)
        if not isinstance(container, (tuple, frozenset)):
            self.items.append(Item(CONTENT, container, None, copy, path, False, not self._library))
        return copy

    def _cannot(self, path: str, why: str) -> Any:
        self.opaque = self.opaque or f"reads {path}, {why}"
        return "opaque"

    def visit(self, x: Any, path: str) -> Any:
        """The token of what was found: equal for what is equal to a body."""
        kind = type(x)
        if kind in ATOMS:
            return static_key(x)
        if self.opaque:
            return None
        if isinstance(x, (enum.Enum, *CODELESS)):
            bound = getattr(x, "__self__", None)
            if bound is not None and not isinstance(bound, (ModuleType, type)):
                return "bound", getattr(x, "__name__", ""), self.visit(bound, path)
            return ByIdentity(x)
        if isinstance(x, VALUES):
            return kind, repr(x) if isinstance(x, (slice, np.generic)) else x
        seen = self._memo.get(id(x))
        if seen is not None:
            return "seen", seen
        self._memo[id(x)] = len(self._memo)
        self._held.append(x)
        if len(self._memo) > _MOST:
            return self._cannot(path, "which holds too much to be compared")
        return self._structured(x, path)

    def _structured(self, x: Any, path: str) -> Any:
        if isinstance(x, FunctionType):
            return self._function(x, path)
        if isinstance(x, MethodType):
            return "method", self.visit(x.__func__, path), self.visit(x.__self__, path)
        if isinstance(x, type):
            self._members(x)
            return ByIdentity(x)
        if isinstance(x, ModuleType):
            return self._python_module(x, path)
        if isinstance(x, torch.nn.Module):
            if id(x) in self._tree:
                return "own module", ByIdentity(x)
            return self._cannot(path, "a module that is not its own")
        if isinstance(x, torch.Tensor):
            if self.loose:
                return ByIdentity(x)
            return self._cannot(path, "a tensor that is no parameter or buffer of its own")
        if isinstance(x, (property, staticmethod, classmethod, functools.cached_property)):
            return self._descriptor(x, path)
        if isinstance(x, functools.partial):
            return "partial", self.visit(x.func, path), self.visit(x.args, path), self.visit(x.keywords, path)
        if isinstance(x, (list, tuple, dict, set, frozenset, collections.deque, bytearray, MappingProxyType)):
            return self._container(x, path)
        if isinstance(x, np.ndarray):
            if x.dtype.hasobject or x.nbytes > _BYTES:
                return self._cannot(path, "an array too large to be compared")
            return np.ndarray, *self._content(x, path)
        if type(x).__name__ == "_lru_cache_wrapper":
            if self.loose:
                return self.visit(x.__wrapped__, path)
            return self._cannot(path, "a function that keeps its results")
        if hasattr(type(x), "__get__") and not is_transparent(type(x)):
            return ByIdentity(x)  # a descriptor in C: a field of a named tuple
        if not is_transparent(type(x)):
            return self._cannot(path, f"a {type(x).__qualname__}, which can't be compared")
        return self._attributes(x, path)

    def _descriptor(self, x: Any, path: str) -> Any:
        if isinstance(x, property):
            return "property", *(self.visit(f, path) for f in (x.fget, x.fset) if f is not None)
        return type(x).__name__, self.visit(x.func if hasattr(x, "func") else x.__func__, path)

    def _container(self, x: Any, path: str) -> Any:
        copy = self._content(x, path)
        kinds = set(map(type, copy))
        if kinds <= {int, str, bool, type(None)}:
            token: Any = (tuple(map(type, copy)), copy)
        elif isinstance(x, (set, frozenset)):
            token = frozenset(self.visit(y, f"{path} item") for y in copy)
        else:
            token = tuple(self.visit(y, f"{path}[{i}]") for i, y in enumerate(copy))
        if type(x).__module__ != "builtins" and not is_library(type(x).__module__):
            return self._attributes(x, path), token
        if isinstance(x, collections.defaultdict):
            return ByIdentity(type(x)), self.visit(x.default_factory, path), token
        return ByIdentity(type(x)), token

    # Code

    def _function(self, f: Any, path: str) -> Any:
        inner = getattr(f, "__wrapped__", None)
        if "__fxbatch__" in f.__dict__:  # decorated: what batches it is no part of what it does
            return "decorated", self.visit(inner, path)
        if is_library(f.__globals__.get("__name__")):
            wrapped = None if inner is None else self.visit(inner, path)
            closure = () if inner is None else self._closure(f, path)
            return "library", ByIdentity(f.__code__), wrapped, closure
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.items.append(Item(IN_SLOT, f, name, getattr(f, name), f"{path}.{name}", False, False))
        return (
            "function",
            ByIdentity(f.__code__),
            self.visit(f.__defaults__, f"{path}'s defaults"),
            self.visit(f.__kwdefaults__, f"{path}'s defaults"),
            self._closure(f, path),
            self._code(f.__code__, f.__globals__, path),
            self._named(f.__dict__, path) if f.__dict__ else (),
        )

    def _closure(self, f: Any, path: str) -> tuple[Any, ...]:
        tokens = []
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            value = holds_now(IN_CELL, cell, None)
            tokens.append((name, self._place(IN_CELL, cell, None, value, name)))
        return tuple(tokens)

    def _code(self, code: CodeType, globals_: dict[str, Any], path: str) -> Any:
        found = names_of(code)
        setuptools = globals_.get("__name__") == "_distutils_hack"  # its finder of imports
        if setuptools or code in self._codes:
            return ByIdentity(code)
        self._codes.update(found.codes)
        self.names |= found.attributes
        self.names |= _DYNAMIC.intersection(found.globals)
        self.stored |= found.stored
        unknowable = _UNKNOWABLE.intersection(found.globals)
        if unknowable:
            return self._cannot(f"names by {min(unknowable)}()", "which code can't tell beforehand")
        if "id" in found.globals:
            return self._cannot("id()", "which asks which object something is")
        environment = _ENVIRONMENT.intersection(found.globals) or _ENVIRONMENT & found.attributes
        if environment:
            return self._cannot(min(environment), "what the process is given from outside")
        tokens = []
        for name in found.globals:
            if name in globals_ or name in found.written:
                value = globals_.get(name, MISSING)
                tokens.append((name, self._place(IN_DICT, globals_, name, value, name)))
        for name in found.imports:
            module = sys.modules.get(name)
            if module is not None:
                tokens.append((name, self.visit(module, name)))
        return ByIdentity(code), tuple(tokens)

    def _python_module(self, x: ModuleType, path: str) -> Any:
        if is_library(x.__name__):
            return ByIdentity(x)
        return ByIdentity(x), self._named(x.__dict__, path)

    def _named(self, where: dict[str, Any], path: str) -> Any:
        """The attributes in a dictionary that some code names."""
        tokens = []
        for name in sorted(where if self.everything else self.look_for):
            if name in where:
                tokens.append((name, self._place(IN_DICT, where, name, where[name], f"{path}.{name}")))
            elif name in self.may_be_set:
                self._place(IN_DICT, where, name, MISSING, f"{path}.{name}")
        return tuple(tokens)

    # Objects, classes, modules

    def _members(self, kind: type, *, made: bool = True) -> None:
        """The methods and class attributes that code names, and the special methods of the user's classes. made:
        whether the body may make objects of the class."""
        if kind in self._of_classes:
            return
        self._of_classes[kind] = None
        is_module = issubclass(kind, torch.nn.Module)
        names = set(self.look_for)
        for c in kind.__mro__:
            if not is_library(c.__module__):
                names.update(
                    n for n, v in c.__dict__.items() if n[:2] == "__" and isinstance(v, FunctionType)
                )
                if issubclass(kind, torch.autograd.Function):
                    names.update(c.__dict__)
        names -= _LEFT_OUT
        tokens = []
        for name in sorted(names - {"__init__"} if is_module or not made else names):
            owner, value = found_in(kind, name)
            if owner is None or owner in _PLAIN_BASES or owner is torch.nn.Module:
                continue
            if not is_library(owner.__module__):
                tokens.append((name, self._place(IN_TYPE, kind, name, value, f"{kind.__name__}.{name}")))
            elif is_module:
                self._library_method(value)
                if name == "forward":
                    path = f"{kind.__name__}.forward"
                    self.items.append(Item(IN_TYPE, kind, name, value, path, False, False))
        self._of_classes[kind] = ByIdentity(kind), tuple(tokens)

    def _library_method(self, value: Any) -> None:
        """A method of one of torch's modules: it names attributes; what it calls is torch's."""
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            found = names_of(value.__code__)
            self._codes.update(found.codes)
            self.names |= found.attributes - _DYNAMIC

    def _own_module(self, m: torch.nn.Module, path: str) -> Any:
        """A module of the body's own tree: its class and the attributes that code names, but for its tensors."""
        kind, state = type(m), m.__dict__
        self._library = is_library(kind.__module__)
        everything = self.everything and not self._library
        names = [n for n in (state if everything else sorted(self.look_for)) if n in state and is_own(n)]
        tokens = [
            (n, self._place(IN_DICT, state, n, state[n], f"{path}.{n}", own=True))
            for n in names
            if not isinstance(state[n], torch.Tensor)
        ]
        for n in sorted(self.may_be_set - state.keys()) if not self._library else ():
            self.items.append(Item(IN_DICT, state, n, MISSING, f"{path}.{n}", True, False))
        self._library = False
        tensors = itertools.chain(m._parameters.values(), m._buffers.values(), state.values())
        owner = ByIdentity(m) if any(isinstance(t, torch.Tensor) for t in tensors) else None
        return ByIdentity(kind), owner, tuple(names) if everything else (), tuple(tokens)

    def _attributes(self, x: Any, path: str) -> Any:
        kind = type(x)
        self._members(kind)
        tokens: list[Any] = [ByIdentity(kind)]
        state = getattr(x, "__dict__", None)
        if isinstance(state, dict):
            tokens.append(self._named(state, path))
        for c in kind.__mro__:
            for name, slot in c.__dict__.items():
                if isinstance(slot, MemberDescriptorType) and (self.everything or name in self.look_for):
                    value = holds_now(IN_SLOT, x, name)
                    tokens.append((name, self._place(IN_SLOT, x, name, value, f"{path}.{name}")))
        return tuple(tokens)


@functools.lru_cache(maxsize=1024)
def _made_in_python(module_name: str) -> bool:
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__":
        return True
    return str(getattr(module, "__file__", "")).endswith((".py", ".pyc"))


def is_transparent(kind: type) -> bool:
    """Whether all state of a class's objects is in their attributes: no base is written in C."""
    for c in kind.__mro__:
        if c in _PLAIN_BASES or c in (list, tuple, dict, set, frozenset, collections.deque):
            continue
        if not c.__flags__ & (1 << 9) or not _made_in_python(c.__module__):
            return False
    return not (kind.__module__ == "functools" or issubclass(kind, (Iterator, io.IOBase)))


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

    def attributes(self) -> frozenset[str] | None:
        """The names of attributes that the body may read of an object; None where it may read all."""
        return None if self.names & _DYNAMIC else self.names

    def again(self, extra: Sequence[Extra] = ()) -> Reads:
        """The same body looked at again, as things are now. extra: more code that was seen to run."""
        return Reads(self.roots._replace(extra=(*self.roots.extra, *extra)), self.names, self.stored)

    def unchanged(self) -> bool:
        """Whether every place still holds what it held."""
        return first_changed(self.items) is None

    def guards(self) -> Guards | None:
        """What C compares at each call: places that user code may change between two calls without being seen.
        None where some of them are no items of dictionaries."""
        if any(x.far and x.kind != IN_DICT for x in self.items):
            return None
        return tuple([x for item in self.items if item.far for x in (item.holder, item.name, item.now())])

    def near(self) -> bool:
        """Whether those places hold what they held."""
        return all(x.holds() for x in self.items if x.far)

    def differs_from(self, other: Reads) -> str:
        """The name of the first place where another look found something else, "" if there is none."""
        before = {x.path: x for x in self.items}
        for item in other.items:
            was = before.get(item.path)
            alike = same_content if item.kind == CONTENT else same
            if was is None or was.kind != item.kind or not alike(was.value, item.value):
                return item.path
        return ""

    def changes(self) -> list[tuple[Item, Any]]:
        """The places that hold something else than they held, with what they hold now."""
        return [(x, x.now()) for x in self.items if not x.holds()]

    def restore(self, changed: Sequence[tuple[Item, Any]]) -> None:
        """Put back what places held."""
        for item, _ in reversed(changed):
            put(item, item.value)

    @contextlib.contextmanager
    def reinstated(self) -> Iterator[None]:
        """Everything that the body reads outside its own modules as it was when this was made."""
        differing = [(x, now) for x, now in self.changes() if not x.own]
        try:
            self.restore(differing)
            yield
        finally:
            for item, now in differing:
                put(item, now)

    def restoring(self, body: Callable[[], Any]) -> Any:
        """The result of a body; what it changes is put back."""
        try:
            return body()
        finally:
            self.restore(self.changes())

    def run(self, body: Callable[[], Any]) -> tuple[Any, Effects]:
        """Run a body, and what it did besides: what it changed is put back."""
        watch = _Watch(self.codes)
        try:
            result = watch.run(body)
        finally:
            changed = self.changes()
            self.restore(changed)
        what = changed[0][0].path if changed else ""
        return result, Effects(what, watch.effect, tuple(watch.unknown.values()))

    def lines(self) -> tuple[str, ...]:
        """The same as text that does not depend on the process: for traces that are kept."""
        return tuple(sorted({f"{x.path}: {_text(x)}" for x in self.items}))


class Effects(NamedTuple):
    """What a run did besides its result."""

    changed: str  # the name of something that it changed
    effect: str  # "prints"
    unknown: tuple[Extra, ...]  # code that had not been found


class _Watch:
    """Sees which of the user's code runs, and calls that have effects."""

    def __init__(self, known: frozenset[CodeType]) -> None:
        self.known = known
        self.unknown: dict[CodeType, Extra] = {}
        self.effect = ""
        self.finding: FrameType | None = None  # looks for a module, by code of editable installs perhaps

    def run(self, body: Callable[[], Any]) -> Any:
        import_for_fakes()  # slow while watched
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
        if self.finding is not None:
            self.finding = None if (frame, event) == (self.finding, "return") else self.finding
        elif event == "call":
            code = frame.f_code
            if code in self.known or code in self.unknown:
                return
            name = frame.f_globals.get("__name__", "")
            if is_library(name):
                if name.startswith("logging") and not self.effect and _by_user(frame.f_back):
                    self.effect = "logs"
                    raise BodyError("logs")
                if name == "importlib._bootstrap" and code.co_name == "_find_spec":
                    self.finding = frame
                return
            made = code.co_freevars or name.startswith("namedtuple_")  # by dataclasses, by named tuples
            if not (code.co_filename == "<string>" and made):
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
