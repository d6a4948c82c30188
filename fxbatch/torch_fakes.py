"""Fake tensors without torch._dynamo, which torch imports for them (1.5 s, with all that it imports in turn).

    put_dynamo_off()                   # torch._dynamo is imported when something of it is needed that isn't here
    with FakeMode() as mode:
        torch.empty(3).tanh()          # a FakeTensor: shape and dtype, no numbers
        mode.from_tensor(weight)       # the form of a real one
    stop_putting_off()

Private torch APIs, as in torch_private.py; checked against 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch._decomp import decomposition_table, meta_table
from torch._subclasses.fake_impls import (
    _is_tensor_constructor,
    _like_tensor_constructors,
    dispatch_to_op_implementations_dict,
    has_meta,
    op_implementations_checks,
)
from torch._subclasses.fake_tensor import (
    _DISPATCH_META_HANDLERS,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    in_kernel_invocation_manager,
    torch_decomp_decompositions,
)
from torch.utils._mode_utils import no_dispatch

from fxbatch.torch_private import start_engine

__all__ = [
    "FakeMode",
    "before_dynamo",
    "import_for_fakes",
    "no_collections",
    "no_symbols",
    "put_dynamo_off",
    "stop_putting_off",
]

aten = torch.ops.aten
NAME, CONFIG = "torch._dynamo", "torch._dynamo.config"
_lock = threading.RLock()
_given: list[Any] = []  # functions that were told that they are disabled


def _imported() -> Any:
    return importlib.import_module(NAME)


# Calls what imports torch._dynamo; whoever has changed torch puts it back for so long.
before_dynamo: list[Callable[[Callable[[], Any]], Any]] = []


class _Config(ModuleType):
    """The settings that fake tensors ask for, as torch ships them."""

    fake_tensor_cache_enabled = True
    fake_tensor_cache_crosscheck_enabled = False
    _custom_ops_profile = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load().config, name)


class _CompiledAutograd:
    """What torch.func's transforms switch off while they differentiate."""

    _disable = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(_load().compiled_autograd, name)


class _Dynamo(ModuleType):
    """Stands for torch._dynamo while it is not imported: nothing was compiled then, so nothing is kept from it.

    Asked for anything else, it imports the real module, which is in its place from then on.
    """

    config = _Config(CONFIG)
    compiled_autograd = _CompiledAutograd()

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """The function itself, where torch disables its own; see torch/_compile.py."""
        if options != {"wrapping": False}:
            return _load().disable(function, recursive, **options)
        _given.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_load(), name)


_STAND_IN = _Dynamo(NAME)


def put_dynamo_off() -> bool:
    """Put the stand-in in place, unless torch._dynamo is imported; whether it is in place."""
    with _lock:
        if NAME not in sys.modules:
            sys.modules[NAME], sys.modules[CONFIG] = _STAND_IN, _Dynamo.config
            torch._dynamo = _STAND_IN
        return sys.modules[NAME] is _STAND_IN


def stop_putting_off() -> None:
    """As if the stand-in had never been there."""
    with _lock:
        if sys.modules.get(NAME) is _STAND_IN:
            del sys.modules[NAME], sys.modules[CONFIG]
            torch.__dict__.pop("_dynamo", None)
        while _given:
            _given.pop().__dict__.pop("__dynamo_disable", None)


def _load() -> Any:
    """The real module."""
    if sys.modules.get(NAME, _STAND_IN) is not _STAND_IN:
        return _imported()

    def load() -> Any:
        stop_putting_off()
        return _imported()

    return before_dynamo[-1](load) if before_dynamo else load()


class _Converter(FakeTensorConverter):
    """Plain tensors become fake ones of their form; others, as sparse ones and subclasses, are torch's to convert."""

    def from_real_tensor(  # type: ignore[override]  # what else there is, is handed on
        self, fake_mode: FakeTensorMode, t: torch.Tensor, make_constant: bool = False, **kwargs: Any
    ) -> FakeTensor:
        if kwargs.get("shape_env") is not None or not _is_plain(t):
            return super().from_real_tensor(fake_mode, t, make_constant, **kwargs)
        known: FakeTensor | None = self._get_memo(t)
        if known is not None:
            return known
        with no_dispatch(), torch.inference_mode(False):
            form = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            made = FakeTensor(fake_mode, form, t.device, constant=t if make_constant else None)
        made.requires_grad_(t.requires_grad)
        if type(t) is torch.nn.Parameter:
            made._is_param = True  # what isinstance asks
        self.set_tensor_memo(t, made)
        if make_constant:
            self.add_constant_storage_mapping(made)
        return made


def _is_plain(t: torch.Tensor) -> bool:
    return (
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and t.is_leaf
        and not (t.is_quantized or t.is_nested or t.is_conj() or t.is_neg() or t.is_inference())
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not torch._is_functional_tensor(t)
    )


# -- Fixed sizes only. torch's own dispatch, and the meta kernels that it has in Python, ask sympy and `symbolic_shapes`
#    at each call whether a size is a symbol (0.4 s to import), and calling such a kernel with a fake tensor makes
#    torch's C++ import `torch.distributed.tensor`. Where sympy is not imported there are no symbols.

_SYMBOLS = ("sympy", "torch.utils._sympy.functions", "torch.fx.experimental.symbolic_shapes")


def _equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) if isinstance(a, (tuple, list)) else a == b


_ANSWERS: dict[str, Callable[..., Any]] = {  # what is said of sizes that are numbers
    **dict.fromkeys(
        ("guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"), bool
    ),
    **dict.fromkeys(("expect_true", "guard_bool"), lambda x, *_: bool(x)),
    **dict.fromkeys(("guarding_hint_or_throw", "guard_int", "size_hint", "hint_int"), lambda x, *_: x),
    **dict.fromkeys(("has_free_symbols", "has_free_unbacked_symbols", "is_nested_int"), lambda x: False),
    **dict.fromkeys(("has_hint", "has_guarding_hint"), lambda x: True),
    "free_unbacked_symbols": lambda x: set(),
    "sym_and": lambda *x: all(x),
    "sym_or": lambda *x: any(x),
    "sym_eq": _equal,
}


class _Nothing(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return False


class _NoSymbol(metaclass=_Nothing):
    """A class of symbols: nothing is one."""


class _NoSymbols(ModuleType):
    """Stands for one of _SYMBOLS while a function runs on meta tensors; asked for anything else, it imports them."""

    Basic = Max = _NoSymbol

    def __getattr__(self, name: str) -> Any:
        answer = _ANSWERS.get(name) if self.__name__ == _SYMBOLS[2] else None
        if answer is None:
            if name.startswith("__") and (name != "__path__" or self.__name__ != _SYMBOLS[0]):
                raise AttributeError(name)
            _take_out()
            return getattr(importlib.import_module(self.__name__), name)

        def ask(*args: Any) -> Any:
            if _SYMBOLS[0] in sys.modules and not isinstance(sys.modules[_SYMBOLS[0]], _NoSymbols):
                return getattr(importlib.import_module(self.__name__), name)(*args)
            return answer(*args)

        self.__dict__[name] = ask
        return ask


_STAND_INS = {name: _NoSymbols(name) for name in _SYMBOLS}


def _take_out() -> None:
    for name, made in _STAND_INS.items():
        if sys.modules.get(name) is made:
            del sys.modules[name]


@contextlib.contextmanager
def no_symbols() -> Iterator[None]:
    """While torch's own code runs on meta tensors: the stand-ins are in place, unless one of the modules is imported or
    there is another thread, which could ask for them."""
    if any(name in sys.modules for name in _SYMBOLS) or threading.active_count() > 1:
        yield
        return
    sys.modules.update(_STAND_INS)
    try:
        yield
    finally:
        _take_out()


# Functions that have a rule of their own, which for fixed sizes on one device says what the meta kernel does.
_AS_OTHERS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.select.int, aten.slice.Tensor, aten.embedding.default,
        aten.index.Tensor, aten.copy.default, aten.slice_scatter.default, aten.diagonal_scatter.default,
        aten.index_put.default, aten._unsafe_index_put.default, aten.copy_.default, aten.index_put_.default,
    }
)  # fmt: skip


@functools.cache
def _way(func: Any) -> Any:
    """How a function runs on fakes of fixed sizes: "meta", "made" (a constructor), "lift" by its meta kernel, what it
    is composed of, "rule" as torch's rule for it says, "torch" by the whole of torch's dispatch."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        return "torch"
    if func.namespace == "prims":
        return getattr(func, "prim_meta_impl", "torch")
    own = torch._library.simple_registry.singleton.find(func.name()).fake_impl.kernel
    if own is not None or any(x.is_out for x in func._schema.arguments) or _asks_device(meta_table.get(func)):
        return "torch"
    if func in FakeTensorMode.lift_fns:
        return "lift"
    if func not in meta_table and not FakeTensorMode.cpp_meta_supports_symint(FakeMode, func):  # type: ignore[arg-type]
        if func in decomposition_table and torch_decomp_decompositions(func):
            return decomposition_table[func]
        if func._can_decompose():
            return func.decompose
    if func in (aten.native_layer_norm.default, aten.native_group_norm.default):
        return functools.partial(_norm_with_statistics, decomposition_table[func])
    if _is_tensor_constructor(func) or func in _like_tensor_constructors:
        return "made"
    if func is aten._local_scalar_dense.default or func is aten.nonzero.default:
        return "rule"
    if func not in _AS_OTHERS and any(check(func) for check, _ in op_implementations_checks):
        return "torch"
    return "meta" if has_meta(func) else "torch"


def _norm_with_statistics(rule: Any, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """What torch's rule for a norm gives; mean and deviation, on the CPU, of the type of its weights, as the kernel has
    them: the rule says that of x, which autocast makes another."""
    found, *statistics = rule(x, *args)
    weights = [w for w in args if isinstance(w, torch.Tensor)]
    if weights and x.device.type == "cpu":
        statistics = [s.to(weights[0].dtype) for s in statistics]
    return found, *statistics


def _asks_device(kernel: Any, deep: int = 3) -> bool:
    """Whether a meta kernel in Python, or what it calls of its module, asks where a fake tensor is."""
    kernel = inspect.unwrap(kernel) if callable(kernel) else kernel
    code = getattr(kernel, "__code__", None)
    if code is None or kernel.__module__ != "torch._meta_registrations":
        return False
    if {"device_hint", "fake_device"} & {*code.co_names}:
        return True
    return deep > 0 and any(_asks_device(kernel.__globals__.get(x), deep - 1) for x in code.co_names)


class _Unusual(Exception):
    """Something that torch's own dispatch is for."""


class _Call:
    """The arguments of a function, with plain meta tensors in place of fakes."""

    def __init__(self, mode: FakeTensorMode, written: bool) -> None:
        self.mode, self.written = mode, written
        self.fakes: list[FakeTensor] = []
        self.forms: list[torch.Tensor] = []

    def plain(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if self.mode.allow_non_fake_inputs and not self.written and _is_plain(x):
                x = self.mode.fake_tensor_converter.from_real_tensor(self.mode, x)
            if type(x) is not FakeTensor or x.fake_mode is not self.mode or not _is_plain_form(x):
                raise _Unusual
            form = torch.empty(0, dtype=x.dtype, device="meta")
            form.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
            self.fakes.append(x)
            self.forms.append(form)
            return form
        if isinstance(x, (list, tuple)):
            return type(x)([self.plain(y) for y in x])
        return x

    def device(self) -> torch.device:
        """Where all of the fakes are."""
        devices = {x.fake_device for x in self.fakes}
        if len(devices) != 1 or all(x.constant is not None for x in self.fakes):
            raise _Unusual
        return devices.pop()

    def fake(self, x: Any, device: torch.device) -> Any:
        """A result as a fake."""
        if isinstance(x, FakeTensor) and x.fake_mode is self.mode:
            return x
        if isinstance(x, torch.Tensor):
            for form, fake in zip(self.forms, self.fakes, strict=True):
                if x is form:
                    return fake
            if type(x) is not torch.Tensor or not x.is_meta:
                raise _Unusual
            return FakeTensor(self.mode, x, device)
        return type(x)([self.fake(y, device) for y in x]) if isinstance(x, (list, tuple)) else x


def _is_plain_form(x: FakeTensor) -> bool:
    return x.layout is torch.strided and not (x.is_complex() or x.is_quantized or x.is_nested)


class FakeMode(FakeTensorMode):
    """torch's mode, of fixed sizes."""

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        start_engine()
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self.fake_tensor_converter = _Converter(copy_data=False, export=False)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch's does, without what it has for symbols."""
        handler = _DISPATCH_META_HANDLERS.get(func)
        if handler is not None:
            return handler(args)
        way = _way(func)
        if way != "torch":
            with no_symbols(), contextlib.suppress(_Unusual, NotImplementedError):
                return self._run(func, way, args, kwargs or {})
        _take_out()
        return super().dispatch(func, types, args, kwargs)

    def _run(self, func: Any, way: Any, args: Any, kwargs: Any) -> Any:
        if callable(way):
            with self:
                return way(*args, **kwargs)
        if way == "lift" and type(args[0]) is torch.Tensor:  # what torch.tensor() gives
            found = func(args[0])
            constant = self.may_turn_const(found)
            return self.fake_tensor_converter.from_real_tensor(self, found if constant else args[0], constant)
        call = _Call(self, func._schema.is_mutable)
        with no_dispatch():
            plain, named = call.plain(args), {k: call.plain(x) for k, x in kwargs.items()}
            if func is aten.index.Tensor and any(
                i is not None and i.dtype in (torch.bool, torch.uint8) for i in plain[1]
            ):
                raise _Unusual
        given = named.get("device")
        if way == "made":
            device = (
                torch.device(given)
                if given is not None
                else call.device()
                if call.fakes
                else torch.device("cpu")
            )
            named["device"] = torch.device("meta")
        elif given is not None:
            raise _Unusual
        else:
            device = call.device()
        if way == "rule":
            return dispatch_to_op_implementations_dict(self, func, *args, **kwargs)
        if call.written and any(x.constant is not None for x in call.fakes):
            raise _Unusual
        if torch.Tag.inplace_view in func.tags:  # it changes the fakes themselves
            with in_kernel_invocation_manager(self):
                return func(*args, **kwargs)
        with in_kernel_invocation_manager(self):
            made = func(*plain, **named)
        for form, fake in zip(call.forms, call.fakes, strict=True):
            if form.shape != fake.shape:  # as kernels say it; meta tensors give the result more memory
                shapes = f"{list(fake.shape)} doesn't match the broadcast shape {list(form.shape)}"
                raise RuntimeError(f"output with shape {shapes}")
        return call.fake(made, device)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """While graphs are made: at so many new objects a collection would look at all of torch's, for 0.07 s."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@functools.cache
def import_for_fakes() -> None:
    """Have torch import what the first call on a fake tensor does (0.5 s; several times that under a profiler)."""
    with FakeMode(), torch.inference_mode(False):
        torch.empty(1, device="cpu").clone()
