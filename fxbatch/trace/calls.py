"""Record one call of a function: the key, the signature at first sight, the row; or wait for the values that it needs.

In: a torch function, or one marked @operation, with arguments of which some are Values. Out: its result with Values, or
what the eager function would raise. What can't be run on fake tensors is given what it waits for; where gradients can
flow it is recorded with output types that are known.

    call_function(recorder, torch.add, (h, c), {})

    @operation                       # one operation, whatever is inside
    def attend(query, keys):
        return torch.softmax(keys @ query, 0) @ keys

    x[mask]     # reads mask; records x[indices] with the indices as a constant
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F

from fxbatch.errors import BatchCoupledError, InPlaceError, TraceError
from fxbatch.ir import Operation, Slot, Template, TensorSpec
from fxbatch.signature import Frozen
from fxbatch.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from fxbatch.trace.arguments import (
    Arguments,
    ArrayArgument,
    row_of_parameter,
    taker_of,
    view_of_shared,
    without_arrays,
)
from fxbatch.trace.bare_parameters import BareView
from fxbatch.trace.module_state import MANY_STATES, ExaminedFunction, keeps_changing
from fxbatch.trace.modules import call_module, first_line
from fxbatch.trace.one_sequence import PACKED, OneSequence
from fxbatch.trace.operations import (
    FUNCTION,
    LIFTS,
    LIFTS_FLOAT,
    MARKED,
    NEEDS_VALUES,
    WITHIN_RANGE,
    BodyError,
    BodyRun,
    CustomFunction,
    function_name,
    on_views,
    plain_function,
    row_at,
    take_at,
    where_by_bytes,
)
from fxbatch.trace.places import first_changed
from fxbatch.trace.plain_objects import OPERATORS, why_not_plain
from fxbatch.trace.python_numbers import MANY_NUMBERS, call_lifted, without_floats
from fxbatch.trace.reads import Reads
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import _fast, state, tracing
from fxbatch.trace.table import GIVES_ROW, GIVES_SAME, Entry, OpaqueArgumentError
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import COPIED_ROW, GETITEM, POSITIONS, SETITEM, Value, WrittenTensor, link_views
from fxbatch.trace.writes import (
    PURE_FORMS,
    call_pure,
    detach_in_place,
    rebind,
    set_row,
    stores_what_is_there,
    written_call,
    written_entry,
)


class OpaqueOperandError(TraceError, TypeError):
    """A torch function got a recorded tensor together with an object that is no plain data."""


NO_OUT = "{}: out= can't be recorded; use the result instead"
WRITES_TO_SHARED = (
    "writes to a parameter or buffer, which all instances share (as BatchNorm does in training): use eval(), or a "
    "normalisation without running statistics"
)


@dataclass(frozen=True)
class Known:
    """A call whose result the types alone tell: no call is recorded."""

    result: object


# What is asked of a recorded tensor is its type alone: the result of a real tensor is real.
LIKE: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    torch.Tensor.type_as: lambda x, v: x.to(v.device, v.dtype),
    torch.Tensor.to: lambda x, v: x.to(v.device, v.dtype),
    torch.Tensor.view_as: lambda x, v: x.view(v.shape),
    torch.Tensor.reshape_as: lambda x, v: x.reshape(v.shape),
}

UNFILLED: dict[object, Callable[..., object]] = {
    torch.Tensor.new_empty: torch.Tensor.new_zeros, torch.empty_like: torch.zeros_like,
}  # fmt: skip


def call_function(
    recorder: RecordedCalls,
    func: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    comes_as: tuple[object, tuple[object, ...], dict[str, object]] | None = None,
) -> object:
    """Record `func(*args, **kwargs)` and give its result with Values. comes_as: the call that this one stands for, by
    which it is found again."""
    recorder.sync_modes()
    func = plain_function(func)
    if func is torch.autograd.grad:
        raise TraceError(
            "torch.autograd.grad inside a per-instance forward: use torch.func.grad in a submodule, or in a function "
            f"with @fxbatch.operation{at_line()}"
        )
    if type(func) is CustomFunction:
        now = examined_function(recorder, func.cls)
        func = now.custom = now.custom or CustomFunction(func.cls, now)
    if func is not on_views and type(func) is not CustomFunction:
        args = cast(tuple[object, ...], _in_python(args))
    if (
        func in (GETITEM, SETITEM)
        and type(args[1]) is list
        and any(isinstance(x, torch.Tensor) for x in args[1])
    ):
        args = (args[0], tuple(args[1]), *args[2:])  # which it is to torch
    of_shared = func is SETITEM and type(args[2]) in (BareView, torch.Tensor)
    if of_shared and view_of_shared(recorder, cast(torch.Tensor, args[2])):
        args = (*args[:2], recorder.call(torch.clone, (args[2],), {}))  # a value, as others that are written
    asked = func
    if func in LIKE and len(args) == 2 and type(args[0]) is torch.Tensor and not args[0].requires_grad:
        return LIKE[func](args[0], args[1])  # type: ignore[arg-type]  # the other one is recorded
    if func is torch.Tensor.new and len(args) == 1 and isinstance(v := args[0], torch.Tensor):
        return torch.empty(0, dtype=v.dtype, device=v.device)  # real, to be `out` of a factory
    becomes_value = func is SETITEM and type(args[0]) is torch.Tensor  # and is no constant
    if _fast is not None and not comes_as and not becomes_value:
        before = _fast.recorded_before(recorder, func, args, kwargs)
        if before is not None:
            return before
    recorder.long_calls += 1
    if func is torch.Tensor.detach_ and type(args[0]) is Value:
        return detach_in_place(recorder, args[0])
    if func is torch.Tensor.new and len(args) > 1 and (type(args[1]) is torch.Size or type(args[-1]) is int):
        # A size is a shape there and a tuple is data; pytrees make tuples of sizes. What memory holds is nobody's
        # business, and zeros are the same in each run.
        func = torch.Tensor.new_zeros
    elif func in UNFILLED:
        func = UNFILLED[func]
    elif func in (torch.Tensor.new, torch.Tensor.new_tensor) and len(args) > 1 and _copies(func, args[1]):
        return _copied(recorder, func, *args, **kwargs)
    if func in PURE_FORMS:
        result = call_pure(recorder, func, args, kwargs)
        if result is not None:
            return result
    elif func is SETITEM and (stores_what_is_there(args) or set_row(recorder, args)):
        return None
    elif func in OneSequence.calls and not kwargs and (result := OneSequence()(func, args)) is not None:
        return result
    if len(args) == 2 and not kwargs and (func in LIFTS or func in LIFTS_FLOAT):
        args = tuple(x.item() if isinstance(x, np.generic) else x for x in args)
        result = call_lifted(recorder, func, args)
        if result is not None:
            return result
    elif func is GETITEM and (taker := taker_of(*args)) is not None:
        func = taker
    elif func in WITHIN_RANGE and any(type(x) is Value for x in args[1 if func is F.embedding else 0 :]):
        func = WITHIN_RANGE[func]
    elif func == torch.where and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.uint8:
        func = where_by_bytes
    is_custom = type(args[0] if func is on_views else func) is CustomFunction
    arguments = Arguments(recorder, args, kwargs, views=func is not on_views, users_code=is_custom)
    try:
        key = (func, *arguments.key())
    except OpaqueArgumentError as error:
        if type(error) is ArrayArgument and not is_custom:
            indexed = func in (GETITEM, SETITEM)
            args, kwargs = without_arrays(recorder, function_name(func), args, kwargs, indexed=indexed)
            return call_function(recorder, func, args, kwargs)
        if func in (GETITEM, SETITEM) and (index := _plain_index(args[1])) is not args[1]:
            return call_function(recorder, func, (args[0], index, *args[2:]), kwargs)
        raise OpaqueOperandError(
            f"{function_name(func)}() got a recorded tensor together with a {error.kind}: only tensors and plain data "
            f"can be recorded; call it in a function or module of tensors{at_line()}"
        ) from None
    if arguments.viewed:
        seen, comes_again = _through_views(recorder, func, args, kwargs)
        return call_function(recorder, on_views, *seen, (func, args, kwargs) if comes_again else None)
    entry = recorder.knowledge.functions.get(key)
    if entry is None:
        if kwargs.get("out") is not None:
            raise InPlaceError(NO_OUT.format(function_name(func)) + at_line())
        if getattr(torch.ops.higher_order, function_name(func), None) is func:
            raise TraceError(
                f"{function_name(func)} got a recorded tensor: operators that take functions can't be recorded; "
                f"write torch.cond, or an `if` or a loop in Python{at_line()}"
            )
        if any(isinstance(x, torch.Generator) for x in tree_leaves((args, kwargs))):
            return call_with_values(func, arguments, key, _DRAWS)
        reason = "an argument of it keeps changing" if _floats_keep_changing(recorder, key) else ""
        if type(func) is CustomFunction and not func.has_context_apart and recorder.modes().grad:
            reason = "its forward takes ctx, and torch differentiates it alone: write setup_context()"
        entry = _new_function(key, func, arguments, reason)
        if func in (take_at, row_at) and type(entry) is Entry:
            _say_what_it_shows(entry)
    if type(entry) is Known:
        return entry.result
    if type(entry) is str:  # why it needs values
        return call_with_values(func, arguments, key, entry)
    if entry.written:
        if arguments.rows:
            raise BatchCoupledError(f"{function_name(func)}: {WRITES_TO_SHARED}{at_line()}")
        result = written_call(arguments, entry)
        if arguments.leaves and type(arguments.leaves[0]) in (Value, WrittenTensor) and not arguments.copied:
            recorder.remember(asked, args, kwargs, entry)
        return result
    if entry.gives_first and arguments.begin_with_value:
        entry.written_as = GIVES_SAME  # `h.to(h.dtype)`, `h.contiguous()`: the user's own object
        recorder.remember(asked, args, kwargs, entry)
        return args[0]
    result = recorder.emit(entry, arguments.values)
    if entry.written_as == GIVES_ROW:
        result._flags |= COPIED_ROW
    if entry.aliases:
        link_views(entry, result, arguments.values, (entry.target, args, kwargs))
        comes_as = None
    if not arguments.copied:
        recorder.remember(*(comes_as or (asked, args, kwargs)), entry)
    return result


def _say_what_it_shows(entry: Entry) -> None:
    """A row chosen by a tensor is a copy that stands for a view: of its first input, or of what all instances share."""
    if len(entry.signature.inputs) > 1:
        entry.aliases = (0,)
    else:
        entry.written_as = GIVES_ROW


def _copied(recorder: RecordedCalls, func: Any, like: Any, *contents: object, **kwargs: object) -> object:
    """`like.new([v, 1.0])`, of which like gives type and device."""
    contents, kwargs = with_contents(recorder, contents, kwargs)
    return func(torch.empty(0, dtype=like.dtype, device=like.device), *contents, **kwargs)


def _copies(func: object, content: object) -> bool:
    """Whether numbers of values are copied, with no gradient to them; `h.new(v)` is a view of v."""
    is_view = func is torch.Tensor.new and type(content) is Value
    return not is_view and any(type(x) is Value for x in tree_leaves(content))


def with_contents(recorder: RecordedCalls, args: object, kwargs: object) -> Any:
    """Arguments with real tensors for the values in them, which are waited for."""
    values = [x for x in tree_leaves((args, kwargs)) if type(x) is Value]
    if not values:
        return args, kwargs
    real = dict(zip(map(id, values), recorder.read(values), strict=True))
    return tree_map(lambda x: _plain(real.get(id(x), x)), (args, kwargs))


def _plain(x: object) -> object:
    """A real tensor of shape [] as a Python number: factories don't take all of them as tensors."""
    return x.item() if isinstance(x, torch.Tensor) and not x.dim() and not x.requires_grad else x


def examined_function(recorder: RecordedCalls, func: object) -> ExaminedFunction:
    """What a user's function (or class) reads now: looked at once a minibatch, and anew where it changed. Its states
    with each content are kept, the last one first."""
    examined = recorder.knowledge.examined.get(id(func))
    if examined is not None and examined.reads.near():
        return examined
    contents = recorder.table.functions.setdefault(id(func), [])
    examined = contents[0] if contents else None
    changed = None if examined is None else first_changed(examined.reads.items)
    if examined is None or changed is not None:
        reads = Reads.of_function(func) if examined is None else examined.reads.again()
        again = next((x for x in contents if x.reads.key == reads.key and not x.reason), None)
        if again is not None:
            contents.remove(again)
            again.reads, again.guards = reads, reads.guards()
        else:
            many = contents and not reads.opaque and len(contents) >= MANY_STATES
            reason = keeps_changing("" if changed is None else changed.path) if many else reads.opaque
            again = ExaminedFunction(func, reads, len(contents), reason)
            if reason and examined is not None and examined.reason:
                contents.pop(0)
        contents.insert(0, again)
        examined = again
    recorder.has_examined(func, examined)
    return examined


def _floats_keep_changing(recorder: RecordedCalls, key: object) -> bool:
    """Whether a new call is one that was met with many other floats: building it once more would not pay."""
    structure, floats = without_floats(key)
    if not floats:
        return False
    met = recorder.knowledge.functions.setdefault(("floats", structure), {})
    met[floats] = None
    return len(met) > MANY_NUMBERS


def _through_views(
    recorder: RecordedCalls, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[tuple[object, ...], dict[str, object]], bool]:
    """The arguments of `on_views` for a call with views of shared operands, which are its inputs themselves; and
    whether C can tell such a call, by where the views lie."""
    leaves, spec = tree_flatten((args, kwargs))
    views, comes_again = [], True
    for i, t in enumerate(leaves):
        if not isinstance(t, torch.Tensor) or type(t) is Value:
            continue
        row = row_of_parameter(recorder, t)
        if row is not None:
            leaves[i], comes_again = row, type(t) is BareView  # others are looked up once many were met
        elif view_of_shared(recorder, t):
            base = leaves[i] = cast(torch.Tensor, t._base)
            views.append((i, *_place_in(base, t)))
    args, kwargs = tree_unflatten(leaves, spec)
    return ((func, tuple(views), *args), kwargs), comes_again


def _place_in(base: torch.Tensor, view: torch.Tensor) -> tuple[object, ...]:
    """Where and how a view lies in what it is a view of."""
    flipped = view.is_conj() != base.is_conj(), view.is_neg() != base.is_neg()
    return (tuple(view.shape), view.stride(), view.storage_offset(), *flipped)


def _new_function(key: object, func: Any, arguments: Arguments, reason: str) -> Any:
    called = arguments.args[0] if func is on_views else func
    target = Operation(function_name(called), "function", func, FUNCTION)
    examined: Any = called.examined if type(called) is CustomFunction else None
    # `detach` is what a value's `__torch_dispatch__` asks for, in which nothing can be traced with symbols.
    of_family = None if examined or reason or func in (on_views, torch.detach) else arguments
    make = functools.partial(function_entry, target, arguments, examined, reason)
    return arguments.recorder.new_entry(key, make, of_family, func)


def function_entry(
    called: Operation, arguments: Arguments, examined: ExaminedFunction | None = None, reason: str = ""
) -> Entry | Known | str:
    """The signature of a function call that was not met before, from one run on fake tensors.

    examined: what the code reads, where the function is the user's; reason: why it is not to be batched.
    """
    _refuse_running_statistics(called.target, arguments.args, arguments.kwargs)
    if called.target in PACKED and (len(arguments.args) != 9 or isinstance(arguments.args[3], (list, tuple))):
        return "reads batch sizes of a packed sequence"
    template, inputs = arguments.template(), arguments.types()
    if examined is not None:
        arguments.recorder.knowledge.places = None  # what is known of the function may be more then

    try:
        outcome = arguments.outcome(called.target, template)
    except BodyError as error:
        raise TraceError(f"{called.name}: {error}{at_line()}") from None
    except NEEDS_VALUES as error:
        return _why_values(error)
    except (MemoryError, torch.OutOfMemoryError):  # of this moment, not of the function
        raise
    except Exception as error:  # noqa: BLE001 - raised or handed back elsewhere
        _raise_as_eager(template, called.target, inputs, [s.resolve() for s in arguments.shared])
        return _why_values(error)
    if outcome.written_shared:
        raise BatchCoupledError(f"{called.name}: {WRITES_TO_SHARED}{at_line()}")
    if outcome.written:
        return written_entry(called, arguments, outcome, reason)
    if not outcome.outputs:
        return Known(outcome.result.fill(output=()))
    reason = examined.reason or reason if examined is not None else reason
    frozen = None if examined is None else Frozen(None, examined.reads)
    entry = arguments.recorder.signed(
        called, inputs, arguments.shared, template, outcome, reason=reason, frozen=frozen
    )
    entry.guards = None if examined is None else examined.guards
    return entry


def _refuse_running_statistics(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Functional batch_norm in training writes running statistics that are not declared as written."""
    if func not in (F.batch_norm, F.instance_norm):
        return
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    training = named.get("training", False) if func is F.batch_norm else named.get("use_input_stats", True)
    if named.get("running_mean") is not None and training:
        raise BatchCoupledError(
            f"{func.__name__} in training would change running statistics, which all instances share: use "
            f"training=False, or a normalisation without running statistics{at_line()}"
        )


def _raise_as_eager(
    template: Template, target: Any, inputs: Sequence[TensorSpec], shared: Sequence[torch.Tensor]
) -> None:
    """Raise what the function raises on real tensors of these types: a mistake in the user's call."""
    with torch.no_grad():
        real = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs]
        args, kwargs = template.fill(input=real, shared=[s.detach().clone() for s in shared])
        target(*args, **kwargs)


def _why_values(error: BaseException) -> str:
    kind = type(error).__name__
    if kind == "DynamicOutputShapeException":
        return "output shape depends on values"
    if kind == "DataDependentOutputException":
        return "result depends on values"
    lines = str(error).splitlines() or [kind]
    return f"can't be run on fake tensors: {lines[0][:120]}"


# Calls whose result or output shape depends on values (`x[mask]`, `nonzero`, `torch.equal`): the instance waits for its
# inputs. While a thread is inside a call of `torch.ops`, an instance that asks for a value is answered on the spot:
# pybind11 keeps a stack a thread, and ends the process when a greenlet leaves it out of order.


_INTEGERS = (*POSITIONS, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_MASKS = (torch.bool, torch.uint8)


_DRAWS = "it draws from a generator of its own, now"


def call_with_values(func: object, arguments: Arguments, key: object, reason: str) -> object:
    """The result of a call with these arguments, which have this key, asking for as few values as will do."""
    recorder, args, kwargs = arguments.recorder, arguments.args, arguments.kwargs
    is_binding = isinstance(func, OPERATORS)
    state.bindings += is_binding
    try:
        plain = _with_plain_integers(recorder, args, kwargs)
        if plain is not None:
            try:
                # `mask[i, j]`: a view of a real tensor
                if all(type(x) is not Value for x in tree_leaves(plain)):
                    return cast(Callable[..., object], func)(*plain[0], **plain[1])
                return recorder.call(func, *plain)
            except TypeError:  # it takes tensors there: `torch.equal(x, count)`
                return _run_on_values(func, arguments, key, reason)
        if func in (torch.equal, torch.Tensor.equal) and (equal := _equal(*args)) is not None:
            return equal
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
    finally:
        state.bindings -= is_binding


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    """`torch.equal`, which is asked for as other tests are; None where torch is to say what it thinks of them."""
    if a is b or a.dtype is not b.dtype or a.device != b.device:
        return None
    return a.shape == b.shape and bool(a.eq(b).all())


def _with_plain_integers(recorder: RecordedCalls, args: object, kwargs: object) -> Any:
    """Arguments with integer values of shape [] after the first replaced by Python ints: `x.view(n)`."""
    leaves, spec = tree_flatten((args, kwargs))
    scalars = [i for i, x in enumerate(leaves) if i and type(x) is Value and not x.shape]
    places = [i for i in scalars if leaves[i].dtype in _INTEGERS]
    if not places:
        return None
    for i, real in zip(places, recorder.read([leaves[i] for i in places]), strict=True):
        leaves[i] = real.item()
    return tree_unflatten(leaves, spec)


def _indices(recorder: RecordedCalls, index: object) -> object:
    """An index with its masks replaced by the indices of what they select, positions by Python ints."""
    if type(index) is tuple:
        parts: list[object] = []
        for part in index:
            index_part = _indices(recorder, part)
            parts.extend(index_part if type(index_part) is tuple else [index_part])
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


def _in_python(x: object) -> object:
    """Arguments with Python's integers in place of those of numpy's and of derived classes, of which each would be
    another call; the same where there are none."""
    if isinstance(x, np.integer) or (isinstance(x, int) and type(x) is not int and type(x) is not bool):
        return int.__index__(x) if isinstance(x, int) else int(x)
    if type(x) is slice:
        parts = (x.start, x.stop, x.step)
        return slice(*map(_in_python, parts)) if any(isinstance(y, np.integer) for y in parts) else x
    if type(x) is not tuple:
        return x
    new = tuple(map(_in_python, x))
    return x if all(map(operator.is_, new, x)) else new


def _plain_index(index: object) -> object:
    """An index with lists in place of ranges, and numbers in place of values within slices; the same where it has
    neither."""
    if type(index) is tuple:
        parts = tuple(map(_plain_index, index))
        return index if all(x is y for x, y in zip(parts, index, strict=True)) else parts
    if type(index) is range:
        return list(index)
    if type(index) is slice:
        ends = (index.start, index.stop, index.step)
        if any(isinstance(x, torch.Tensor) for x in ends):
            return slice(*(int(x) if isinstance(x, torch.Tensor) else x for x in ends))
    return index


def _mask(index: list[object]) -> torch.Tensor | None:
    """A mask given as a list of Python's bools, as a tensor. Nested lists mean different things to different versions
    of torch: TraceError."""
    leaf: object = index
    while type(leaf) is list and leaf:
        leaf = leaf[0]
    if type(leaf) is not bool:
        return None
    if type(index[0]) is list:
        raise TraceError(
            f"an index of nested lists of bools: write torch.tensor(...) around it, or a tuple{at_line()}"
        )
    return torch.tensor(index)


def _run_on_values(func: Any, arguments: Arguments, key: object, reason: str) -> object:
    recorder = arguments.recorder
    real = recorder.read(arguments.values)
    template = arguments.template()
    shared = [s.resolve() for s in arguments.shared]
    asked = recorder.knowledge.grad and any(x.requires_grad for x in (*arguments.values, *shared))
    writes = function_name(func).endswith("_")
    if writes and asked:
        raise TraceError(f"{function_name(func)} of what requires a gradient: {reason}{at_line()}")
    if writes:
        real = [x.clone() for x in real]  # of what has run others read as well
    with tracing(None), torch.no_grad():
        a, k = template.fill(input=real, shared=[s.detach() for s in shared])
        result = func(*a, **k)
    if writes:
        return _written(recorder, func, arguments.values, real, result)
    leaves, spec = tree_flatten(result)
    if not any(isinstance(x, torch.Tensor) for x in leaves):
        return result
    if not asked or not any(
        isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves
    ):
        return tree_map(lambda x: recorder.constant(x) if isinstance(x, torch.Tensor) else x, result)
    if reason == _DRAWS:  # and would again
        raise TraceError(f"{function_name(func)} of what requires a gradient: {reason}{at_line()}")
    types = tuple(TensorSpec.of(x) for x in leaves if isinstance(x, torch.Tensor))

    def make() -> Entry:
        called = Operation(function_name(func), "function", func, FUNCTION)
        count = itertools.count()
        slots = tuple(Slot("output", next(count)) if isinstance(x, torch.Tensor) else x for x in leaves)
        new = (-1,) * len(types)
        outcome = BodyRun(types, Template(slots, spec), tuple(t.differentiable for t in types), new, new)
        return recorder.signed(called, arguments.types(), arguments.shared, template, outcome, reason=reason)

    return recorder.emit(recorder.new_entry(("dependent", key, types), make), arguments.values)


def _written(
    recorder: RecordedCalls,
    func: object,
    values: Sequence[Value],
    real: Sequence[torch.Tensor],
    result: object,
) -> object:
    """What a call has given that writes in place, on copies of values that have run: these have their content now."""
    same: dict[int, Value] = {}
    for v, x in zip(values, real, strict=True):
        if x._version:
            content = recorder.constant(x)
            assert content is not None
            rebind(recorder, v, content, function_name(func))
            same[id(x)] = v
    leaf = lambda x: same[id(x)] if id(x) in same else recorder.constant(x)  # noqa: E731
    return tree_map(lambda x: leaf(x) if isinstance(x, torch.Tensor) else x, result)


Marked = TypeVar("Marked", bound=Callable[..., Any])


def operation(target: Marked) -> Marked:
    """Batch a function, a method or a module class as one unit, whatever is inside it.

    Its result must depend on its arguments (tensors and plain values) alone and, for methods and modules, on parameters
    and buffers. It must have no side effects. Code that reads values of tensors, or uses other objects, is recorded by
    its parts instead; `fxbatch.explain` says why. Outside of a decorated call it is the function that it was.

    Errors:
        TypeError: a class that is not a module, or an object that can't be called.

    Example:
        >>> @fxbatch.operation
        ... def similarity(query, key):  # two vectors of one instance
        ...     return (query * key).sum() / query.shape[-1] ** 0.5
        >>> @fxbatch.autobatch
        ... def scores(query, keys):
        ...     return torch.stack([similarity(query, key) for key in keys])
        >>> scores(torch.ones(2, 4), torch.ones(2, 3, 4))
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    if isinstance(target, type) and not issubclass(target, torch.nn.Module):
        raise TypeError(f"@operation takes a function, a method or a torch.nn.Module class, got {target!r}")
    if isinstance(target, (type, torch.nn.Module)):  # all modules of a class, or one
        target.__fxbatch_operation__ = True  # type: ignore[union-attr]  # read by the recorder
        return target

    @functools.wraps(target)
    def marked(*args: object, **kwargs: object) -> object:
        if state.recorder is None:
            return target(*args, **kwargs)
        return call_marked(state.recorder, target, args, kwargs)

    marked.__fxbatch_operation__ = True  # type: ignore[attr-defined]  # read by tools
    return marked  # type: ignore[return-value]  # wraps keeps the signature


def call_marked(
    recorder: RecordedCalls, func: Any, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """A call of an `@operation` function or method while tracing."""
    if args and isinstance(args[0], torch.nn.Module):
        return call_module(recorder, args[0], args[1:], kwargs, func)
    recorder.sync_modes()
    arguments, examined = Arguments(recorder, args, kwargs), examined_function(recorder, func)
    key, reason = None, examined.reason or why_not_plain(args, kwargs)
    if not reason:
        try:
            key = ("marked", func, examined.state, *arguments.key())
        except OpaqueArgumentError as error:
            reason = str(error)
    if reason:
        _note_marked(recorder, func, reason)
    if reason or not arguments.values:
        return func(*args, **kwargs)
    entry = recorder.knowledge.functions.get(key)
    if entry is None:
        entry = recorder.new_entry(key, functools.partial(_marked_entry, examined, arguments))
    if type(entry) is not Entry or entry.written:
        return func(*args, **kwargs)
    result = recorder.emit(entry, arguments.values)
    if entry.aliases:
        again = functools.partial(call_marked, recorder, func, args, kwargs)
        link_views(entry, result, arguments.values, (func, args, kwargs), again)
    return result


def _note_marked(recorder: RecordedCalls, func: object, reason: str) -> None:
    recorder.table.note_traced_through(function_name(func), f"{reason} (marked @operation)")


def _marked_entry(examined: ExaminedFunction, arguments: Arguments) -> object:
    """As `function_entry`, of an `@operation` function."""
    called = Operation(function_name(examined.target), "function", examined.target, MARKED)
    try:
        entry = function_entry(called, arguments, examined)
    except (BatchCoupledError, InPlaceError):
        raise
    except Exception as error:  # noqa: BLE001 - the body runs again, traced through, and raises there
        entry = first_line(error)
    if type(entry) is str:
        _note_marked(arguments.recorder, examined.target, entry)
    return entry
