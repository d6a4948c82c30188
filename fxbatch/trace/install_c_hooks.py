"""The C extension and its Python twin: which of them records.

In: a switch. Out: operators of Value, `Recorder.emit` and the patched `nn.Module.__call__`, in C where the
extension was built, in Python (the reference) elsewhere.

    use_extension(False)      # all Python, from the next recording on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxbatch.torch_private import (
    any_autocast,
    function_mode_count,
    function_modes_enabled,
    handle_torch_function,
    mode_addresses,
    resizable_place,
    warning_handler_address,
)
from fxbatch.trace.aliases import link_outputs
from fxbatch.trace.columns import ExtensionSwitch, _fast
from fxbatch.trace.modules import traced_call
from fxbatch.trace.recorded_calls import Columns, RecordedCalls
from fxbatch.trace.state import ThreadModes
from fxbatch.trace.table import Entry
from fxbatch.trace.values import BINARY, Value, plain_new


def extension_available() -> bool:
    """Whether the C extension was built."""
    return _fast is not None


def use_extension(on: bool) -> None:
    """Record with the C extension, or with Python alone. Not while something is being recorded."""
    if on and not extension_available():
        raise RuntimeError("fxbatch was installed without its C extension")
    ExtensionSwitch.on = on
    if extension_available():
        _fast.recycle(on)
    for name, (func, method) in BINARY.items():
        setattr(Value, name, _fast.Method(func, method) if on else method)
    Value.__torch_function__ = _fast.torch_function if on else _TORCH_FUNCTION  # type: ignore[method-assign]


def module_call_method() -> Any:
    """What `nn.Module.__call__` is while some thread traces."""
    return _MODULE_CALL if ExtensionSwitch.on else traced_call


def handle_torch_function_method() -> Any:
    """What torch's Python functions call, while some thread traces, when they meet a subclass of Tensor."""
    return _fast.handle_torch_function if ExtensionSwitch.on else handle_torch_function


def _build_result(entry: Entry, outputs: Sequence[Any]) -> Any:
    assert entry.signature.result is not None
    return entry.signature.result.fill(output=outputs)


Entries = tuple[tuple[Any, str, Any], ...]  # owner, name, what is put there (None: nothing)


def put_attributes(entries: Entries, saved: list[Entries]) -> None:
    """Set attributes of classes and modules; what was there is appended to `saved` before, last first. In C the
    caches of a class are invalidated once, not once an attribute."""
    if ExtensionSwitch.on:
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
    if extension_available():
        _fast.quicken_modules(on and ExtensionSwitch.on and _TORCHS_OWN)


_TORCHS_OWN = torch.nn.Module.__getattr__.__module__ == torch.nn.modules.module.__name__
_TORCH_FUNCTION = Value.__dict__["__torch_function__"]

if extension_available():
    _fast.setup(
        {
            "Value": Value, "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "Module": torch.nn.Module,
            "dtype": torch.dtype, "device": torch.device, "Size": torch.Size, "Columns": Columns, "Entry": Entry,
            "ThreadModes": ThreadModes, "plain_new": plain_new, "build_result": _build_result,
            "constant": RecordedCalls.constant, "link_outputs": link_outputs,
            "torch_function": _TORCH_FUNCTION.__get__(None, Value), "handle_torch_function": handle_torch_function,
            "strided": torch.strided, "cpu": torch.device("cpu"), "is_grad_enabled": torch.is_grad_enabled,
            "any_autocast": any_autocast, "default_dtype": torch.get_default_dtype,
            "modes_enabled": function_modes_enabled, "inference": torch.is_inference_mode_enabled,
            "function_modes": function_mode_count,
        },
        warning_handler_address(), mode_addresses(),
    )  # fmt: skip
    _fast.find_resizable(*resizable_place())
    _MODULE_CALL = _fast.Method(None, traced_call)
    use_extension(True)
