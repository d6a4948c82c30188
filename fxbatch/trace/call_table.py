"""Calls of functions that were met before, by a key that costs little: the way around `Arguments`.

The C extension settles what it has met in this minibatch; the rest, and all without it, is settled here.

In: a function with arguments that are Values, constants that are known already, plain data, and lists of Values.
Out: the row recorded, or None: then the call goes the long way, which remembers it here.

    result = settled_call(recorder, F.cross_entropy, (scores, label), {"reduction": "mean"})
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch

from fxbatch.trace.aliases import link_view, link_views
from fxbatch.trace.columns import ExtensionSwitch, _fast
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.table import Entry
from fxbatch.trace.values import Value

# Equal objects of these types are the same argument; floats are too, but for zeros and nans (see below).
_PLAIN = frozenset({NoneType, bool, int, str, torch.dtype, torch.device, EllipsisType})
_INDICES = frozenset({NoneType, int, EllipsisType})  # parts of an index, or of a shape
_WHOLE = (int, NoneType)


def settled_call(recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call that was met before; None where it is new."""
    if ExtensionSwitch.on:
        result = _fast.settled(recorder, func, args, kwargs)
        if result is not None:
            return result
    found = _key(recorder, func, args, kwargs)
    if found is None:
        return None
    entry = recorder.functions.get(found[0])
    if entry is None or not entry.holds():
        return None
    inputs = found[1]
    if entry.aliased:
        result = recorder.emit(entry, [v._value for v in inputs])
        link_settled(recorder, entry, result, inputs, args, kwargs)
        return result
    _remember_here(recorder, func, args, kwargs, entry)
    return recorder.emit(entry, [v._value for v in inputs])


def link_settled(
    recorder: RecordedCalls,
    entry: Entry,
    result: Any,
    inputs: Sequence[Value],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Note which outputs of a call are views of which inputs, as the long way does."""
    assert entry.outcome is not None
    func = entry.signature.operation.target
    again, call = functools.partial(recorder.call, func, args, kwargs), (func, args, kwargs)
    if entry.alone >= 0:
        link_view(result, inputs[entry.outcome.aliases[0]], again, call, 0)
    else:
        link_views(entry, result, inputs, again, call)


def remember_call(
    recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry
) -> None:
    """Calls like this one are recorded as `entry` from now on."""
    if not entry.aliased:  # the fast paths of a minibatch note no views
        _remember_here(recorder, func, args, kwargs, entry)
    found = _key(recorder, func, args, kwargs)
    if found is not None:
        recorder.functions[found[0]] = entry


def _remember_here(
    recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry
) -> None:
    """What the fast paths of this minibatch look at: operators of two Values, and functions in C."""
    if len(args) == 2 and type(args[0]) is Value and type(args[1]) is Value and not kwargs:
        recorder.met.add(func, recorder.mode, (args[0]._type, args[1]._type), entry)
    if ExtensionSwitch.on:
        _fast.remember(recorder, func, args, kwargs, entry)


def _key(
    recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Value]] | None:
    """(key, inputs); None for arguments that need a closer look. Types stand in the key before what
    they are types of, so that 1, 1.0 and True, or a value and a number, never make equal keys."""
    key: list[Any] = [settled_call, func, len(args)]
    inputs: list[Value] = []
    constants = recorder.constants
    for a in args if not kwargs else (*args, *kwargs.values()):
        kind = type(a)
        key.append(kind)
        if kind is Value:
            if a._recorder is not recorder:
                return None
            key.append(a._type)
            inputs.append(a)
        elif kind in _PLAIN:
            key.append(a)
        elif kind is float and a == a:
            key.append(a or repr(a))  # 0.0 and -0.0 differ
        elif kind is torch.Tensor:
            hit = constants.get(id(a))
            if hit is not None and (hit[2] is None or hit[2] == a._version):
                v = hit[0]
            else:  # a view may be one of a parameter; a buffer is a shared operand
                fresh = None if a._base is not None else recorder.constant(a)
                if fresh is None:
                    return None
                v = fresh
            key.append(v._type)
            inputs.append(v)
        elif kind is slice:
            if not _bounds(a):
                return None
            key += (a.start, a.stop, a.step)
        elif kind is list or kind is tuple:
            key.append(len(a))
            for v in a:
                inner = type(v)
                if inner is Value:
                    if v._recorder is not recorder:
                        return None
                    key.append(v._type)
                    inputs.append(v)
                elif inner in _INDICES:
                    key += (inner, v)
                elif inner is slice and _bounds(v):
                    key += (slice, v.start, v.stop, v.step)
                else:
                    return None
        else:
            return None
    if kwargs:
        key.extend(kwargs)
    return tuple(key), inputs


def _bounds(x: slice) -> bool:
    """Whether a slice is made of whole numbers."""
    return type(x.start) in _WHOLE and type(x.stop) in _WHOLE and type(x.step) in _WHOLE
