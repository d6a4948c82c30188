"""Arguments of a call: which leaves are tensors, which of these are rows of parameters, and the whole key of the rest.

In: args and kwargs with Values, real tensors and static leaves in nested containers. Out: the input values,
the shared operands, and a key that is equal exactly for calls of equal structure, types and static arguments.

    found = Arguments(recorder, (h, 2), {})
    found.key()                      # and from here on found.values == [h]
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fxbatch.errors import TraceError
from fxbatch.ir import SharedOperand, Slot, Template, TensorSpec
from fxbatch.torch_private import (
    DisableTorchFunctionSubclass,
    inside_functorch,
    is_pytree_node,
    memory_is_real,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from fxbatch.trace.bare_parameters import BARE, VIEW_KEY, BareParameter, BareView
from fxbatch.trace.operations import (
    IN_C,
    BodyRun,
    is_torchs_own,
    named_functions,
    row_at,
    run_on_fakes,
    take_at,
)
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import _fast, state
from fxbatch.trace.table import ByIdentity, Entry, OpaqueArgumentError, static_key
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import (
    COPIED_ROW,
    GETITEM,
    Value,
    WrittenTensor,
    is_position,
    new_value,
    refresh,
    value_of,
)

# Rows of parameters that are chosen in Python (`self.embed.weight[word]`, `transitions[a, b]`) become look-ups with
# the row's number as an input, so that calls with other rows share their launches. A parameter whose rows are few (one
# a gate, one a layer) stays as it is, until more than these were met; matrices always, since a product with one matrix
# for all calls is worth more than a shared launch.
MANY_ROWS = 4
_TABLE = -1  # of keys of `row_calls`: a parameter's, in C as well


def take_parameter_row(parameter: torch.Tensor, row: torch.Tensor, leading: int) -> torch.Tensor:
    """Row `row` of a parameter whose `leading` first dimensions are taken as one."""
    shape = parameter.shape[leading:]
    return F.embedding(row, parameter.reshape(-1, shape.numel())).reshape(shape)


def row_of_parameter(recorder: RecordedCalls, t: torch.Tensor) -> Any:
    """The value of a real tensor that is one of many rows of a parameter or buffer; None for others."""
    if type(t) is BareView and (shown := vars(t).get(VIEW_KEY)) is not None:
        return shown if type(shown) is Value else None
    base = t._base
    if base is None:
        return None
    if t.dim() > 1:
        recorder.views_met.setdefault(id(base), []).append(t)
        return None
    key = (
        id(base), t.storage_offset(), t.stride(), t.shape, t.dtype, t.grad_fn is None, t.is_conj(),
        t.is_neg(), recorder.knowledge.mode,
    )  # fmt: skip
    value = recorder.parameter_rows.get(key)
    if value is None:
        row = _row(recorder, t, base)
        if row is None:
            recorder.views_met.setdefault(id(base), []).append(t)
            return None
        value = recorder.parameter_rows[key] = _looked_up(recorder, base, row, base.dim() - t.dim())
    return value


def _looked_up(recorder: RecordedCalls, parameter: torch.Tensor, row: int, leading: int) -> Any:
    args = parameter, recorder.number(row, torch.int64, parameter.device), leading
    value = None if _fast is None else _fast.recorded_before(recorder, take_parameter_row, args, {})
    return recorder.call(take_parameter_row, args, {}) if value is None else value


def row_of_table(recorder: RecordedCalls, table: torch.Tensor, index: int) -> Value | None:
    """`table[index]` of a parameter `[n, d]` of which many rows were looked up; None for others. C finds those
    met before in a recording."""
    table_call = recorder.row_calls.get((_TABLE, id(table), recorder.knowledge.mode))
    if table_call is None or not -table_call[1] <= index < table_call[1]:
        return None
    entry, n, numbers = table_call
    row = index + n if index < 0 else index
    number, kind = numbers.get(row), entry.signature.inputs[0]
    if number is None:
        number = numbers[row] = recorder.number(row, kind.dtype, kind.device)._value
    type_id = recorder.table.number(kind.dtype, kind.device).types[0]
    v: Value = recorder.emit(entry, (new_value(recorder, number, type_id, 0),))
    v._flags |= COPIED_ROW
    return v


def _note_table(recorder: RecordedCalls, table: torch.Tensor) -> None:
    """Rows of a parameter are looked up by their numbers from now on, and no view of it is made."""
    number = recorder.number(0, torch.int64, table.device)
    entry = _entry_of(recorder, take_parameter_row, (table, number, 1), {})
    if entry is not None:
        numbers = recorder.index_numbers.setdefault(table.device, {})
        recorder.row_calls[_TABLE, id(table), recorder.knowledge.mode] = entry, len(table), numbers


def _is_by_number(args: tuple[object, ...]) -> bool:
    """Whether an index of a parameter is a number."""
    return len(args) == 2 and type(args[0]) is BareParameter and type(args[1]) is int


def _row(recorder: RecordedCalls, t: torch.Tensor, base: torch.Tensor) -> int | None:
    """The row's number, where t is a whole row of a parameter with many of them."""
    leading, width = base.dim() - t.dim(), t.numel()
    if (
        leading < 1
        or not width
        or t.layout is not torch.strided
        or not base.is_contiguous()
        or t.dtype != base.dtype
        or t.shape != base.shape[leading:]
        or not t.is_contiguous()
        or t.is_conj() != base.is_conj()
        or t.is_neg() != base.is_neg()
        or not gradients_go_through(recorder, t)
    ):
        return None
    shared = recorder.shared_operand(base)
    row, rest = divmod(int(t.storage_offset()) - int(base.storage_offset()), width)
    if shared is None or rest or base.is_meta:
        return None
    with recorder.table.lock:
        met = recorder.table.parameter_rows.setdefault((shared.key, leading), set())
        if len(met) <= MANY_ROWS:
            met.add(row)
        return row if len(met) > MANY_ROWS else None


def gradients_go_through(recorder: RecordedCalls, view: torch.Tensor) -> bool:
    """Whether a view of a parameter takes part in gradients as the parameter does: not one made under `no_grad`."""
    assert view._base is not None
    return not (recorder.knowledge.grad and view._base.requires_grad) or view.grad_fn is not None


def view_of_shared(recorder: RecordedCalls, t: torch.Tensor) -> bool:
    """Whether a real tensor is a view of a parameter or buffer, of the same dtype."""
    if type(t) is Value or t.layout is not torch.strided:
        return False
    base = t._base
    return (
        base is not None
        and base.dtype == t.dtype
        and recorder.shared_operand(base) is not None
        and gradients_go_through(recorder, t)
    )


class ArrayArgument(OpaqueArgumentError):
    """A numpy array is among the arguments: a tensor to torch's functions, data to users' code."""


def without_arrays(
    recorder: RecordedCalls, name: str, args: tuple[object, ...], kwargs: dict[str, object], *, indexed: bool
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments with tensors in place of numpy arrays.

    Arithmetic with an array is numpy's in a plain loop, which has other rules than torch for the type of the result:
    where types differ and are not all floating-point, TypeError. indexed: the array is an index.
    """
    leaves, spec = tree_flatten((args, kwargs))
    leaves_as_tensors = [torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in leaves]
    types = [
        recorder.type_of(x) if type(x) is Value else x
        for x in leaves_as_tensors
        if isinstance(x, torch.Tensor)
    ]
    first = types[0].dtype
    alike = first.is_floating_point and all(x.dtype == first for x in types)
    floats = all(x.dtype.is_floating_point and len(x.shape) for x in types)
    if not (indexed or alike or floats):
        raise TypeError(
            f"{name} got a recorded tensor and a numpy array of another type "
            f"({', '.join(str(x.dtype) for x in types)}), for which numpy and torch have different rules: "
            "write torch.from_numpy(array)"
        )
    as_tensors: tuple[tuple[object, ...], dict[str, object]] = tree_unflatten(leaves_as_tensors, spec)
    return as_tensors


class Arguments:
    """The arguments of one call, and the tensors among them in pytree order."""

    __slots__ = (
        "_template", "args", "copied", "first_shared", "kwargs", "leaves", "recorder", "rows", "shared", "slots",
        "users_code", "values", "viewed", "views",
    )  # fmt: skip

    def __init__(
        self,
        recorder: RecordedCalls,
        args: tuple[Any, ...],
        kwargs: dict[str, object],
        *,
        views: bool = False,
        users_code: bool = False,
    ) -> None:
        self.recorder = recorder
        self.args, self.kwargs = args, kwargs
        self.first_shared = 0  # how many shared operands are the called module's own, before these
        self.views = views  # whether to look for views of shared operands, such as `weight.T` ...
        self.viewed = False  # ... and whether there was one
        self.users_code = users_code  # is called, to which members of enumerations are not their numbers
        self.copied = False  # whether a parameter, or a view of one, was taken for what it holds now
        self.rows = False  # whether there was a row of a parameter that is looked up
        self.values: list[Value] = []  # one an input
        self.leaves: list[torch.Tensor] = []  # the user's tensor for each input
        self.shared: list[SharedOperand] = []
        self.slots: list[Slot] = []  # one a tensor leaf
        self._template: Template | None = None  # their template, once it was asked for

    def key(self) -> tuple[object, object]:
        """The key of all arguments, asked for once; OpaqueArgumentError for a leaf that is no plain data."""
        return self._key(self.args), self._key(self.kwargs) if self.kwargs else None

    @property
    def begin_with_value(self) -> bool:
        """Whether the first argument is a value, and what is read first."""
        return bool(self.args) and type(self.args[0]) is Value and self.values[0] is self.args[0]

    def _key(self, x: Any) -> object:
        kind = type(x)
        if kind is Value:
            real = None if x._recorder is self.recorder else x._recorder.tensor(x)
            return self._input(x, x) if real is None else self._real(real)
        if kind is tuple or kind is list:
            return (kind, *[self._key(y) for y in x])
        if kind is WrittenTensor:
            v = value_of(x)
            return self._input(v, v)
        if isinstance(x, torch.Tensor):
            return self._real(x)
        if kind is dict or kind is OrderedDict:
            return (kind, tuple(x), *[self._key(y) for y in x.values()])
        if isinstance(x, tuple) and hasattr(kind, "_fields"):
            return (kind, *[self._key(y) for y in x])
        if isinstance(x, np.ndarray):
            raise ArrayArgument(x)
        if is_pytree_node(kind) and kind is not torch.Size:
            leaves, spec = tree_flatten(x)
            return (kind, repr(spec), *[self._key(y) for y in leaves])
        return (kind, ByIdentity(x)) if self.users_code and isinstance(x, enum.Enum) else static_key(x)

    def _input(self, v: Value, leaf: torch.Tensor) -> int:
        if v._recorder is not self.recorder:
            raise TraceError(
                "a value of another minibatch (or of a finished call) was used: values live for one decorated call; "
                f"keep real results instead, for instance with .detach() after the call{at_line()}"
            )
        self.slots.append(Slot("input", len(self.values)))
        self.values.append(refresh(v))
        self.leaves.append(leaf)
        return v._type

    def _real(self, t: torch.Tensor) -> object:
        shared = self.recorder.shared_operand(t)
        if shared is None:
            row = row_of_parameter(self.recorder, t)
            if row is not None:
                self.rows = True
                return self._input(row, t)
            if self.views and view_of_shared(self.recorder, t):
                self.viewed = True
                return None
            self.copied = self.copied or isinstance(t, (BareView, torch.nn.Parameter))
            v = self.recorder.constant(t)
            assert v is not None
            return self._input(v, t)
        self.slots.append(Slot("shared", len(self.shared)))
        self.shared.append(shared)
        return ("shared", shared.key, tuple(t.shape), t.dtype, t.device)

    def template(self, *before: object) -> Template:
        """`(args, kwargs)` with slots in place of tensors. before: plain arguments in front of these."""
        if self._template is not None and not before:
            return self._template
        leaves, spec = tree_flatten(((*before, *self.args), self.kwargs))
        slots = iter(self.slots)
        filled = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                slot = next(slots)
                is_input = slot.kind == "input"
                filled.append(slot if is_input else Slot("shared", slot.index + self.first_shared))
            else:
                filled.append(leaf)
        assert next(slots, None) is None, "arguments flatten in another order than their key"
        template = Template(tuple(filled), spec)
        self._template = None if before else template
        return template

    def outcome(self, target: Callable[..., object], template: Template) -> BodyRun:
        """One run of a function on fake tensors of these types: its results, and what it wrote to."""

        def body(tensors: object, shared: object) -> object:
            args, kwargs = template.fill(input=tensors, shared=shared)
            return target(*args, **kwargs)

        operands = [s.resolve() for s in self.shared]
        plain = is_torchs_own(target) and all(map(is_torchs_own, filter(callable, self.args[:1])))
        return run_on_fakes(body, self.types(), operands, grad=self.recorder.knowledge.grad, plain=plain)

    def types(self) -> tuple[TensorSpec, ...]:
        """The types of the inputs."""
        return tuple(self.recorder.type_of(v) for v in self.values)


# -- what functions give that meet bare parameters (`bare_parameters`) and no value: values, where they are recorded

_NESTS = frozenset((tuple, list, dict))
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype))
# What says something of a tensor, and computes nothing.
TELLING = named_functions(
    "dim ndimension size stride storage_offset numel nelement element_size is_contiguous is_conj is_neg is_complex "
    "is_floating_point is_signed is_inference is_tensor data_ptr is_same_size untyped_storage storage get_device "
    "is_set_to dim_order _is_view is_pinned is_shared type item tolist numpy backward register_hook retain_grad "
    "__len__ __hash__ __repr__ __format__ __deepcopy__ __reduce_ex__ __bool__ __int__ __float__ __index__ __array__ "
    "__iter__ __contains__ equal allclose"
)
# What is asked most often of a parameter: answered without a look at who asks.
TOLD = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ["dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_leaf"]
)
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = named_functions("__setitem__ " + " ".join(f"__i{x}__" for x in _OPERATORS.split()))
_OF_VALUES = Value.__dict__["__torch_function__"].__get__(None, Value)


def bare_function(func: object, types: Any, args: Any = (), kwargs: Any = None) -> object:
    """`__torch_function__` of bare parameters and their views: a value where the call is recorded, else the function's
    own result."""
    if Value in types:
        return _OF_VALUES(func, types, args, kwargs)
    recorder, kwargs = state.recorder, kwargs or {}
    if (
        func in TOLD
        or recorder is None
        or not recorder.heard.changed
        or inside_functorch()
        or not memory_is_real()
    ):
        return _as_tensors(func, args, kwargs)
    recorder.sync_modes()
    if func is GETITEM and len(args) == 2 and taker_of(*args) is None:
        args = args[0], _by_numbers(recorder, args[1])
    if func is GETITEM and _is_by_number(args) and (row := row_of_table(recorder, *args)) is not None:
        return row
    heard, mode = recorder.heard, recorder.knowledge.mode
    key = None if kwargs or not args or type(args[0]) not in BARE else _key(func, args, mode)
    if key:
        view = heard.again.get(key)
        if view is not None:
            return view
    with DisableTorchFunctionSubclass():
        recorded = _is_recorded(recorder, func, args, kwargs)
    if recorded:
        return recorder.call(func, args, kwargs)
    return _of_parameters(recorder, key, func, args, kwargs)


for _kind in BARE:  # C's stands in its place where there is C (`torch_patches`)
    _kind.__torch_function__ = staticmethod(bare_function)  # type: ignore[method-assign]


def _entry_of(
    recorder: RecordedCalls, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> Entry | None:
    """What this call was recorded as; None where it was not."""
    with DisableTorchFunctionSubclass():
        entry = recorder.knowledge.functions.get((func, *Arguments(recorder, args, kwargs).key()))
    return entry if type(entry) is Entry else None


def _key(func: object, args: tuple[object, ...], mode: int) -> tuple[object, ...] | None:
    """What a view is asked for again by; C finds those by plain numbers, slices among them."""
    if all(map(_is_index, args[1:])):
        return func, id(args[0]), _hashable(args[1:]), mode
    plain = all(map(_is_plain, args[1:]))
    return (func, id(args[0]), args[1:], tuple(map(type, args)), mode) if plain else None


MANY = 8  # times that something was computed of the same parameters before it is recorded


def _of_parameters(
    recorder: RecordedCalls, key: object, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """What a function gives of parameters alone. The same for the MANY-th time, as for each node of an instance (a
    normalised embedding, a softmax over weights): a value, which is computed once."""
    often, counts = None, recorder.table.computed
    if (
        func is not torch.Tensor.detach
        and _is_torchs_own(func)
        and "out" not in kwargs
        and all(map(_is_fixed, (*args, *kwargs.values())))
    ):
        often = func, tuple(id(x) if isinstance(x, torch.Tensor) else x for x in args), tuple(kwargs.items())
    count = counts.get(often, 0)
    if count >= MANY and recorder.watches_operands:
        value = recorder.call(func, args, kwargs)
        entry = _entry_of(recorder, func, args, kwargs)
        if entry is not None and type(value) is Value and _is_one(entry):
            entry.once = 1
            recorder.once.setdefault(entry.sid, value._value)
        return value
    result: Any = _heard_views(recorder, key, func, args, kwargs)
    # What is a number, or no floating point, is often read, for which an instance would have to wait.
    new = type(result) is torch.Tensor and result.is_floating_point() and result.numel() > 1
    if often is not None and new and result._base is None and len(counts) < recorder.table.limit:
        counts[often] = count + 1
    return result


def _is_fixed(x: object) -> bool:
    return type(x) is BareParameter or type(x) is float or _is_plain(x)


def _is_one(entry: Entry) -> bool:
    """Whether all calls of an entry give the same in a recording."""
    signature = entry.signature
    return (
        not (signature.inputs or entry.aliases or entry.written or signature.operation.random)
        and entry.single
    )


def _is_plain(x: object) -> bool:
    return type(x) in _PLAIN or (type(x) is tuple and all(type(i) is int for i in x))


def _is_index(x: object) -> bool:
    """Whether it is an index of plain numbers, slices among them."""
    if type(x) is slice:
        return all(i is None or type(i) is int for i in (x.start, x.stop, x.step))
    return type(x) in (int, type(None), type(...)) or (type(x) is tuple and all(map(_is_index, x)))


def _hashable(x: object) -> object:
    """An index as a part of a key: slices have no hash before Python 3.12."""
    if type(x) is slice:
        return slice, x.start, x.stop, x.step
    return tuple(map(_hashable, x)) if type(x) is tuple else x


def _by_numbers(recorder: RecordedCalls, index: object) -> object:
    """An index of positions, of which some are the instance's own tensors, as numbers; others as they are."""
    if type(index) is int or not (recorder.watches_operands and recorder.can_read()):
        return index
    parts = index if type(index) is tuple else (index,)
    numbers = tuple([int(x) if is_position(x) else x for x in parts])
    return (
        index if any(type(x) is not int for x in numbers) else numbers if type(index) is tuple else numbers[0]
    )


def taker_of(x: object, index: object) -> Callable[..., torch.Tensor] | None:
    """What records `x[index]` for a position that is a value, or a tensor of the instance's that says a row of a table:
    a word's. None for others: rows that are matrices are chosen by numbers, since there are few of them and each has
    its products."""
    if not isinstance(x, torch.Tensor) or not isinstance(index, torch.Tensor):
        return None
    if index.dim() or index.dtype not in (torch.int64, torch.int32):
        return None
    if isinstance(x, BARE) and x.dim() == 2 and type(index) in (torch.Tensor, Value):
        return row_at
    return take_at if type(index) is Value and x.dim() else None


def _is_recorded(
    recorder: RecordedCalls, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    """Whether a function computes something of what is an instance's own: its tensors, and rows that it chose."""
    nested = kwargs or any(type(x) in _NESTS for x in args)
    if not any(_is_own(recorder, x) for x in (tree_leaves((args, kwargs)) if nested else args)):
        return False
    return _is_torchs_own(func) and kwargs.get("out") is None


def _is_torchs_own(func: object) -> bool:
    """Whether it is a function of torch that computes something, and writes to nothing."""
    torchs_own = isinstance(func, IN_C) or (
        isinstance(func, types.FunctionType) and func.__module__.startswith("torch.")
    )
    told = func in TELLING or getattr(func, "__name__", "") == "__get__"
    return torchs_own and not told and not _writes(func)


def _writes(func: object) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name in ("__set__", "__delete__")
        or func in _IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
    )


def _is_own(recorder: RecordedCalls, x: Any) -> bool:
    if type(x) is torch.Tensor:
        return x.is_leaf and x.dtype is not torch.bool and recorder.owner_of(x) is None
    return type(x) is BareView and type(vars(x).get(VIEW_KEY)) is Value


def _heard_views(
    recorder: RecordedCalls, key: object, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """The function's own result. Views of bare parameters in it are heard of too, and are the same objects whenever
    they are asked for again (key: as what), so that calls of them are recorded in C from the second on."""
    if _writes(func):
        recorder.heard.forget()
    result = _as_tensors(func, args, kwargs)
    views = [x for x in (result if type(result) in _NESTS else (result,)) if type(x) is torch.Tensor]
    with DisableTorchFunctionSubclass():
        for x in views:
            base = x._base
            if type(base) is BareParameter:
                row = row_of_parameter(recorder, x)
                vars(x)[VIEW_KEY] = _view_key(recorder, x, base) if row is None else row
                by_number = x is result and func is GETITEM and _is_by_number(args)
                if row is not None and by_number and x.dim() == 1:
                    _note_table(recorder, base)
    for x in views:
        if VIEW_KEY not in vars(x):
            recorder.heard.computed = True
            continue
        x.__class__ = BareView
        recorder.heard.views.append(x)
        if key is not None and x is result:
            recorder.heard.again[key] = x
    return result


def _view_key(recorder: RecordedCalls, x: torch.Tensor, base: torch.Tensor) -> object:
    geometry = tuple(x.shape), x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()
    return recorder.table.view_key(base, (*geometry, x.grad_fn is not None))


def _as_tensors(func: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
