"""Which objects the code of a plain body may name and call, and which arguments it may be given.

In: a function, a class, a module of Python's, a call's arguments. Out: whether it gives a result and does nothing else.

    only_computes(torch.tanh)                        # True
    only_computes(print)                             # False
    why_not_plain(({"h": value},), {})                # "takes a dict, which it may change"
"""

from __future__ import annotations

import argparse
import builtins
import enum
import functools
import math
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fxbatch.trace.operations import IN_C
from fxbatch.trace.state import plain_function
from fxbatch.trace.table import ATOMS

# Packages whose functions and layers give a result and do nothing else. PyG's `Data` objects are arguments.
_COMPUTE = frozenset({"torch_geometric", "einops"})
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__", "test", "this"} | {
    "torch", "numpy", "greenlet", "networkx", "fxbatch", *_COMPUTE,
}  # fmt: skip
# Packages whose modules are taken as torch's own are: what they do depends on what they and their configuration hold.
CONFIGURED = frozenset({"transformers"})
_OWN = frozenset(torch.nn.Module().__dict__) | {"_flat_weights", "_flat_weight_refs", "_all_weights"}

# Numbers and the like, which never change: what holds them is compared.
CONSTANTS = (*ATOMS, range, slice, np.generic, np.dtype, torch.finfo, torch.iinfo)

CODE = (FunctionType, type, ModuleType, property, staticmethod, classmethod, types.BuiltinFunctionType)

OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))  # torch.ops: packets and overloads
_COMPUTING = (*OPERATORS, np.ufunc, torch.jit.ScriptFunction)

BUILTINS = frozenset({
    abs, all, any, bool, bytes, complex, dict, divmod, enumerate, filter, float, frozenset, int, isinstance, iter, len,
    list, map, max, min, next, pow, range, reversed, round, set, slice, sorted, str, sum, tuple, zip,
})  # fmt: skip
# Those of them that give what they find in what they are given, and those that call it.
GIVING = frozenset({dict, frozenset, iter, list, max, min, next, reversed, set, sorted, tuple})
CALLING = frozenset({map, filter, functools.reduce})
# Those that read a list, and give its items or numbers made of them.
READING = frozenset({
    all, any, bool, enumerate, isinstance, iter, len, list, range, reversed, set, sorted, sum, tuple, zip, torch.zeros,
    torch.ones, torch.empty, torch.rand, torch.randn, torch.tensor, torch.stack, torch.cat, F.layer_norm, F.pad,
})  # fmt: skip
TYPES = frozenset(x for x in vars(builtins).values() if isinstance(x, type)) | {torch.Tensor}

# Where torch's functions come from that do nothing but compute; others are refused.
_TORCH_HOMES = (
    "torch.functional", "torch.nn.functional", "torch._C", "torch._VF", "torch.linalg", "torch.fft", "torch.special",
    "torch.nn.utils.rnn", "torch.nn.attention", "torch.func", "torch._functorch", "torch.utils.checkpoint",
    "torch.utils._pytree",
    "torch.nn.init", "torch._ops", "torch._higher_order_ops", "torch._jit_internal", "torch.distributions",
)  # fmt: skip
_TORCH_STATE = (
    "set_", "get_rng", "manual_seed", "seed", "initial_seed", "save", "load", "use_", "init_", "compile", "fork",
    "wait", "from_file", "import_ir", "get_default_device", "parse_", "clear_", "autocast_", "get_num", "export",
)  # fmt: skip
_TORCH_CLASSES = (
    torch.Size, torch.device, torch.Tensor, torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.autocast,
    torch.finfo, torch.iinfo, torch.cuda.amp.autocast, torch.cpu.amp.autocast, torch.autograd.Variable,
    torch.FloatTensor, torch.DoubleTensor, torch.LongTensor, torch.IntTensor, torch.ByteTensor, torch.BoolTensor,
)  # fmt: skip
_FUNCTIONS = frozenset({
    functools.reduce, torch.autograd.grad, torch.cuda.is_available, np.prod, np.sum, np.cumsum, np.arange, np.array,
})  # fmt: skip
# Modules without parameters, which a body may make: of these files of torch.nn.modules.
_STATELESS = frozenset(
    {"activation", "distance", "dropout", "flatten", "fold", "loss", "padding", "pooling", "pixelshuffle"}
)

# What a tensor says of itself, as fake ones say it. Its methods are those below; what else it has is refused, and what
# it has not is a field of a named tuple.
OF_TENSORS = frozenset({
    "H", "T", "data", "device", "dtype", "imag", "is_cpu", "is_cuda", "is_meta", "is_quantized", "is_sparse",
    "is_sparse_csr", "is_nested", "itemsize", "layout", "mH", "mT", "nbytes", "ndim", "real", "shape",
})  # fmt: skip
REFUSED_METHODS = frozenset({
    "apply_", "map_", "map2_", "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "requires_grad_", "module_load", "share_memory_", "record_stream", "reinforce", "numpy", "storage",
    "untyped_storage", "storage_type", "is_shared", "is_pinned", "is_inference", "is_set_to",
})  # fmt: skip
GIVING_TENSORS = frozenset({
    "parameters", "named_parameters", "buffers", "named_buffers", "get_parameter", "get_buffer",
})  # fmt: skip
METHODS_OF_MODULES = GIVING_TENSORS | {
    "forward", "items", "keys", "values", "children", "named_children", "modules", "named_modules",
}  # fmt: skip
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_SETTINGS = (dict, argparse.Namespace, types.SimpleNamespace)
# Methods by which an object's attributes are not what its dictionaries hold, or it is more than these.
_READ_OTHERWISE = (
    "__getattr__", "__getattribute__", "__get__", "__set__", "__call__", "__torch_function__", "__slots__",
)  # fmt: skip
# Methods of a module that no body calls.
NEVER_CALLED = frozenset({
    "__init__", "__call__", "__repr__", "__str__", "__setstate__", "__getstate__", "__reduce__", "__deepcopy__",
    "__copy__", "__setattr__", "__delattr__", "__del__", "__dir__", "__init_subclass__", "extra_repr",
    "reset_parameters",
})  # fmt: skip


def is_library(module_name: object) -> bool:
    """Whether a Python module is Python's own or one of those that bodies may rely on."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


def package_of(x: object) -> str:
    """The package that a class, or an object's, comes from."""
    cls = x if isinstance(x, type) else type(x)
    return str(cls.__module__).partition(".")[0]


def is_looked_into(cls: type) -> bool:
    """Whether the code of a module's class is walked; of others what their objects hold is compared."""
    return not is_library(cls.__module__) and package_of(cls) not in CONFIGURED


def is_own(name: str) -> bool:
    """Whether an attribute of a module is the user's, not the bookkeeping of torch or fxbatch."""
    return name not in _OWN and not name.startswith("_fxbatch")


def is_users(f: object) -> bool:
    return isinstance(f, FunctionType) and not is_library(f.__globals__.get("__name__"))


def unwrapped(f: object) -> Any:
    """The user's function in one that a decorator of a library made."""
    while (
        isinstance(f, FunctionType)
        and not is_users(f)
        and isinstance(f.__dict__.get("__wrapped__"), FunctionType)
    ):
        f = f.__dict__["__wrapped__"]
    return f


def is_in(x: object, among: frozenset[object]) -> bool:
    try:
        return x in among
    except TypeError:
        return False


def is_torchs_or_pythons(x: object) -> bool:
    """Whether something that can be called, or holds functions, is written in C or belongs to torch."""
    if isinstance(x, _COMPUTING) or is_in(x, _FUNCTIONS):
        return True
    if isinstance(x, (*IN_C, types.MethodWrapperType)):
        owner = getattr(x, "__self__", None)
        return owner is None or isinstance(owner, (ModuleType, type))
    return callable(x) and is_library(type(x).__module__) and type(x).__module__.startswith("torch")


def only_computes(f: object) -> bool:
    """Whether a function or class of a library gives a result and does nothing else."""
    if is_in(f, BUILTINS) or isinstance(f, _COMPUTING):
        return True
    name = str(getattr(f, "__name__", ""))
    home = str(
        getattr(f, "__module__", None) or getattr(getattr(f, "__objclass__", None), "__module__", None) or ""
    )
    if isinstance(f, type):
        if f in _TORCH_CLASSES or issubclass(f, (BaseException, np.generic)):
            return True
        if issubclass(f, torch.nn.Module):
            stateless = f.__module__.rpartition(".")[2] in _STATELESS and f.__module__.startswith(
                "torch.nn.modules."
            )
            return stateless and name not in ("PReLU", "MultiheadAttention")
        return home.startswith(("torch.distributions", "torch_geometric")) or home in (
            "collections",
            "itertools",
        )
    if home.partition(".")[0] in _COMPUTE or home in ("math", "cmath", "_operator", "itertools"):
        return True
    if is_in(f, _FUNCTIONS) or getattr(math, name, None) is f or getattr(operator, name, None) is f:
        return True
    if getattr(torch.Tensor, name, None) is f:
        return name not in REFUSED_METHODS and not name.startswith("_")
    if plain_function(getattr(torch, name, None)) is f:
        return not name.startswith(_TORCH_STATE)
    return home.startswith(_TORCH_HOMES) or plain_function(getattr(F, name, None)) is f


def is_settings(x: object) -> bool:
    """Whether an object is read by names and keys alone: a dictionary, `argparse.Namespace`, an object of a user's
    class that has attributes in the ordinary way. What it holds may be compared, place by place."""
    cls = type(x)
    if cls in _SETTINGS:
        return True
    if isinstance(x, type) or not hasattr(x, "__dict__"):
        return False
    users = [c for c in cls.__mro__ if c is not object]
    ordinary = type(cls) is type and not any(is_library(c.__module__) for c in users)
    return ordinary and not any(name in vars(c) for c in users for name in _READ_OTHERWISE)


def is_plain_tuple(cls: type) -> bool:
    """Whether a class is that of a named tuple, without methods of its own."""
    if cls.__bases__ != (tuple,) or not hasattr(cls, "_fields"):
        return False
    members = {n: getattr(v, "__func__", v) for n, v in vars(cls).items()}
    return all(n.startswith("_") for n, v in members.items() if isinstance(v, (FunctionType, property)))


def why_not_plain(args: Iterable[object], kwargs: Mapping[str, object]) -> str:
    """Why a call with these arguments is none of a plain body, "" where it is one: lists, dictionaries and objects may
    be changed by it, and keep what they are given."""
    todo = [*args, *kwargs.values()]
    while todo:
        x = todo.pop()
        if isinstance(x, (torch.Tensor, slice, np.generic, enum.Enum)) or type(x) in ATOMS:
            continue
        if isinstance(x, tuple) and _is_of_parts(type(x)):
            todo += x
        elif is_users(x) or not (isinstance(x, type) or is_torchs_or_pythons(x)) or not only_computes(x):
            return f"takes a {type(x).__name__}, which it may change"
    return ""


def holds_others(x: object) -> bool:
    """Whether nothing of this type is given to a plain body: lists, dictionaries, users' objects."""
    if isinstance(x, tuple):
        return not _is_of_parts(type(x))
    return not callable(x) and why_not_plain((x,), {}) != ""


def _is_of_parts(cls: type) -> bool:
    """Whether a tuple of this class is what its items are."""
    return cls is tuple or is_plain_tuple(cls) or is_library(cls.__module__)
