"""What can be reached from a body by the names that its code has: places, and what they hold.

In: a module or a function, and the names of attributes to look for. Out: a Walk: the places as Items, a key of their
contents, and why something can't be compared.

    walk = Walk(BodyRoots(module, "forward", None, ()), names, stored)
    walk.items                       # IN_DICT self.scale = 2.0, ...
"""

from __future__ import annotations

import collections
import datetime
import decimal
import dis
import enum
import fractions
import functools
import io
import itertools
import pathlib
import re
import sys
import uuid
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
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

from fxbatch.trace.columns import ExtensionSwitch, _fast
from fxbatch.trace.table import ATOMS, ByIdentity, static_key

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

_MOST = 20_000  # objects looked at for one body
_BYTES = 65_536  # of a numpy array that is compared
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "greenlet", "networkx", "fxbatch", "torchgen",
    # What torch itself uses while it runs on fakes, and what watches tests.
    "typing_extensions", "sympy", "mpmath", "jinja2", "markupsafe", "filelock", "fsspec", "triton", "optree",
    "opt_einsum", "setuptools", "yaml", "coverage", "pytest", "_pytest", "pluggy", "xdist", "execnet", "pytest_timeout",
    "hypothesis",
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
_PLAIN_BASES = (object, Generic, Protocol, SimpleNamespace)
_DYNAMIC = frozenset({"getattr", "hasattr", "vars", "dir", "__dict__", "attrgetter", "methodcaller"})
_UNKNOWABLE = frozenset({"globals", "locals", "eval", "exec", "__import__", "import_module"})
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})  # a library's object, which holds data
_OWN = frozenset(torch.nn.Module().__dict__) | {"_flat_weights", "_flat_weight_refs", "_all_weights"}
_LEFT_OUT = frozenset({
    "__init_subclass__", "__class_getitem__", "__reduce__", "__repr__", "__str__", "__module__", "__dict__",
    "__weakref__", "__doc__", "__annotations__", "__qualname__",
})  # fmt: skip
IN_DICT, IN_TYPE, IN_CELL, IN_SLOT, CONTENT = range(5)


class Item(NamedTuple):
    """One place that a body reads, and what was there."""

    kind: int
    holder: Any  # a dict, a class, a cell, an object with slots, a container
    name: Any
    value: Any  # of CONTENT: a copy of what the container holds
    path: str
    own: bool  # an attribute of a module of the body's own tree: seen when it is set
    far: bool  # data that the user's code may change between two calls, unseen


class CodeNames(NamedTuple):
    """What a function's code names, with the functions inside it."""

    globals: tuple[str, ...]
    attributes: frozenset[str]
    stored: frozenset[str]  # attributes that it sets
    written: tuple[str, ...]  # globals that it sets
    imports: tuple[str, ...]
    codes: tuple[CodeType, ...]  # itself and those inside it


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> CodeNames:
    """What some code names."""
    globals_: dict[str, None] = {}
    written: dict[str, None] = {}
    imports: dict[str, None] = {}
    attributes: set[str] = set()
    stored: set[str] = set()
    codes = [code]
    for c in codes:
        codes.extend(x for x in c.co_consts if isinstance(x, CodeType))
        for instruction in dis.get_instructions(c):
            op, name = instruction.opname, instruction.argval
            if op in ("LOAD_GLOBAL", "LOAD_NAME"):
                globals_[name] = None
            elif op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                globals_[name] = written[name] = None
            elif op == "IMPORT_NAME":
                imports[name] = None
            elif isinstance(name, str) and ("ATTR" in op or "METHOD" in op or op == "IMPORT_FROM"):
                attributes.add(name)
                if op in ("STORE_ATTR", "DELETE_ATTR"):
                    stored.add(name)
    return CodeNames(
        tuple(globals_),
        frozenset(attributes),
        frozenset(stored),
        tuple(written),
        tuple(imports),
        tuple(codes),
    )


def is_library(module_name: Any) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


def found_in(kind: type, name: str) -> tuple[type | None, Any]:
    """The class of a type's bases that has an attribute, and what it has; (None, MISSING) for none."""
    for c in kind.__mro__:
        if name in c.__dict__:
            return c, c.__dict__[name]
    return None, MISSING


def holds_now(kind: int, holder: Any, name: Any) -> Any:
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
    return copy_of(holder)


def first_other(items: list[Item], start: int) -> int:
    """The first place from `start` on that may hold another object than it held, their number if there is none: what C
    has not found to be the same is to be looked at."""
    return _fast.first_other(items, start, MISSING) if ExtensionSwitch.on else start


def copy_of(container: Any) -> tuple[Any, ...]:
    if isinstance(container, np.ndarray):
        return container.dtype, container.shape, container.tobytes()
    if isinstance(container, (dict, MappingProxyType)):
        return (*container.keys(), *container.values())
    return tuple(container)


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
        for code, globals_ in roots.extra:
            if code.co_freevars and code not in self._codes:
                self._cannot(code.co_qualname, "a function whose closure was not found")
            yield self._code(code, globals_, code.co_qualname)

    # What is found in a place

    def _place(self, kind: int, holder: Any, name: Any, value: Any, path: str, *, own: bool = False) -> Any:
        data = not isinstance(
            value,
            (FunctionType, type, ModuleType, MethodType, property, staticmethod, classmethod, *CODELESS),
        )
        far = data and not own and not self._library
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
        if hasattr(type(x), "__get__") and not _transparent(type(x)):
            return ByIdentity(x)  # a descriptor in C: a field of a named tuple
        return self._object(x, path)

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
        if is_library(f.__globals__.get("__name__")):
            wrapped = None if inner is None else self.visit(inner, path)
            return (
                "library",
                ByIdentity(f.__code__),
                wrapped,
                self._closure(f, path) if inner is not None else (),
            )
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
        if (
            code in self._codes or globals_.get("__name__") == "_distutils_hack"
        ):  # setuptools' finder of imports
            return ByIdentity(code)
        self._codes.update(found.codes)
        self.names |= found.attributes
        self.names |= _DYNAMIC.intersection(found.globals)
        self.stored |= found.stored
        unknowable = _UNKNOWABLE.intersection(found.globals)
        if unknowable:
            return self._cannot(f"names by {min(unknowable)}()", "which code can't tell beforehand")
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

    def _members(self, kind: type) -> None:
        """The methods and class attributes that code names, and the special methods of the user's classes."""
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
        for name in sorted(names - {"__init__"} if is_module else names):
            owner, value = found_in(kind, name)
            if owner is None or owner in _PLAIN_BASES or owner is torch.nn.Module:
                continue
            if not is_library(owner.__module__):
                tokens.append((name, self._place(IN_TYPE, kind, name, value, f"{kind.__name__}.{name}")))
            elif is_module:
                self._library_method(value)
                if name == "forward":
                    self.items.append(
                        Item(IN_TYPE, kind, name, value, f"{kind.__name__}.forward", False, False)
                    )
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

    def _object(self, x: Any, path: str) -> Any:
        kind = type(x)
        if not _transparent(kind):
            return self._cannot(path, f"a {kind.__qualname__}, which can't be compared")
        return self._attributes(x, path)

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


def _transparent(kind: type) -> bool:
    """Whether all state of a class's objects is in their attributes: no base is written in C."""
    for c in kind.__mro__:
        if c in _PLAIN_BASES or c in (list, tuple, dict, set, frozenset, collections.deque):
            continue
        if not c.__flags__ & (1 << 9) or not _made_in_python(c.__module__):
            return False
    return not (kind.__module__ == "functools" or issubclass(kind, (Iterator, io.IOBase)))
