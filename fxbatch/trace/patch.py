"""What is changed in torch while some thread traces, and put back afterwards, exceptions or not.

with patched():
    ...             # nn.Module calls, custom autograd functions and torch.tensor know Values
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from fxbatch.errors import TraceError
from fxbatch.torch_private import let_dynamo_read_torch, tree_leaves, tree_map
from fxbatch.trace.fast_path import (
    Entries,
    handle_torch_function_method,
    module_call_method,
    put_attributes,
    quicken_modules,
)
from fxbatch.trace.location import at_line
from fxbatch.trace.state import state
from fxbatch.trace.transforms import TRANSFORMS
from fxbatch.trace.values import Value

# torch.fx changes nn.Module too while it traces, and puts back what it found. Who has it trace holds this, so that
# of two threads none puts back what the other had put there. Re-entrant: the collector may end a forgotten use.
patching = threading.RLock()
_uses: set[int] = set()  # ids of the uses under way
_saved: list[Entries] = []  # what was there before, while something is patched


class patched:
    """Patch torch while inside; nested and concurrent uses share one patch. Each is ended once: at the latest when
    nobody holds it any more, for an interrupt may strike the clean-up itself."""

    def __enter__(self) -> None:
        try:
            with patching:
                _uses.add(id(self))
                if not _saved:
                    let_dynamo_read_torch()
                    put_attributes(_entries(handle_torch_function_method(), module_call_method()), _saved)
                    quicken_modules(True)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Put back what was there, if this is the last use."""
        with patching:
            _uses.discard(id(self))
            if not _uses and _saved:
                quicken_modules(False)
                put_attributes(_saved[0], [])
                _saved.clear()

    def __exit__(self, *_: object) -> None:
        self.end()

    __del__ = end


@functools.cache
def _entries(handle: Any, module_call: Any) -> Entries:
    handles = tuple((m, "handle_torch_function", handle) for m in _HANDLING)
    return ((_Module, "__call__", module_call), *_PATCHES, *handles)


class CustomFunction:
    """A `torch.autograd.Function` as a plain function: `CustomFunction(cls)(x)` is `cls.apply(x)`."""

    def __init__(self, cls: type[torch.autograd.Function]) -> None:
        self.cls = cls
        self.__name__ = cls.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def __reduce__(self) -> Any:
        return custom_function, (self.cls,)


@functools.cache
def custom_function(cls: type[torch.autograd.Function]) -> CustomFunction:
    """The one CustomFunction of a class."""
    return CustomFunction(cls)


_apply = torch.autograd.Function.__dict__["apply"].__func__


def _traced_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = state.recorder
    if recorder is not None and any(type(x) is Value for x in tree_leaves((args, kwargs))):
        return recorder.call(custom_function(cls), args, kwargs)
    return _apply(cls, *args, **kwargs)


def _with_real_tensors(func: Any) -> Any:
    """`torch.tensor` and `as_tensor`: copies of contents, so Values inside are read."""

    def made(*args: Any, **kwargs: Any) -> Any:
        recorder = state.recorder
        if recorder is not None:
            found = [x for x in tree_leaves((args, kwargs)) if type(x) is Value]
            if found:
                real = dict(zip(map(id, found), recorder.read(found), strict=True))
                args, kwargs = tree_map(lambda x: _plain(real.get(id(x), x)), (args, kwargs))
        return func(*args, **kwargs)

    return functools.wraps(func)(made)


def _plain(x: Any) -> Any:
    """A real tensor of shape [] as a Python number: factories don't take all of them as tensors."""
    return x.item() if isinstance(x, torch.Tensor) and not x.dim() and not x.requires_grad else x


_as_tensor = torch.as_tensor


def _traced_as_tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
    if type(data) is Value and state.recorder is not None:
        return data.to(*args, **kwargs) if args or kwargs else data
    return _real_as_tensor(data, *args, **kwargs)


_real_as_tensor = _with_real_tensors(_as_tensor)


def _invalidating(func: Any) -> Any:
    """A method that changes what a module is: modules are looked at again at their next call."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = func(self, *args, **kwargs)
        if state.recorder is not None:
            state.recorder.forget_modules()
        return result

    return functools.wraps(func)(method)


_setattr = torch.nn.Module.__setattr__


def _traced_setattr(self: torch.nn.Module, name: str, value: Any) -> None:
    recorder = state.recorder
    if recorder is None:
        return _setattr(self, name, value)
    if type(value) is Value:
        if name in self.__dict__.get("_buffers", ()) or name in self.__dict__.get("_parameters", ()):
            raise TraceError(
                f"{type(self).__name__}.{name} is shared by all instances: it can't be set to the "
                "value of one"
                f"{at_line()}"
            )
        object.__setattr__(self, name, value)
        return None
    if name == "training" or isinstance(value, (torch.Tensor, torch.nn.Module)):
        recorder.forget_modules()
    return _setattr(self, name, value)


_Module = torch.nn.Module
_HANDLING = (torch.nn.functional, torch.functional, torch._tensor)
_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (_Module, "__setattr__", _traced_setattr),
    *(
        (_Module, name, _invalidating(_Module.__dict__[name]))
        for name in (
            "train", "_apply", "register_forward_hook", "register_forward_pre_hook",
            "register_full_backward_hook", "register_full_backward_pre_hook", "register_buffer",
            "register_parameter", "add_module",
        )
    ),
    (torch.autograd.Function, "apply", classmethod(_traced_apply)),
    *(
        (torch, name, _with_real_tensors(getattr(torch, name)))
        for name in ("tensor", "full", "zeros", "ones", "empty", "rand", "randn", "arange", "linspace", "eye")
    ),
    (torch, "as_tensor", _traced_as_tensor),
    *TRANSFORMS,
)  # fmt: skip
