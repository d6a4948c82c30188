"""What the user marks as one operation: the decorator, and how its calls are recorded.

In: functions, methods and module classes. Out: calls of one operation, whatever is inside.

    @operation
    def attend(query, keys):
        return torch.softmax(keys @ query, 0) @ keys
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxbatch.errors import BatchCoupledError, InPlaceError
from fxbatch.ir import Operation
from fxbatch.trace.aliases import link_views
from fxbatch.trace.arguments import Arguments
from fxbatch.trace.calls import Dependent, examined_function, function_entry
from fxbatch.trace.keys import OpaqueArgumentError
from fxbatch.trace.module_state import ExaminedFunction
from fxbatch.trace.modules import call_method
from fxbatch.trace.operations import MARKED, function_name
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import state, tracing
from fxbatch.trace.table import Entry
from fxbatch.trace.user_line import user_line

Marked = TypeVar("Marked", bound=Callable[..., Any])


def operation(target: Marked) -> Marked:
    """Batch a function, method or module class as one unit, whatever is inside it.

    The body must be a function of its tensor arguments, its plain arguments and (for methods and modules)
    the module's parameters and buffers. A body that needs values of tensors, or other objects, is traced
    through instead; `fxbatch.explain` says why.
    """
    if isinstance(target, type):
        if not issubclass(target, torch.nn.Module):
            raise TypeError(
                f"@operation takes a function, a method or a torch.nn.Module class, got {target!r}"
            )
        target.__fxbatch_operation__ = True  # type: ignore[attr-defined]  # read by the recorder
        return target
    if isinstance(target, torch.nn.Module):
        target.__fxbatch_operation__ = True  # type: ignore[assignment]  # one module object
        return target

    @functools.wraps(target)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if state.recorder is None:
            return target(*args, **kwargs)
        return call_marked(state.recorder, target, args, kwargs)

    marked.__fxbatch_operation__ = True  # type: ignore[attr-defined]  # read by tools
    return marked  # type: ignore[return-value]  # wraps keeps the signature


def call_marked(recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of an `@operation` function or method while tracing."""
    if args and isinstance(args[0], torch.nn.Module):
        return call_method(recorder, func, args, kwargs)
    recorder.sync_modes()
    arguments = Arguments(recorder)
    name = function_name(func)
    examined = examined_function(recorder, func)
    if examined.reason:
        recorder.table.note_traced_through(name, f"{examined.reason} (marked @operation)", user_line())
        return func(*args, **kwargs)
    try:
        key = ("marked", func, examined.state, arguments.key(args), arguments.key(kwargs) if kwargs else None)
    except OpaqueArgumentError as error:
        recorder.table.note_traced_through(name, f"{error} (marked @operation)", user_line())
        return func(*args, **kwargs)
    if not arguments.values:
        return func(*args, **kwargs)
    entry = recorder.functions.get(key)
    if entry is None:
        entry = _new_marked(recorder, key, examined, name, args, kwargs, arguments)
    if type(entry) is not Entry or entry.written:
        return func(*args, **kwargs)
    result = recorder.emit(entry, arguments.ids())
    if entry.aliased:
        again = functools.partial(call_marked, recorder, func, args, kwargs)
        link_views(entry, result, arguments.values, again, (func, args, kwargs))
    return result


def _new_marked(
    recorder: RecordedCalls,
    key: Any,
    examined: ExaminedFunction,
    name: str,
    args: Any,
    kwargs: Any,
    arguments: Arguments,
) -> Any:
    table = recorder.table
    with table.lock, tracing(None):
        entry = recorder.functions.get(key)
        if entry is None:
            try:
                made = Operation(name, "function", examined.target, MARKED)
                entry = function_entry(recorder, made, args, kwargs, arguments, examined)
            except (BatchCoupledError, InPlaceError):
                raise
            except (
                Exception  # noqa: BLE001 - raised or handed back elsewhere
            ) as error:  # the body runs again, traced through, and raises there what is the user's
                entry = Dependent(
                    f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                )
            if type(entry) is Dependent:
                table.note_traced_through(name, f"{entry.reason} (marked @operation)", user_line())
            recorder.functions[key] = entry
        return entry
