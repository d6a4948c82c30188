"""Changes to torch while some thread traces, put back afterwards, exceptions or not.

with patched():
    ...             # nn.Module calls, custom autograd functions and torch.tensor know Values

`torch.func.functional_call` is recorded by its parts, transforms of values are refused: else both give wrong results
and no error, for a transform wraps what a Value is for C++, an empty tensor, and a module that is called with other
weights for the moment would be recorded with its own.

    functional_call(module, {"weight": value}, (x,))     # recorded: the functions that its modules call
    torch.func.grad(energy)(value)                       # TraceError: it would see a tensor without content
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from fxbatch.errors import InPlaceError, TraceError
from fxbatch.signature import bodies
from fxbatch.torch_private import (
    CheckpointFunction,
    FakeTensor,
    TorchDispatchMode,
    any_autocast,
    dynamo_questions,
    function_modes_enabled,
    functions_enabled,
    functorch_transforms,
    functorch_vmap,
    handle_torch_function,
    has_torch_function_variadic,
    let_dynamo_read_torch,
    memory_is_real,
    mode_addresses,
    module_call,
    stateless,
    tree_leaves,
)
from fxbatch.trace import torch_functions
from fxbatch.trace.arguments import TELLING, bare_function, row_of_parameter
from fxbatch.trace.bare_parameters import BARE, BareParameter, BareView, Heard, unheard
from fxbatch.trace.calls import LIKE, NO_OUT, with_contents
from fxbatch.trace.modules import traced_call
from fxbatch.trace.operations import CustomFunction, function_name
from fxbatch.trace.places import TABLES
from fxbatch.trace.recorded_calls import Columns, Knowledge, RecordedCalls
from fxbatch.trace.state import _fast, state
from fxbatch.trace.table import Entry, operands_require
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import (
    BINARY,
    GETITEM,
    READERS,
    SETITEM,
    Value,
    View,
    Written,
    WrittenTensor,
    item_of_written,
    link_views,
    plain_new,
    refresh,
    with_values,
)
from fxbatch.trace.writes import PURE_FORMS, counted, filled, set_row

Entries = tuple[tuple[Any, str, Any], ...]  # owner, name, what is put there (None: nothing)
Replacement = TypeVar("Replacement", bound=Callable[..., Any])


def put_attributes(entries: Entries, saved: list[Entries]) -> None:
    """Set attributes of classes and modules; what was there is appended to `saved` before, last first. In C the
    caches of a class are invalidated once, not once an attribute."""
    if _fast is not None:
        _fast.swap(entries, saved)
        return
    saved.append(tuple((owner, name, owner.__dict__.get(name)) for owner, name, _ in reversed(entries)))
    for owner, name, new in entries:
        if new is not None:
            setattr(owner, name, new)
        elif name in owner.__dict__:  # a clean-up that was cut short is done again
            delattr(owner, name)


def quicken_modules(on: bool) -> None:
    """Whether classes of modules that are met may look up their parameters and submodules in C; off: none does
    any more."""
    if _fast is not None:
        _fast.quicken_modules(on and _TORCHS_OWN)


_TORCHS_OWN = torch.nn.Module.__getattr__.__module__ == torch.nn.modules.module.__name__

if _fast is not None:
    _fast.setup(
        {
            "Value": Value, "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter,
            "BareParameter": BareParameter, "BareView": BareView, "Heard": Heard, "bare_function": bare_function,
            "Module": torch.nn.Module,
            "dtype": torch.dtype, "device": torch.device, "Size": torch.Size, "Columns": Columns,
            "Knowledge": Knowledge, "Entry": Entry,
            "plain_new": plain_new, "module_call": module_call, "build_result": Entry.result,
            "constant": RecordedCalls.constant, "row_of_parameter": row_of_parameter,
            "number_id": RecordedCalls.number_id, "sync_modes": RecordedCalls.sync_modes,
            "link_views": link_views, "refresh": refresh,
            "set_row": counted(set_row), "filled": filled,
            "View": View, "Written": Written, "WrittenTensor": WrittenTensor, "getitem": GETITEM,
            "setitem": SETITEM,
            "operands_require": operands_require, "pure_forms": {**PURE_FORMS, **dict.fromkeys(LIKE)},
            "written_function": WrittenTensor.__torch_function__,
            "torch_function": Value.__torch_function__, "handle_torch_function": handle_torch_function,
            "is_grad_enabled": torch.is_grad_enabled,
            "any_autocast": any_autocast, "default_dtype": torch.get_default_dtype,
            "modes_enabled": function_modes_enabled, "functions_enabled": functions_enabled,
            "has_torch_function": has_torch_function_variadic,
        },
        mode_addresses(), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    )  # fmt: skip
    for _name, (_func, _method) in BINARY.items():
        setattr(Value, _name, _fast.Method(_func, _method))
        setattr(WrittenTensor, _name, _fast.Method(_func, _func))
    for _how, (_name, _read) in enumerate(READERS.items()):
        setattr(Value, _name, _fast.Method(None, _read, _how))
    _STAND_INS: tuple[Any, ...] = (Value, WrittenTensor)
    for _name in dir(torch.Tensor):  # torch's own methods: what was met before passes none of its code
        _func = getattr(torch.Tensor, _name)
        _pure = PURE_FORMS.get(_func) if callable(_func) and _func.__hash__ else None
        if _pure is not None:
            for _kind in _STAND_INS:
                _slow = _kind.__dict__.get(_name, _func)
                setattr(_kind, _name, _fast.Method(_pure, _slow, len(READERS)))
        elif _name[0] != "_" and _name not in Value.__dict__ and callable(_func) and _func not in TELLING:
            for _kind in _STAND_INS:
                setattr(_kind, _name, _fast.Method(_func, _func))
    for _kind, _slow in zip(_STAND_INS, (Value.__dict__["__setitem__"], SETITEM), strict=True):
        _kind.__setitem__ = _fast.Method(SETITEM, _slow)
    for _kind, _slow in zip(_STAND_INS, (Value.__dict__["__getitem__"], item_of_written), strict=True):
        _kind.__getitem__ = _fast.Method(GETITEM, _slow)
    for _kind in (*_STAND_INS, *BARE):
        _kind.__torch_function__ = _fast.torch_function


_PATCHES: list[tuple[object, str, object]] = []  # what stands in torch's place while some thread records
_FILLING = ("tensor", "full", "zeros", "ones", "empty")  # what they give is told by their arguments


def stands_for(owner: object, *names: str) -> Callable[[Replacement], Replacement]:
    """This function stands for functions of torch while some thread records: where it is the caller that records, it
    is given the recorder, torch's function and the arguments."""

    def named(traced: Replacement) -> Replacement:
        for name in names:
            plain = getattr(owner, name)
            called = _while_recording(plain, traced)
            if _fast is not None and type(plain) is BuiltinFunctionType:  # asked where a value is given
                called = _fast.Function(plain, called, name in _FILLING)
            _PATCHES.append((owner, name, called))
        return traced

    return named


def _while_recording(plain: Any, traced: Replacement) -> Any:
    def called(*args: object, **kwargs: object) -> object:
        recorder = state.recorder
        return plain(*args, **kwargs) if recorder is None else traced(recorder, plain, *args, **kwargs)

    return functools.wraps(plain)(called)


@stands_for(stateless, "_functional_call")
def _functional_call(
    recorder: RecordedCalls, plain: Any, module: torch.nn.Module, *args: object, **kwargs: object
) -> object:
    """Recorded by its parts, for the modules in it have other tensors than their own meanwhile. Nothing may run then,
    since what runs would find these."""
    name, parts = type(module).__name__, list(module.modules())
    if any(m._forward_hooks or m._forward_pre_hooks for m in parts):
        raise TraceError(f"functional_call of a {name} with hooks{at_line()}")

    def refuse(*_: object) -> Any:
        raise TraceError(f"a value is asked for within a functional_call of a {name}{at_line()}")

    ask, before = recorder.ask, recorder.substituted
    recorder.ask, recorder.substituted = refuse, before.union(map(id, parts))
    others = recorder.substituted - recorder.by_parts
    recorder.by_parts |= others
    try:
        return plain(module, *args, **kwargs)
    finally:
        recorder.ask, recorder.substituted = ask, before
        recorder.by_parts -= others


@stands_for(functorch_transforms, "_wrap_tensor_for_grad")
@stands_for(functorch_vmap, "_add_batch_dim", "_remove_batch_dim")
def _transform(_: RecordedCalls, plain: Any, x: object, *args: object, **kwargs: object) -> object:
    """A transform wraps a tensor, or takes what was computed out again: a Value is neither."""
    if type(x) is Value:
        raise TraceError(
            "a torch.func transform (grad, vmap, ...) got a recorded tensor: call it inside a submodule, or in a "
            f"function with @fxbatch.operation{at_line()}"
        )
    return plain(x, *args, **kwargs)


@stands_for(torch.autograd, "backward")
def _backward(_: RecordedCalls, plain: Any, tensors: object, *args: object, **kwargs: object) -> object:
    if any(type(x) is Value for x in tree_leaves(tensors)):
        raise TraceError(f"backward() inside a per-instance forward: call it on the results{at_line()}")
    return plain(tensors, *args, **kwargs)


@stands_for(torch, "cond")
def _cond(
    _: RecordedCalls, __: object, pred: object, true_fn: Any, false_fn: Any, operands: Any = ()
) -> object:
    """The branch that the value chooses: the instance waits for it, as at an `if`."""
    return true_fn(*operands) if pred else false_fn(*operands)


# torch.fx changes nn.Module too while it traces, and puts back what it found. Who has it trace holds this, so that
# of two threads none puts back what the other had put there. Re-entrant: the collector may end a forgotten use.
patching = threading.RLock()


class patched:
    """Patch torch while inside; nested and concurrent uses share one patch. Each is ended once: at the latest when
    nobody holds it any more, for an interrupt may strike the clean-up itself."""

    uses: ClassVar[dict[int, int]] = {}  # ids of the uses under way, and of their threads
    saved: ClassVar[list[Entries]] = []  # what was there before, while something is patched
    ended = False

    def __enter__(self) -> None:
        try:
            with patching:
                self.uses[id(self)] = threading.get_ident()
                if not self.saved:
                    self.put()
        except BaseException:
            self.end()
            raise

    @classmethod
    def put(cls) -> None:
        """Put the patch in place, at its first use."""
        let_dynamo_read_torch()
        put_attributes((*_entries(), *torch_functions.met), cls.saved)
        quicken_modules(True)

    def end(self) -> None:
        """Put back what was there, if this is the last use."""
        if self.ended:
            return
        with patching:
            self.uses.pop(id(self), None)
            if not self.uses and self.saved:
                quicken_modules(False)
                put_attributes(self.saved[0], [])
                self.saved.clear()
        self.ended = True

    def __exit__(self, *_: object) -> None:
        self.end()

    __del__ = end


@functools.cache
def _entries() -> Entries:
    recorded: object = traced_call
    handles: Entries = ()
    if _fast is not None:  # what torch's Python functions call when they meet a subclass of Tensor
        recorded = _fast.Method(None, traced_call)
        handles = tuple((m, "handle_torch_function", _fast.handle_torch_function) for m in _HANDLING)
        handles += tuple((torch.nn.functional, name, _fast.has_torch_function) for name in _QUESTIONS)
    questions = tuple((m, name, _uncompiled(ask, answer)) for m, name, ask, answer in dynamo_questions())
    return ((torch.nn.Module, "__call__", recorded), *_PATCHES, *handles, *questions)


def _uncompiled(ask: Callable[..., object], answer: object) -> Callable[..., object]:
    """`ask`, which functions that torch.compile made call, answered by `answer` where values are, and in bodies: then
    the Python that they were made from is recorded call by call."""

    def asked(*args: object) -> object:
        plain = state.recorder is not None or bodies.running or not memory_is_real()
        return answer if plain else ask(*args)

    return asked


# A class method, in Python until torch 2.13 and in C from 2.14 on: both bind by `__get__`.
_apply = torch.autograd.Function.__dict__["apply"]
_RECORDED = (Value, WrittenTensor)


@contextlib.contextmanager
def functions_refused(error: Callable[[str], Exception]) -> Iterator[None]:
    """In it this thread raises where a torch.autograd.Function meets fake tensors that may have gradients: it has
    derivatives of its own, which a graph of operators would lose."""
    before, state.refuse_functions = state.refuse_functions, error
    try:
        with patched():
            yield
    finally:
        state.refuse_functions = before


def _may_have_gradients(x: object) -> bool:
    return isinstance(x, FakeTensor) and (x.is_floating_point() or x.is_complex())


def _traced_apply(cls: Any, *args: Any, **kwargs: object) -> Any:
    refuse = state.refuse_functions
    if refuse is not None and any(map(_may_have_gradients, tree_leaves((args, kwargs)))):
        raise refuse(f"{cls.__name__} has derivatives of its own")
    if refuse is not None and cls.generate_vmap_rule:  # its operators are traced, inside `torch.vmap` too
        return cls.forward(*args, **kwargs)
    recorder = state.recorder
    if recorder is not None and cls is CheckpointFunction:
        return _not_checkpointed(*args)
    if recorder is not None and any(type(x) in _RECORDED for x in tree_leaves((args, kwargs))):
        return recorder.call(CustomFunction(cls), args, kwargs)
    heard = recorder is not None and recorder.heard.changed
    with unheard(recorder) if heard else contextlib.nullcontext():  # what it computes goes to C++
        return _apply.__get__(None, cls)(*args, **kwargs)


_PATCHES.append((torch.autograd.Function, "apply", classmethod(_traced_apply)))


def _not_checkpointed(function: Any, preserve_rng_state: bool, *args: object) -> object:
    """`checkpoint(function, *args, use_reentrant=True)`: what is saved is fxbatch's choice, the result is the same."""
    wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
        return function(*args)


@stands_for(TorchFunctionMode, "__enter__")
@stands_for(TorchDispatchMode, "__enter__")
def _enters_mode(_: RecordedCalls, plain: Any, mode: object) -> object:
    """A mode of the user's within the forward: what is recorded as a whole, and what runs later, would not meet it."""
    if type(mode).__module__.partition(".")[0] not in ("torch", "fxbatch"):
        raise TraceError(
            f"a torch mode ({type(mode).__name__}) is entered, which recorded calls don't meet{at_line()}"
        )
    return plain(mode)


@stands_for(torch, *_FILLING, "rand", "randn", "arange", "linspace", "eye")
def _with_real_tensors(recorder: RecordedCalls, plain: Any, *args: object, **kwargs: object) -> object:
    """Copies of contents, so Values inside are read."""
    if type(kwargs.get("out")) in _RECORDED:
        raise InPlaceError(NO_OUT.format(function_name(plain)) + at_line())
    if recorder.written:
        args, kwargs = with_values(args, kwargs)
    args, kwargs = with_contents(recorder, args, kwargs)
    return plain(*args, **kwargs)


@stands_for(torch, "as_tensor")
def _as_tensor(recorder: RecordedCalls, plain: object, data: Any, *args: Any, **kwargs: Any) -> object:
    if type(data) is Value:
        return data.to(*args, **kwargs) if args or kwargs else data
    return _with_real_tensors(recorder, plain, data, *args, **kwargs)


@stands_for(torch.nn.Parameter, "__new__")
@stands_for(torch.nn.Module, "__init__", "__setstate__")
def _begins(recorder: RecordedCalls, plain: Any, first: object, *args: object, **kwargs: object) -> object:
    """A module or parameter of the instance's own, or a copy, until it becomes a part of one of the model's."""
    begun = plain(first, *args, **kwargs)
    recorder.local.add(id(first if begun is None else begun))
    return begun


@stands_for(torch.nn.Module, "register_buffer", "register_parameter", "add_module")
def _registers(
    recorder: RecordedCalls, plain: Any, self: torch.nn.Module, name: str, *args: object, **kwargs: object
) -> Any:
    """A parameter, a buffer or a submodule by its name."""
    recorder.attribute_changes(self, name)
    result = plain(self, name, *args, **kwargs)
    _becomes_part(recorder, self, self._modules.get(name))
    return result


def _becomes_part(recorder: RecordedCalls, owner: torch.nn.Module, part: object) -> None:
    """Modules are looked at again, unless this one, which has something new, is an instance's own."""
    if id(owner) not in recorder.local:
        recorder.local.difference_update(map(id, part.modules() if isinstance(part, torch.nn.Module) else ()))
        recorder.forget_modules()


@stands_for(
    torch.nn.Module, "_apply", "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
)  # fmt: skip
def _changes_module(
    recorder: RecordedCalls, plain: Any, self: torch.nn.Module, *args: object, **kwargs: object
) -> object:
    """A method that changes what a module is in other ways."""
    if id(self) in recorder.knowledge.modules.seen:  # others are the instance's own
        recorder.changes.note_lasting(self, plain.__name__)
    result = plain(self, *args, **kwargs)
    recorder.forget_modules(self)
    return result


@stands_for(torch.nn.Module, "__setattr__")
def _setattr(recorder: RecordedCalls, plain: Any, self: torch.nn.Module, name: str, value: object) -> None:
    if self.__dict__.get(name, self) is value:  # `eval()` again and again
        return
    is_part = isinstance(value, (torch.Tensor, torch.nn.Module))
    again = (id(self), name) in recorder.free_to_set and not recorder.changes.waited
    # `self.state = ...` at each step, which matters to nobody but the instance
    if again and (not is_part or type(value) in (Value, torch.Tensor)):
        self.__dict__[name] = value
        return
    if any(self.__dict__.get(table, {}).get(name, self) is value for table in TABLES):
        return
    if id(self) in recorder.local and not is_part:
        plain(self, name, value)
        return
    recorder.attribute_changes(self, name, value)
    if isinstance(value, torch.Tensor):
        recorder.operand_replaced(self, name, value)
    if type(value) is Value:
        if name in self.__dict__.get("_buffers", ()) or name in self.__dict__.get("_parameters", ()):
            raise TraceError(
                f"{type(self).__name__}.{name} is shared by all instances: it can't be set to the value of one"
                f"{at_line()}"
            )
        if recorder.is_read(self, name):
            recorder.forget_modules()
        object.__setattr__(self, name, value)
        recorder.has_set(self, name)
        return
    replaces = isinstance(value, (torch.nn.Parameter, torch.nn.Module)) or any(
        name in self.__dict__.get(table, ()) for table in TABLES
    )
    if replaces:
        _becomes_part(recorder, self, value)
    elif name == "training" or recorder.is_read(self, name):
        recorder.forget_modules()
    plain(self, name, value)
    recorder.has_set(self, name)


@stands_for(torch.nn.Module, "__delattr__")
def _delattr(recorder: RecordedCalls, plain: Any, self: torch.nn.Module, name: str) -> None:
    recorder.attribute_changes(self, name)
    recorder.forget_modules(self)
    plain(self, name)


@stands_for(torch.jit.ScriptFunction, "__call__")
@stands_for(torch.ScriptMethod, "__call__")
def _compiled_code(_: RecordedCalls, plain: Any, self: object, *args: object, **kwargs: object) -> Any:
    """Calls of compiled code, which `Value.__torch_function__` does not hear of."""
    if any(type(x) in _RECORDED for x in tree_leaves((args, kwargs))):
        raise TraceError(
            f"{getattr(self, 'name', 'a function')} is TorchScript, whose code can't be recorded: call the Python "
            f"function that it was made from, or call it in a submodule{at_line()}"
        )
    return plain(self, *args, **kwargs)


@stands_for(torch.autograd.graph.saved_tensors_hooks, "__enter__")
def _hooks_of_users(
    _: RecordedCalls, plain: Callable[..., object], self: torch.autograd.graph.saved_tensors_hooks
) -> object:
    """Hooks on what is saved for the backward pass; torch's own (checkpoint, `save_on_cpu`) change nothing of it."""
    kind = type(self)
    if kind is torch.autograd.graph.saved_tensors_hooks or not kind.__module__.startswith("torch."):
        raise TraceError(
            "saved_tensors_hooks may change what is saved for the backward pass: recorded calls do not ask them"
            + at_line()
        )
    return plain(self)


def _note_seed(recorder: RecordedCalls, plain: Callable[..., object], *args: object) -> object:
    recorder.seeded = recorder.seeded or at_line() or " "
    return plain(*args)


for _where in (torch, torch.random):  # which fork_rng calls
    for _name in ("manual_seed", "seed", "set_rng_state"):
        stands_for(_where, _name)(_note_seed)

_plain_requires_grad: Any = torch.Tensor.requires_grad


def _switch_gradient(
    recorder: RecordedCalls, plain: Any, self: torch.Tensor, requires_grad: bool = True
) -> object:
    if _plain_requires_grad.__get__(self) is not bool(requires_grad):
        recorder.gradient_switched(self)
    return plain(self, requires_grad)


_plain_data: Any = torch.Tensor.data


def _lend_data(recorder: RecordedCalls, plain: Any, self: torch.Tensor) -> torch.Tensor:
    """`t.data` shares memory whose writes torch does not count: what calls have read of t stays as it is."""
    recorder.keep_content(self)
    data: torch.Tensor = plain(self)
    if recorder.owner_of(self) is not None and not data.is_inference():
        recorder.lent.append((self, data))
    return data


def _set_data(
    recorder: RecordedCalls, plain: Callable[..., object], self: torch.Tensor, data: torch.Tensor
) -> None:
    """`t.data = x`: what calls have read of t stays as it is."""
    if type(data) in _RECORDED:
        raise InPlaceError(
            f".data of a tensor can't become a recorded value: use copy_(), or a new name{at_line()}"
        )
    recorder.keep_content(self)
    plain(self, data)


_set_plain_data = _while_recording(_plain_data.__set__, _set_data)
_PATCHES.append(
    (torch.Tensor, "data", property(_while_recording(_plain_data.__get__, _lend_data), _set_plain_data))
)
stands_for(torch.Tensor, "requires_grad_")(_switch_gradient)
_set_requires_grad = _while_recording(_plain_requires_grad.__set__, _switch_gradient)
_PATCHES.append((torch.Tensor, "requires_grad", property(_plain_requires_grad.__get__, _set_requires_grad)))
_QUESTIONS = ("has_torch_function_unary", "has_torch_function_variadic")
_HANDLING = (torch.nn.functional, torch.functional, torch._tensor)
