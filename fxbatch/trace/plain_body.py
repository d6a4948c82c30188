"""Whether the body of a module or function is plain, found in its source; and the places that it reads.

In: a module, a function. Out: a Walk: its places, each with what it holds; or NotPlain with the reason.

    walk = Walk(Roots(module, "forward", None))
    walk.start()                     # NotPlain: calls print() (model.py:12)
    walk.items                       # places of numbers, functions and classes

A plain body is given tensors, numbers, strings, None and tuples of these. Its code reads these, tensors of its own
module, numbers (strings, None, dtypes, tuples of these) in attributes and globals, these of lists, and of
dictionaries and objects where it reads them by key and name, and calls functions of torch, math and operator, the
module's own parts, and users' functions for which the same holds. It stores to its own variables alone. Whatever else
it names makes it not plain: `plain_objects` lists what is right, not what is wrong. What it asks of a tensor, fake
tensors can answer: shape, type, device.

The code is walked as torch.jit.script walks it: the syntax tree, with the real objects that names stand for. A variable
stands for a set of such objects, or for DATA, which is everything computed; a container of the body's own for what is
in it. Data is called by the methods of tensors, strings and containers alone, so that what it is need not be known.
Both sides of a branch are walked, numbers never decide what is found; but of `if self.training`, the side that runs.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from fxbatch.torch_private import CACHED_PARAMETRIZATIONS, FAKE_ATTRIBUTES
from fxbatch.trace.places import IN_CELL, IN_DICT, IN_SLOT, IN_TYPE, ITEMS, MISSING, Item, found_in
from fxbatch.trace.plain_objects import (
    BUILTINS,
    CALLING,
    CODE,
    CONFIGURED,
    CONSTANTS,
    CONTAINERS,
    GIVING,
    GIVING_TENSORS,
    METHODS_OF_MODULES,
    NEVER_CALLED,
    OF_TENSORS,
    READING,
    REFUSED_METHODS,
    TYPES,
    is_in,
    is_library,
    is_looked_into,
    is_own,
    is_plain_tuple,
    is_settings,
    is_torchs_or_pythons,
    is_users,
    only_computes,
    package_of,
    unwrapped,
)
from fxbatch.trace.source import Function, names_of_arguments, stored_names, syntax_of, yields
from fxbatch.trace.state import plain_function
from fxbatch.trace.things import (
    COMPUTED,
    CONTEXT,
    DATA,
    NOTHING,
    Bound,
    Local,
    NotPlain,
    Parent,
    Roots,
    Row,
    Scope,
    Thing,
    Things,
)

ENTRIES = 64  # of a dictionary, and items of a list, that are compared
MODE = "training"  # the attribute of modules that decides which side of a branch is walked

# Statements and expressions of which all is said when their parts are evaluated.
_OF_PARTS = (
    ast.If, ast.While, ast.Assert, ast.Raise, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp, ast.List,
    ast.Set, ast.JoinedStr, ast.FormattedValue, ast.Dict, ast.IfExp, ast.UnaryOp, ast.Slice,
)  # fmt: skip


class Walk:
    """One walk through a body and all that it calls."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self.items: dict[tuple[int, int, object], Item] = {}
        self.names: set[str] = set()  # attributes of modules
        self.fields: set[str] = set()  # attributes of what is computed or given
        self.functions: dict[int, tuple[str, Function]] = {}  # their names and syntax trees
        self._calls: dict[object, Things | None] = {}
        self._names: dict[object, tuple[frozenset[str], frozenset[str]]] = {}  # `stored_names` of functions
        self._memo: dict[object, Thing] = {}
        self._recursive: set[object] = set()
        self._walked: set[object] = set()  # functions
        self._torchs: set[int] = set()
        self.settings: set[int] = set()  # lists, dictionaries and those of objects, of which entries are read
        self._line = ""
        self.tree = {} if roots.module is None else {
            id(m): f"self.{name}" if name else "self" for name, m in roots.module.named_modules()
        }  # fmt: skip

    def start(self) -> None:
        """Walk; NotPlain where the body is not."""
        try:
            self._start()
        except RecursionError:
            self.refuse("calls functions that call others more deeply than is looked into")

    def _start(self) -> None:
        module, method, function = self.roots.module, self.roots.method, self.roots.function
        if module is not None and function is None:
            owner = Thing(module, "self")
            if method == "forward":
                self._alone(self._module(owner, (DATA,), {}, spread=True))
            else:
                bound = self._attribute(frozenset({owner}), method)
                self._alone(self._call(bound, (DATA,), {}, spread=True))
        elif isinstance(function, type):
            self._custom_function(function)
        else:
            first = () if module is None else (frozenset({Thing(module, "self")}),)
            thing = Thing(function, getattr(function, "__qualname__", "function"))
            self._alone(self._call(frozenset({thing}), (*first, DATA), {}, spread=True))

    def refuse(self, reason: str) -> Things:
        """The body is not plain."""
        if not self.roots.loose:
            raise NotPlain(f"{reason}{self._line and f' ({self._line})'}")
        return DATA

    def _item(
        self, kind: int, holder: object, name: object, value: object, path: str, *, own: bool = False
    ) -> None:
        """Note a place. What holds functions is no place that code changes while it runs."""
        key = (kind, id(holder), name)
        if key not in self.items:
            far = not own and kind != IN_SLOT and not isinstance(value, CODE) and value is not MISSING
            self.items[key] = Item(kind, holder, name, value, path, own, far)

    def _once(self, key: object, make: Any, path: str) -> Thing:
        thing = self._memo.get(key)
        if thing is None:
            thing = self._memo[key] = Thing(make(), path)
        return thing

    def _part(self, m: torch.nn.Module, path: str) -> Things:
        """A module. One with methods that operators call would run them unseen."""
        for c in type(m).__mro__:
            if is_looked_into(c):
                for name, f in vars(c).items():
                    if name[:2] == "__" and name not in NEVER_CALLED and isinstance(f, FunctionType):
                        self.refuse(f"reads {path}, which has a {name} of its own")
        return frozenset({Thing(m, path)})

    def _bound(self, function: object, owner: Things, path: str) -> Things:
        return frozenset({self._once((id(function), owner), lambda: Bound(function, owner), path)})

    # What is found in places

    def _value(self, x: object, path: str) -> Things:
        """The Things that an object in a place is; refused where it may not be read."""
        x = plain_function(x)
        if isinstance(x, CONSTANTS) or x is MISSING:
            return DATA
        if isinstance(x, tuple) and type(x) is not torch.Size:
            return frozenset().union(DATA, *(self._value(y, f"{path}[{i}]") for i, y in enumerate(x)))
        if isinstance(x, torch.nn.Module):
            if id(x) in self.tree:
                return self._part(x, path)
            return self.refuse(f"reads {path}, a module that is not its own")
        if isinstance(x, torch.Tensor):
            return self.refuse(f"reads {path}, a tensor that is no parameter or buffer of its own")
        if isinstance(x, MethodType):
            return self._bound(x.__func__, self._value(x.__self__, path), path)
        if isinstance(x, (staticmethod, classmethod)):
            x = x.__func__
        if type(x).__name__ == "_lru_cache_wrapper":
            return self.refuse(f"calls {path}(), a function that keeps its results")
        if isinstance(x, (FunctionType, ModuleType, type, enum.Enum)) or is_torchs_or_pythons(x):
            return frozenset({Thing(x, path)})
        if type(x) is list and 0 < len(x) <= ENTRIES:
            self._note_entry(ITEMS, x, None, tuple(x), path)
            return frozenset({Thing(x, path)})
        if is_settings(x):
            return frozenset({Thing(x, path)})
        return self.refuse(f"reads {path}, a {type(x).__qualname__}, which can't be compared")

    def _alone(self, things: Things, *, lists: bool = False) -> Things:
        """These, of which more is asked than names and keys: refused for dictionaries and objects. lists: whether lists
        are read alone, all of which is compared; else they may be written to."""
        for thing in self._flat(things - DATA):
            if is_settings(thing.object) or (type(thing.object) is list and not lists):
                what = f"a {type(thing.object).__qualname__}, which can't be compared"
                self.refuse(f"reads {thing.path}, {what} as a whole")
        return things

    def _note_entry(self, kind: int, holder: object, name: object, value: object, path: str) -> None:
        self.settings.add(id(holder))
        self._item(kind, holder, name, value, path)

    def _entry(self, thing: Thing, key: object) -> Things:
        """An entry of a dictionary."""
        x, path = thing.object, f"{thing.path}[{key!r}]"
        value = x.get(key, MISSING)
        if value is MISSING:  # what comes later is not seen
            return self.refuse(f"reads {path}, which is not there")
        self._note_entry(IN_DICT, x, key, value, path)
        return self._value(value, thing.path)

    def _entries(self, thing: Thing, key: ast.expr) -> Things:
        """The entry of a dictionary that a text or number names, else any of a few."""
        if isinstance(key, ast.Constant):
            return self._entry(thing, key.value)
        x, path = thing.object, thing.path
        if len(x) > ENTRIES:
            return self.refuse(f"reads {path}, a dict, which has more than {ENTRIES} entries")
        if any(type(k) not in CONSTANTS and not issubclass(type(k), CODE) for k in x):
            return self.refuse(f"reads {path}, a dict, whose keys can't be compared")
        self._note_entry(ITEMS, x, None, tuple(x), path)
        return DATA.union(*(self._entry(thing, k) for k in x))

    def _name(self, name: str, scope: Scope) -> Things:
        s: Scope | None = scope
        while s is not None:
            if name in s.names[0]:
                return s.variables.get(name, NOTHING if s is scope else DATA)
            if s.around is None:
                break
            s = s.around
        assert s is not None
        if name in s.cells:
            cell = s.cells[name]
            try:
                value = cell.cell_contents
            except ValueError:
                value = MISSING
            if name == "__class__":
                return frozenset({Thing(value, name)})
            self._item(IN_CELL, cell, None, value, name)
            return self._value(value, name)
        value = s.globals.get(name, MISSING)
        self._item(IN_DICT, s.globals, name, value, name)
        if value is MISSING:
            value = getattr(builtins, name, MISSING)
        return self._value(value, name)

    def _attribute(self, base: Things, name: str) -> Things:
        out = NOTHING
        for thing in base:
            out |= self._attribute_of(thing, name)
        return out

    def _attribute_of(self, thing: Thing, name: str) -> Things:
        x, path = thing.object, f"{thing.path}.{name}"
        if thing == COMPUTED:
            return self._field(name)
        if thing == CONTEXT:
            return DATA
        if isinstance(x, torch.nn.Module):
            return self._of_module(x, name, path)
        if isinstance(x, Parent):
            if x.after not in (classes := type(x.module).__mro__):  # the method is another object's
                return self.refuse(f"reads {path}")
            rest = classes[classes.index(x.after) + 1 :]
            owner = next((c for c in rest if name in c.__dict__), None)
            if owner is None:
                return DATA
            return self._member(owner, name, owner.__dict__[name], frozenset({Thing(x.module, "self")}), path)
        if isinstance(x, ModuleType):
            if is_library(x.__name__):
                return self._value(getattr(x, name, MISSING), path)
            value = x.__dict__.get(name, MISSING)
            self._item(IN_DICT, x.__dict__, name, value, path)
            return self._value(value, path)
        if isinstance(x, enum.Enum):
            return DATA if name in ("value", "name") else self.refuse(f"reads {path}")
        if isinstance(x, type):
            return self._of_class(x, name, path)
        if is_torchs_or_pythons(x) and not isinstance(x, FunctionType):
            return self._value(getattr(x, name, MISSING), path)  # torch.ops.aten.add.Tensor
        if is_settings(x) and type(x) is not dict and not name.startswith("__"):
            return self._of_settings(x, name, path)
        return self.refuse(f"reads {path}")

    def _of_settings(self, x: object, name: str, path: str) -> Things:
        """An attribute of an object that is not a module."""
        cls, member = found_in(type(x), name)
        value = vars(x).get(name, MISSING)
        if cls is None or (value is not MISSING and not hasattr(type(member), "__set__")):
            if value is MISSING:  # what comes later is not seen
                return self.refuse(f"reads {path}, which is not there")
            self._note_entry(IN_DICT, vars(x), name, value, path)
            return self._value(value, path)
        if is_library(cls.__module__) or not isinstance(member, (FunctionType, property)):
            return self.refuse(f"reads {path}")
        return self._member(cls, name, member, frozenset({Thing(x, path.rpartition(".")[0])}), path)

    def _of_class(self, cls: type, name: str, path: str) -> Things:
        owner, member = found_in(cls, name)
        if owner is None:
            return DATA
        if is_library(owner.__module__):
            refused = owner is torch.Tensor and name in REFUSED_METHODS
            return self.refuse(f"reads {path}") if refused else self._value(getattr(cls, name), path)
        self._item(IN_TYPE, cls, name, member, path)
        if isinstance(member, classmethod):
            return self._bound(member.__func__, frozenset({Thing(cls, path)}), path)
        return self._value(member, path)

    def _of_module(self, m: torch.nn.Module, name: str, path: str) -> Things:
        self.names.add(name)
        kind, owner_thing = type(m), frozenset({Thing(m, path.rpartition(".")[0])})
        cls, member = found_in(kind, name)
        if isinstance(member, property):
            assert cls is not None
            return self._member(cls, name, member, owner_thing, path)
        state = m.__dict__
        if name == MODE:
            return DATA
        if name in state:
            value = state[name]
            if isinstance(value, torch.Tensor):
                return DATA
            self._item(IN_DICT, state, name, value, path, own=True)
            if not is_own(name):
                return self.refuse(f"reads {path}")
            return self._value(value, path)
        for table in ("_parameters", "_buffers"):
            if name in state[table]:
                return DATA
        if name in state["_modules"]:
            part = state["_modules"][name]
            return DATA if part is None else self._part(part, path)
        if cls is None:  # an attribute of the module that comes later is seen
            self._item(IN_TYPE, kind, name, MISSING, path)
            return DATA
        return self._member(cls, name, member, owner_thing, path)

    def _member(self, cls: type, name: str, member: object, owner: Things, path: str) -> Things:
        """An attribute of a class, asked of an object."""
        library = is_library(cls.__module__)
        if not library:
            self._item(IN_TYPE, cls, name, member, f"{cls.__name__}.{name}")
        if isinstance(member, property):
            if library:
                for thing in owner:
                    self._torch_module(thing)
                return DATA
            return self._call(self._value(member.fget, path), (owner,), {})
        if isinstance(member, classmethod):
            return self._bound(member.__func__, frozenset({Thing(cls, path)}), path)
        if isinstance(member, functools.cached_property):
            return self.refuse(f"reads {path}, which keeps its result")
        if isinstance(member, FunctionType) or (callable(member) and hasattr(member, "__get__") and library):
            return self._bound(member, owner, path)
        return self._value(member, path)

    def _field(self, name: str) -> Things:
        """An attribute of what is computed, or given."""
        self.fields.add(name)
        for cls in self.roots.classes:
            owner, member = found_in(cls, name)
            users = owner is not None and not is_library(owner.__module__)
            if users and not isinstance(member, MemberDescriptorType):
                return self._member(cls, name, member, DATA, name)
        refused = name in FAKE_ATTRIBUTES and name not in OF_TENSORS and (
            name in REFUSED_METHODS or not callable(getattr(torch.Tensor, name, None))
        )  # fmt: skip
        if refused or name.startswith("__"):
            return self.refuse(f"asks a tensor for its {name}")
        return DATA

    # Calls

    def _call(
        self, called: Things, args: Sequence[Things], kwargs: dict[str, Things], *, spread: bool = False
    ) -> Things:
        """spread: of the arguments, the last is that of all parameters that are left."""
        out = NOTHING
        for thing in called:
            out |= self._call_thing(thing, tuple(args), kwargs, spread)
        return out

    def _call_thing(
        self, thing: Thing, args: tuple[Things, ...], kwargs: dict[str, Things], spread: bool
    ) -> Things:
        x = thing.object
        if is_settings(x) or type(x) is list:
            return self.refuse(f"calls {thing.path}()")
        if not isinstance(x, (Bound, Local)) and not is_users(unwrapped(x)):
            reads = thing == COMPUTED or is_in(x, READING)
            self._alone(frozenset().union(*args, *kwargs.values()), lists=reads)
        if thing in (COMPUTED, CONTEXT):
            self._called_back(self._flat(frozenset().union(*args, *kwargs.values())), modules=False)
            return DATA
        if isinstance(x, Bound):
            function = unwrapped(x.function)
            if is_users(function):
                return self._function(function, (x.owner, *args), kwargs, spread, thing.path)
            return self._library_method(x, args)
        if isinstance(x, Local):
            around = x.scope
            return self._run(
                x.node, around, around.globals, around.cells, args, kwargs, spread, thing.path, x.defaults
            )
        if isinstance(x, torch.nn.Module):
            return self._module(thing, args, kwargs, spread=spread)
        x = unwrapped(x)
        if is_users(x):
            return self._function(x, args, kwargs, spread, thing.path)
        if isinstance(x, type) and not is_library(x.__module__):
            return self._new_object(x, thing.path)
        return self._library(x, args, kwargs, thing.path)

    def _library(self, f: object, args: tuple[Things, ...], kwargs: dict[str, Things], path: str) -> Things:
        """A call of a function or class of Python's, torch's or numpy's."""
        everything = self._flat(frozenset().union(*args, *kwargs.values()))
        if f is isinstance and len(args) == 2 and COMPUTED in args[0]:
            if any(t != COMPUTED and t.object not in TYPES for t in args[1]):
                return self.refuse("asks which class something is of")
        elif not only_computes(f):
            return self.refuse(f"calls {path}()")
        if f is enumerate and args:
            return self._row((DATA, self._items(args[0])))
        if f is zip:
            return self._row(tuple(map(self._items, args)))
        calls = is_in(f, CALLING)
        results = self._called_back(everything, modules=calls or not is_in(f, BUILTINS))
        return self._items(everything) | results if calls or is_in(f, GIVING) else DATA

    def _called_back(self, things: Things, *, modules: bool) -> Things:
        """The results of functions that are given to others: these may call them, with what is given besides."""
        results = DATA
        for thing in things:
            function = isinstance(thing.object, (FunctionType, Local, Bound))
            if function or (modules and isinstance(thing.object, torch.nn.Module)):
                results |= self._call_thing(thing, (things,), {}, True)
        return results

    def _flat(self, things: Things) -> Things:
        """These with the parts of tuples in place of the tuples."""
        rows = [t.object for t in things if isinstance(t.object, Row)]
        return frozenset(t for t in things if not isinstance(t.object, Row)).union(
            *(self._flat(part) for row in rows for part in row.parts)
        )

    def _row(self, parts: tuple[Things, ...]) -> Things:
        """A tuple of these."""
        if all(part <= DATA for part in parts):
            return DATA
        return frozenset({self._once(("row", parts), lambda: Row(parts), "a tuple")})

    def _items(self, things: Things) -> Things:
        """The items of any of these: the parts of containers of modules."""
        out = {t for t in self._alone(things, lists=True) if type(t.object) is not list}
        for thing in things:
            x: object = thing.object
            if type(x) is list:
                out = out.union(DATA, *(self._value(y, f"{thing.path}[{i}]") for i, y in enumerate(x)))
            if isinstance(x, (*CONTAINERS, torch.nn.ParameterList, torch.nn.ParameterDict)):
                parts = [(n, part) for n, part in x._modules.items() if part is not None]
                out = out.union(DATA, *(self._part(part, f"{thing.path}[{n!r}]") for n, part in parts))
            elif isinstance(x, (torch.nn.Module, type)):
                out.add(COMPUTED)
        return frozenset(out)

    def _library_method(self, x: Bound, args: tuple[Things, ...]) -> Things:
        """A method of a class of torch's."""
        name = x.function.__name__
        out = DATA
        self._alone(frozenset().union(x.owner, *args))
        for thing in x.owner:
            m = thing.object
            if not isinstance(m, torch.nn.Module):
                if isinstance(m, type) and issubclass(m, torch.autograd.Function):
                    return self.refuse(f"calls {thing.path}, whose backward is its own")
                continue
            if name == "_forward_unimplemented":  # of a list, each of whose modules may be meant: it raises
                continue
            cls, _ = found_in(type(m), name)
            plain = name in METHODS_OF_MODULES or name == "__call__"
            if (cls is torch.nn.Module or isinstance(m, CONTAINERS)) and not plain:
                return self.refuse(f"calls {name}() of a module")
            named = name == "items" or name.startswith("named_")
            if name in GIVING_TENSORS:
                out |= self._row((DATA, DATA)) if named else DATA
                continue
            if name in METHODS_OF_MODULES and name != "forward":
                below = [part for part in m.modules() if part is not m]
                parts = frozenset(Thing(part, self.tree.get(id(part), name)) for part in below)
                out |= self._row((DATA, parts)) if named else parts
            self._torch_module(thing)
        for thing in frozenset().union(*args):
            if isinstance(thing.object, torch.nn.Module):
                self._torch_module(thing)
        return out

    def _module(
        self, thing: Thing, args: Sequence[Things], kwargs: dict[str, Things], *, spread: bool = False
    ) -> Things:
        """A call of a module of its own."""
        m = thing.object
        for name in ("__call__", "forward"):
            if name == "forward" and name in m.__dict__:
                value, path = m.__dict__[name], f"{thing.path}.forward"
                self._item(IN_DICT, m.__dict__, name, value, path, own=True)
                return self._call(self._value(value, path), args, kwargs, spread=spread)
            cls, member = found_in(type(m), name)
            if cls is not None and is_looked_into(cls):
                bound = self._member(cls, name, member, frozenset({thing}), f"{thing.path}.{name}")
                return self._call(bound, args, kwargs, spread=spread)
        self._torch_module(thing)
        return DATA

    def _torch_module(self, thing: Thing) -> None:
        """A module that runs a library's code: it reads its attributes, and calls its parts."""
        m = thing.object
        if id(m) in self._torchs:
            return
        self._torchs.add(id(m))
        cls = type(m)
        self._item(IN_TYPE, cls, "forward", found_in(cls, "forward")[1], f"{cls.__name__}.forward")
        for name, value in m.__dict__.items():
            if is_own(name) and not isinstance(value, torch.Tensor):
                self.names.add(name)
                self._item(IN_DICT, m.__dict__, name, value, f"{thing.path}.{name}", own=True)
                self._configuration(value, f"{thing.path}.{name}")
                if isinstance(value, functools.partial) or is_users(getattr(value, "__func__", value)):
                    self._call(self._value(value, f"{thing.path}.{name}"), (DATA,), {}, spread=True)
        for c in cls.__mro__:
            if not is_looked_into(c):
                continue
            for name, member in c.__dict__.items():  # what torch's code may call in place of its own
                if isinstance(member, FunctionType) and name not in NEVER_CALLED:
                    self._item(IN_TYPE, cls, name, found_in(cls, name)[1], f"{cls.__name__}.{name}")
                    self._function(member, (frozenset({thing}), DATA), {}, True, f"{thing.path}.{name}")
        if torch.nn.utils.parametrize.is_parametrized(m):
            globals_, name = CACHED_PARAMETRIZATIONS
            self._item(IN_DICT, globals_, name, globals_[name], "parametrize.cached()")
            if globals_[name]:
                self.refuse("is parametrized, and what that gives is kept by parametrize.cached()")
        for name, part in m._modules.items():
            if part is not None:
                self._module(Thing(part, f"{thing.path}.{name}"), (DATA,), {}, spread=True)

    def _configuration(self, x: object, path: str) -> None:
        """What a module's configuration holds, and what is in that: all of it may be read."""
        if (package := package_of(x)) in CONFIGURED:
            space, name = vars(sys.modules[package]), "__version__"
            self._item(IN_DICT, space, name, space.get(name, MISSING), f"{package}.{name}")
            x = vars(x)
        if type(x) is dict and id(x) not in self._torchs:
            self._torchs.add(id(x))
            for name, value in x.items():
                self._item(IN_DICT, x, name, value, f"{path}.{name}")
                self._configuration(value, f"{path}.{name}")

    def _new_object(self, cls: type, path: str) -> Things:
        if is_plain_tuple(cls) or issubclass(cls, BaseException):
            return DATA
        return self.refuse(f"makes a {path}")

    def _custom_function(self, cls: type) -> None:
        """A torch.autograd.Function, or another class that is called."""
        if not issubclass(cls, torch.autograd.Function):
            self._call(frozenset({Thing(cls, cls.__name__)}), (DATA,), {}, spread=True)
            return
        for name in ("forward", "backward", "setup_context", "vjp", "jvp", "vmap"):
            owner, member = found_in(cls, name)
            if owner is not None and not is_library(owner.__module__):
                self._item(IN_TYPE, cls, name, member, f"{cls.__name__}.{name}")
                function = getattr(member, "__func__", member)
                first = () if name == "forward" else (frozenset({CONTEXT}),)
                if isinstance(function, FunctionType):
                    self._function(function, (*first, DATA), {}, True, f"{cls.__name__}.{name}")

    def _function(
        self, f: FunctionType, args: tuple[Things, ...], kwargs: dict[str, Things], spread: bool, path: str
    ) -> Things:
        """A call of a user's function."""
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._item(IN_SLOT, f, name, getattr(f, name), f"{path}.{name}")
        node = syntax_of(f)
        if node is None:
            return self.refuse(f"calls {path}(), whose source can't be had")
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        last = zip(reversed(names), reversed(f.__defaults__ or ()), strict=False)
        defaults = {**dict(last), **(f.__kwdefaults__ or {})}
        things = {name: self._default(value, f"the default of {name}") for name, value in defaults.items()}
        self.functions[id(node)] = f.__qualname__, node
        return self._run(node, None, f.__globals__, cells, args, kwargs, spread, path, things)

    def _default(self, value: object, path: str) -> Things | str:
        try:
            return self._value(value, path)
        except NotPlain as error:
            return str(error)

    def _run(
        self,
        node: Function,
        around: Scope | None,
        globals_: dict[str, object],
        cells: dict[str, Any],
        args: tuple[Things, ...],
        kwargs: dict[str, Things],
        spread: bool,
        path: str,
        defaults: Mapping[str, Things | str] | None = None,
    ) -> Things:
        if node not in self._names:
            self._names[node] = stored_names(node)
        names = self._names[node]
        variables = self._parameters(node, names[0], args, kwargs, spread, defaults)
        outside = () if around is None else tuple(around.variables.items())
        key = (id(node), id(around), outside, tuple(map(id, cells.values())), tuple(variables.items()))
        if key in self._calls:
            result = self._calls[key]
            if result is None:  # it calls itself
                self._recursive.add(key)
                return DATA
            return result
        if self.roots.loose:  # each function once, with each of the modules that it is given
            modules = [t for x in variables.values() for t in x if isinstance(t.object, torch.nn.Module)]
            if (once := (node, frozenset(modules))) in self._walked:
                return DATA
            self._walked.add(once)
        self._calls[key] = None
        scope = Scope(node, globals_, cells, around, names, variables)
        line = self._line
        body = node.body
        if not isinstance(body, list):  # of a lambda
            body = [ast.Return(body, lineno=node.lineno, col_offset=0)]
        if isinstance(node, ast.FunctionDef) and any(yields(s) for s in body):
            return self.refuse(f"calls {path}(), a generator")
        while True:
            before = dict(scope.variables), scope.results
            self._statements(body, scope)
            if before == (scope.variables, scope.results):
                break
        self._line = line
        result = self._calls[key] = scope.results | DATA
        if key in self._recursive and result != DATA:
            self.refuse(f"calls {path}(), which calls itself")
        return result

    def _parameters(
        self, node: Function, stored: frozenset[str], args: tuple[Things, ...], kwargs: dict[str, Things], spread: bool,
        defaults: Mapping[str, Things | str] | None,
    ) -> dict[str, Things]:  # fmt: skip
        a = node.args
        names = [x.arg for x in (*a.posonlyargs, *a.args)]
        rest = args[-1] if spread and args else NOTHING
        variables = {**dict(zip(names, args[:-1] if spread else args, strict=False)), **kwargs}
        more: Things = frozenset().union(
            DATA, *args[len(names) :], *(v for k, v in kwargs.items() if k not in names)
        )
        for x in (a.vararg, a.kwarg):
            if x is not None:
                variables[x.arg] = more | rest
        for x in (*a.posonlyargs, *a.args, *a.kwonlyargs):
            if x.arg not in variables:
                default = (defaults or {}).get(x.arg, NOTHING)
                default = self.refuse(default) if isinstance(default, str) else default
                variables[x.arg] = (rest | default) or DATA
        return {name: v for name, v in variables.items() if name in stored}

    # Statements

    def _statements(self, statements: Iterable[Any], scope: Scope) -> None:
        for s in statements:
            name = scope.globals.get("__name__", "")
            self._line = f"{os.path.basename(str(scope.globals.get('__file__', name)))}:{s.lineno}"
            mode = self._mode(s.test, scope) if isinstance(s, ast.If) else None
            if mode is None:
                self._statement(s, scope)
                continue
            side = s.body if mode else s.orelse
            self._statements(side, scope)
            if side and isinstance(side[-1], (ast.Return, ast.Raise)):
                return  # what follows never runs

    def _mode(self, test: ast.expr, scope: Scope) -> bool | None:
        """What `self.training` or `not self.training` is now, of a module of its own; None of another condition."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            mode = self._mode(test.operand, scope)
            return None if mode is None else not mode
        if not isinstance(test, ast.Attribute) or test.attr != MODE:
            return None
        things = self.eval(test.value, scope)
        thing = next(iter(things)) if len(things) == 1 else COMPUTED
        m = thing.object
        if not isinstance(m, torch.nn.Module) or id(m) not in self.tree or MODE not in m.__dict__:
            return None
        if found_in(type(m), MODE)[0] is not None:
            return None
        self.names.add(MODE)
        self._item(IN_DICT, m.__dict__, MODE, m.training, f"{thing.path}.{MODE}", own=True)
        return bool(m.training)

    def _statement(self, s: Any, scope: Scope) -> None:
        match s:
            case ast.Return():
                scope.results |= DATA if s.value is None else self.eval(s.value, scope)
            case ast.Assign():
                value = self.eval(s.value, scope)
                for target in s.targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign():
                if s.value is not None:
                    self._assign(s.target, self.eval(s.value, scope), scope)
            case ast.AugAssign():
                value = self.eval(s.value, scope)
                if isinstance(s.target, ast.Name):
                    value |= self._name(s.target.id, scope)
                self._assign(s.target, self._alone(value), scope)
            case ast.For():
                self._assign(s.target, self._each(s.iter, scope), scope)
                self._statements(s.body, scope)
                self._statements(s.orelse, scope)
            case ast.With():
                for item in s.items:
                    value = self._alone(self.eval(item.context_expr, scope))
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value, scope)
                self._statements(s.body, scope)
            case ast.FunctionDef():
                if s.decorator_list:
                    self.refuse(f"defines {s.name}() with a decorator")
                things = scope.variables.get(s.name, NOTHING)
                scope.variables[s.name] = things | self._local(s, s.name, scope)
            case ast.Delete():
                for target in s.targets:
                    if not isinstance(target, ast.Name):
                        self._assign(target, DATA, scope)
            case ast.Global() | ast.Nonlocal():
                self.refuse(f"may change {', '.join(s.names)}, which is not its own")
            case _:
                if not isinstance(s, _OF_PARTS):
                    self.refuse(f"has a statement that is not looked into: {type(s).__name__.lower()}")
                for part in ast.iter_child_nodes(s):
                    if isinstance(part, ast.stmt):
                        self._statements([part], scope)
                    elif isinstance(part, ast.expr):
                        self._alone(self.eval(part, scope), lists=True)
                    elif isinstance(part, ast.ExceptHandler):
                        self._statements(part.body, scope)

    def _assign(self, target: Any, value: Things, scope: Scope) -> None:
        match target:
            case ast.Name():
                if target.id in scope.names[0]:
                    scope.variables[target.id] = scope.variables.get(target.id, NOTHING) | value
                elif scope.around is None or target.id in scope.names[1]:
                    self.refuse(f"changes {target.id}, which is not its own")
            case ast.Tuple() | ast.List():
                for i, part in enumerate(target.elts):
                    self._assign(part, self._parts(value, i, len(target.elts)), scope)
            case ast.Starred():
                self._assign(target.value, value, scope)
            case ast.Attribute():
                base = self.eval(target.value, scope)
                if base != {CONTEXT}:
                    self.refuse(f"sets {ast.unparse(target)}")
            case ast.Subscript():
                whole = target.value
                base = self._alone(self.eval(whole, scope))
                self._alone(self.eval(target.slice, scope) | value)
                holder = self.eval(whole.value, scope) if isinstance(whole, ast.Attribute) else DATA
                if holder != DATA or not base <= DATA:
                    self.refuse(f"writes to {ast.unparse(whole)}")
                if not value <= DATA:
                    self.refuse(f"puts {_paths(value)} into {ast.unparse(whole)}")
            case _:
                self.refuse(f"sets {ast.unparse(target)}")

    def _parts(self, things: Things, i: int, n: int) -> Things:
        """The i-th of n parts that any of these is unpacked to."""
        out = NOTHING
        for thing in things:
            x = thing.object
            if isinstance(x, Row):
                out |= x.parts[i] if len(x.parts) == n else frozenset().union(*x.parts)
            else:
                out |= self._items(frozenset({thing}))
        return out

    # Expressions

    def eval(self, e: Any, scope: Scope) -> Things:
        """The Things that an expression may stand for."""
        match e:
            case ast.Constant():
                return DATA
            case ast.Name():
                return self._name(e.id, scope)
            case ast.Attribute():
                return self._attribute(self.eval(e.value, scope), e.attr)
            case ast.Call():
                return self._call_expression(e, scope)
            case ast.Subscript():
                self._alone(self.eval(e.slice, scope))
                base = self.eval(e.value, scope)
                dictionaries = frozenset(t for t in base if type(t.object) is dict)
                entries = [self._entries(t, e.slice) for t in dictionaries]
                return self._parts(base - dictionaries, 0, -1).union(*entries)
            case ast.Compare():
                self._compare(e, scope)
                return DATA
            case ast.Tuple():
                return self._row(tuple(self.eval(part, scope) for part in e.elts))
            case ast.BinOp():
                both = self._alone(self.eval(e.left, scope) | self.eval(e.right, scope), lists=True)
                both = self._items(both) if any(type(t.object) is list for t in both) else both
                return both | DATA if isinstance(e.op, ast.Add) else DATA  # of lists of modules
            case ast.Starred():
                return self._items(self.eval(e.value, scope))
            case ast.NamedExpr():
                value = self.eval(e.value, scope)
                self._assign(e.target, value, scope)
                return value
            case ast.Lambda():
                return self._local(e, "lambda", scope)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for g in e.generators:
                    self._assign(g.target, self._each(g.iter, scope), scope)
                    for test in g.ifs:
                        self._alone(self.eval(test, scope), lists=True)
                parts = (e.key, e.value) if isinstance(e, ast.DictComp) else (e.elt,)
                return self._alone(DATA.union(*(self.eval(part, scope) for part in parts)))
        if not isinstance(e, _OF_PARTS):
            self.refuse(f"has an expression that is not looked into: {type(e).__name__.lower()}")
        inside = [self.eval(x, scope) for x in ast.iter_child_nodes(e) if isinstance(x, ast.expr)]
        return self._alone(DATA.union(*inside), lists=not isinstance(e, (ast.List, ast.Set, ast.Dict)))

    def _each(self, e: ast.expr, scope: Scope) -> Things:
        """What a loop over this goes through."""
        parts = e.elts if isinstance(e, ast.Tuple) else ()
        return (
            DATA.union(*(self.eval(x, scope) for x in parts)) if parts else self._items(self.eval(e, scope))
        )

    def _local(self, node: Function, name: str, scope: Scope) -> Things:
        """A function that the body defines."""
        a = node.args
        names = [x.arg for x in (*a.posonlyargs, *a.args)]
        last = (
            *zip(reversed(names), reversed(a.defaults), strict=False),
            *zip([x.arg for x in a.kwonlyargs], a.kw_defaults, strict=True),
        )
        defaults = {name: self.eval(default, scope) for name, default in last if default is not None}
        thing = self._once((id(node), id(scope.node)), lambda: Local(node, scope), name)
        thing.object.defaults = {n: thing.object.defaults.get(n, NOTHING) | v for n, v in defaults.items()}
        return frozenset({thing})

    def _compare(self, e: ast.Compare, scope: Scope) -> None:
        sides = [e.left, *e.comparators]
        things = [self.eval(side, scope) for side in sides]
        for i, op in enumerate(e.ops):
            if not isinstance(op, (ast.Is, ast.IsNot)):
                self._alone(things[i] | things[i + 1], lists=True)
            asks = isinstance(op, (ast.Is, ast.IsNot)) and not any(map(_is_none, sides[i : i + 2]))
            if asks and COMPUTED in things[i] | things[i + 1]:  # else of functions, classes, modules
                self.refuse("asks whether two things are one object")

    def _call_expression(self, e: ast.Call, scope: Scope) -> Things:
        args = [self.eval(a, scope) for a in e.args]
        kwargs = [(k.arg, self.eval(k.value, scope)) for k in e.keywords]
        named = {k: v for k, v in kwargs if k is not None}
        if isinstance(e.func, ast.Name):
            special = self._special_call(e, e.func.id, args, scope)
            if special is not None:
                return special
        if isinstance(e.func, ast.Attribute) and e.func.attr == "get" and 0 < len(args) < 3 and not kwargs:
            asked = self.eval(e.func.value, scope)
            if isinstance(e.args[0], ast.Constant) and asked and all(type(t.object) is dict for t in asked):
                return DATA.union(*args[1:], *(self._entries(t, e.args[0]) for t in asked))
        called = self.eval(e.func, scope)
        if isinstance(e.func, ast.Attribute) and called == DATA:  # a list of the body's own may keep them
            every: Things = frozenset().union(*args, *named.values())
            if not hasattr(torch.Tensor, e.func.attr):
                self._alone(every)
            code = frozenset(t for t in every - DATA if not isinstance(t.object, (type, list)))
            if code:
                self.refuse(f"gives {_paths(code)} to {ast.unparse(e.func)}()")
        if any(isinstance(a, ast.Starred) for a in e.args) or any(k is None for k, _ in kwargs):
            everything: Things = self._alone(frozenset().union(DATA, *args, *(v for _, v in kwargs)))
            first = next((i for i, a in enumerate(e.args) if isinstance(a, ast.Starred)), len(args))
            return self._call(called, (*args[:first], everything), named, spread=True)
        return self._call(called, args, named)

    def _special_call(self, e: ast.Call, name: str, args: list[Things], scope: Scope) -> Things | None:
        if self._name(name, scope) != {Thing(getattr(builtins, name, None))}:
            return None
        if name == "super" and not args:
            return self._parent(scope)
        if name in ("hasattr", "getattr"):
            begins, whole = self._text(e.args[1] if len(e.args) > 1 else None, scope)
            if whole and args[0] == DATA and (self.roots.classes or self.roots.loose):
                return self._field(begins) | frozenset().union(*args[2:])
            modules = [t.object for t in args[0] if isinstance(t.object, torch.nn.Module)]
            if COMPUTED not in args[0] and begins and (whole or len(modules) == len(args[0])):
                every = {n for m in modules for n in torch.nn.Module.__dir__(m) if n.startswith(begins)}
                read = [self._attribute(args[0], n) for n in ([begins] if whole else sorted(every))]
                return DATA if name == "hasattr" else NOTHING.union(*read, *args[2:]) or DATA
        return None

    def _text(self, e: ast.expr | None, scope: Scope) -> tuple[str, bool]:
        """What a text that is computed begins with, "" where that isn't known, and whether that is all of it."""
        match e:
            case ast.Constant(value=str(text)):
                return text, True
            case ast.Attribute():
                held = [getattr(t.object, "__dict__", {}).get(e.attr) for t in self.eval(e.value, scope)]
                return (str(held[0]), True) if [*map(type, held)] == [str] else ("", False)
            case ast.JoinedStr(values=[ast.expr() as first, *_]):
                return self._text(first, scope)[0], False
            case ast.BinOp(left=first, op=ast.Add() | ast.Mod()):
                return self._text(first, scope)[0].partition("%")[0], False
            case ast.Call(func=ast.Attribute(value=first, attr="format")):
                return self._text(first, scope)[0].partition("{")[0], False
        return "", False

    def _parent(self, scope: Scope) -> Things:
        s = scope
        while s.around is not None:
            s = s.around
        first = next(iter(names_of_arguments(s.node.args)), "")
        cell = s.cells.get("__class__")
        owners = s.variables.get(first, NOTHING)
        if cell is None or any(not isinstance(t.object, torch.nn.Module) for t in owners - DATA):
            return self.refuse("calls super()")
        cls = cell.cell_contents
        return frozenset(
            self._once(("super", id(cls), id(t.object)), functools.partial(Parent, cls, t.object), "super()")
            for t in owners - DATA
        )


def _paths(things: Things) -> str:
    """What these are called, of those that are not computed."""
    return ", ".join(sorted(t.path for t in things - DATA))


def _is_none(e: object) -> bool:
    return isinstance(e, ast.Constant) and (e.value is None or e.value is Ellipsis or type(e.value) is bool)
