"""Calls of functions that were met before, by a key that costs little: the way around `Arguments`.

The C extension settles what it has met in this minibatch; the rest, and all without it, is settled here.

In: a function with arguments that are Values, constants that are known already, plain data, and lists of Values.
Out: the row recorded, or None: then the call goes the long way, which remembers it here.

    result = settled_call(recorder, F.cross_entropy, (scores, label), {"reduction": "mean"})
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch

from fxbatch.trace.columns import Switch, _fast
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.table import Entry
from fxbatch.trace.values import Value

# Equal objects of these types are the same argument; floats are too, but for zeros and nans (see below).
_PLAIN = frozenset({NoneType, bool, int, str, torch.dtype, torch.device})


def settled_call(recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call that was met before; None where it is new."""
    if Switch.on:
        result = _fast.settled(recorder, func, args, kwargs)
        if result is not None:
            return result
    found = _key(recorder, func, args, kwargs)
    if found is None:
        return None
    entry = recorder.functions.get(found[0])
    if entry is None or not entry.holds():
        return None
    _remember_here(recorder, func, args, kwargs, entry)
    return recorder.emit(entry, found[1])


def remember_call(
    recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry
) -> None:
    """Calls like this one are recorded as `entry` from now on."""
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
    if Switch.on:
        _fast.remember(recorder, func, args, kwargs, entry)


def _key(
    recorder: RecordedCalls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[int]] | None:
    """(key, ids of the inputs); None for arguments that need a closer look. Types stand in the key before what
    they are types of, so that 1, 1.0 and True, or a value and a number, never make equal keys."""
    key: list[Any] = [settled_call, func, len(args)]
    ids: list[int] = []
    constants = recorder.constants
    for a in args if not kwargs else (*args, *kwargs.values()):
        kind = type(a)
        key.append(kind)
        if kind is Value:
            if a._recorder is not recorder:
                return None
            key.append(a._type)
            ids.append(a._value)
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
            ids.append(v._value)
        elif kind is list or kind is tuple:
            key.append(len(a))
            for v in a:
                if type(v) is not Value or v._recorder is not recorder:
                    return None
                key.append(v._type)
                ids.append(v._value)
        else:
            return None
    if kwargs:
        key.extend(kwargs)
    return tuple(key), ids
