"""Calls whose result or output shape depends on values: the instance waits for its inputs.

In: a function that can't be run on fake tensors (`x[mask]`, `nonzero`, `torch.equal`). Out: what it gives, with Values
where gradients can flow, recorded as an operation whose output types are known.

    x[mask]     # reads mask; records x[indices] with the indices as a constant

While a thread is inside a call of `torch.ops`, an instance that asks for a value is answered on the spot: pybind11
keeps a stack a thread, and ends the process when a greenlet leaves it out of order.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from fxbatch.errors import TraceError
from fxbatch.ir import Operation, Slot, Template, TensorType
from fxbatch.torch_private import tree_flatten, tree_map, tree_unflatten
from fxbatch.trace.arguments import Arguments
from fxbatch.trace.fake_run import Outcome
from fxbatch.trace.operations import FUNCTION, function_name
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import tracing
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import POSITIONS, Value

_BOUND = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))  # packets and overloads


class _Depth(threading.local):
    depth = 0


_inside = _Depth()


@contextlib.contextmanager
def inside_binding(func: Any) -> Iterator[None]:
    """Note that this thread is inside a call of func, if that is one of torch.ops."""
    if not isinstance(func, _BOUND):
        yield
        return
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def must_not_switch() -> bool:
    """Whether this thread is inside a binding."""
    return _inside.depth > 0


_WHOLE = (*POSITIONS, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_MASKS = (torch.bool, torch.uint8)


def call_with_values(func: Any, arguments: Arguments, key: Any, reason: str) -> Any:
    """The result of a call with these arguments, which have this key, asking for as few values as will do."""
    recorder, args, kwargs = arguments.recorder, arguments.args, arguments.kwargs
    with inside_binding(func):
        plain = _with_plain_integers(recorder, args, kwargs)
        if plain is not None:
            try:
                return recorder.call(func, *plain)
            except TypeError:  # it takes tensors there: `torch.equal(x, count)`
                return _run_on_values(func, arguments, key, reason)
        if func is torch.Tensor.__getitem__:
            index = _indices(recorder, args[1])
            return args[0][index] if type(index) is int else recorder.call(func, (args[0], index), kwargs)
        if func in (torch.masked_select, torch.Tensor.masked_select) and len(args) == 2:
            x, mask = args
            shape = torch.broadcast_shapes(x.shape, mask.shape)
            return x.expand(shape)[mask.expand(shape)]
        if func is torch.Tensor.__setitem__:
            return recorder.call(func, (args[0], _indices(recorder, args[1]), args[2]), kwargs)
        return _run_on_values(func, arguments, key, reason)


def _with_plain_integers(recorder: RecordedCalls, args: Any, kwargs: Any) -> Any:
    """Arguments with integer values of shape [] after the first replaced by Python ints: `x.view(n)`."""
    leaves, spec = tree_flatten((args, kwargs))
    scalars = [i for i, x in enumerate(leaves) if i and type(x) is Value and not x.shape]
    places = [i for i in scalars if leaves[i].dtype in _WHOLE]
    if not places:
        return None
    for i, real in zip(places, recorder.read([leaves[i] for i in places]), strict=True):
        leaves[i] = real.item()
    return tree_unflatten(leaves, spec)


def _indices(recorder: RecordedCalls, index: Any) -> Any:
    """An index with its masks replaced by the indices of what they select, positions by Python ints."""
    if type(index) is tuple:
        parts: list[Any] = []
        for part in index:
            found = _indices(recorder, part)
            parts.extend(found if type(found) is tuple else [found])
        return tuple(parts)
    if isinstance(index, torch.Tensor) and index.dtype in _MASKS and index.dim():
        (real,) = recorder.read([index]) if type(index) is Value else (index,)
        return tuple(real.nonzero(as_tuple=True))
    if type(index) is list and (mask := _mask(index)) is not None:
        return tuple(mask.nonzero(as_tuple=True))
    if type(index) is Value:
        index = recorder.read([index])[0]
    if isinstance(index, torch.Tensor) and not index.dim() and index.dtype in _MASKS:
        return bool(index)  # a new dimension of length one or zero
    if isinstance(index, torch.Tensor) and not index.dim() and index.dtype in POSITIONS:
        return int(index)
    return index


def _mask(index: list[Any]) -> torch.Tensor | None:
    """A mask given as a list of Python's bools, as a tensor. Nested lists mean different things to different versions
    of torch: TraceError."""
    leaf: Any = index
    while type(leaf) is list and leaf:
        leaf = leaf[0]
    if type(leaf) is not bool:
        return None
    if type(index[0]) is list:
        raise TraceError(
            f"an index of nested lists of bools: write torch.tensor(...) around it, or a tuple{at_line()}"
        )
    return torch.tensor(index)


def _run_on_values(func: Any, arguments: Arguments, key: Any, reason: str) -> Any:
    recorder = arguments.recorder
    real = recorder.read(arguments.values)
    template = arguments.template()
    shared = [s.resolve() for s in arguments.shared]
    with tracing(None), torch.no_grad():
        a, k = template.fill(input=real, shared=[s.detach() for s in shared])
        result = func(*a, **k)
    leaves, spec = tree_flatten(result)
    if not any(isinstance(x, torch.Tensor) for x in leaves):
        return result
    if not any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves):
        return tree_map(lambda x: recorder.constant(x) if isinstance(x, torch.Tensor) else x, result)
    types = tuple(TensorType.of(x) for x in leaves if isinstance(x, torch.Tensor))
    key = ("dependent", key, types)
    entry = recorder.functions.get(key)
    with recorder.table.lock:
        if entry is None:
            made = Operation(function_name(func), "function", func, FUNCTION)
            count = itertools.count()
            slots = tuple(Slot("output", next(count)) if isinstance(x, torch.Tensor) else x for x in leaves)
            new = (-1,) * len(types)
            outcome = Outcome(types, Template(slots, spec), tuple(t.differentiable for t in types), new, new)
            entry = recorder.signed(
                made, arguments.types(), arguments.shared, template, outcome, reason=reason
            )
            recorder.functions[key] = entry
    return recorder.emit(entry, arguments.ids())
