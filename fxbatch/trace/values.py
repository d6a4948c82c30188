"""Values: stand in for the tensors of one instance while its forward is recorded.

In: operators, methods, `torch.*` functions, attributes. Out: recorded calls; what the type alone tells is answered at
once; what needs the content suspends the instance.

    h = cell(x)          # a Value
    h.shape, h * 2       # torch.Size([150]), a Value
    h.sum().item()       # waits for the batch

Values share memory as the tensors that they stand for would: a view has a View, which `writes` follows when it, or what
it is a view of, is written to. A real tensor that a value is written to (`t += h`, `buffer[i] = h`) stands for a value
from then on until the call is over: the same object is a WrittenTensor, whose uses are recorded. Its memory is taken
away meanwhile, so that nothing reads the old numbers, which takes a tensor that shares it with nothing else.

    row = x[0]                          # view_of(row).source is x
    total = torch.zeros(())
    for word in words:
        total += self.loss(word)        # from here on `total` is a WrittenTensor
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch

from fxbatch.errors import InPlaceError, TraceError
from fxbatch.torch_private import tree_leaves, tree_map
from fxbatch.trace.state import _fast, plain_tensors, state
from fxbatch.trace.table import Entry
from fxbatch.trace.user_line import at_line

# Types whose numbers Python's conversions take as torch's do; others are asked for as tensors.
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_REAL = _WHOLE | {torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16}
_OPERANDS = (torch.Tensor, bool, int, float, complex, np.generic, np.ndarray)


def _binary(name: str) -> tuple[Any, Callable[[Any, object], object]]:
    """An operator: torch's function, and the method."""
    func = getattr(torch.Tensor, name)

    def method(self: Value, other: object) -> object:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return self._recorder.call(func, (self, other), {})

    method.__name__ = name
    return func, method


POSITIONS = (torch.int64, torch.int32, torch.int16, torch.int8)  # of an index; uint8 is a mask


def is_position(index: object) -> TypeGuard[torch.Tensor]:
    """Whether an index is a tensor of an instance's own that says one position."""
    return type(index) is torch.Tensor and not index.dim() and index.dtype in POSITIONS


# What is known of a Value from its beginning on, in `Value._flags`.
REQUIRES_GRAD = 1
CONSTANT = 2  # it stands for a tensor that an instance brings along
COPIED_ROW = 4  # it stands for a row of what all instances share, and is a copy: nothing is written to it


UNBIND, DETACH = (torch.unbind, torch.Tensor.unbind), (torch.detach, torch.Tensor.detach)


class View:
    """Whose memory a Value shares, as a view of it.

    A view is recorded anew when it is used after its root was written to: until then a write costs nothing for it.
    """

    __slots__ = ("again", "call", "grad", "output", "root", "seen", "source", "source_type")

    def __init__(
        self,
        source: Value,
        call: tuple[object, tuple[Any, ...], dict[str, object]] | None,
        output: int = 0,
        again: Callable[[], object] | None = None,
    ) -> None:
        above = view_of(source)
        self.source = source  # what this is a view of
        self.root: Value = source if above is None else above.root  # whose memory it is, in the end
        self.source_type = source._type
        self.call = call  # (func, args, kwargs), if a function
        self.output = output  # which leaf of the result
        self.again = again  # how a call that is no function's is recorded anew
        self.grad = torch.is_grad_enabled()  # whether gradients go through the view
        self.seen = self.root._writes  # how often the root had been written to when this was recorded

    def place(self) -> tuple[int, ...] | None:
        """Where it is in its source: one number for each leading dimension; None where that is not all of it."""
        if self.call is None or self.call[2]:
            return None
        func, (_, *rest) = self.call[:2]
        if func is GETITEM:
            (index,) = rest
            place = index if type(index) is tuple else (index,)
            return place if all(type(i) is int for i in place) else None
        if func in UNBIND and rest in ([], [0]):
            return (self.output,)
        return () if func in DETACH else None

    def recorded_anew(self) -> object:
        """The result of the call that gave the view, recorded once more: from the source's new content."""
        if self.again is not None:
            return self.again()
        assert self.call is not None
        func, args, kwargs = self.call
        return args[0][args[1]] if func is GETITEM else self.source._recorder.call(func, args, kwargs)


class NoLengthError(TraceError, TypeError):
    """len() of a tensor without dimensions: a TypeError to Python, as torch's; constructors in C++ can't go on."""


class Value(torch.Tensor):
    """A tensor that has a type and no content yet. Made by a Recorder only.

    It is a real Tensor object (without memory, never read), so that `isinstance` and every C entry of torch accept
    it. What C++ does with it past `__torch_function__` (TorchScript, `torch.Tensor(v)`, extensions) comes to
    `__torch_dispatch__`, questions for its sizes and strides too, and is refused there.
    """

    __slots__ = ("_flags", "_recorder", "_rows", "_type", "_value", "_view", "_writes")
    _flags: int  # REQUIRES_GRAD, CONSTANT, COPIED_ROW
    _recorder: Any  # the RecordedCalls that made it, which stands above this
    # Rows that were written to since `_value` was recorded; absent where there are none.
    _rows: dict[int, Value]
    _type: int  # type id in the recorder's table
    _value: int  # the value's number, in the recorder's range
    _view: View  # absent where it is no view
    _writes: int  # how often its memory was written to, as far as views of it must know

    @property
    def id(self) -> int:
        """The value's number in the recording's programs."""
        return self._value - self._recorder.base

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        recorder = next((x._recorder for x in args if type(x) is Value), None)
        if recorder is None:
            recorder = next((x._recorder for x in tree_leaves((args, kwargs)) if type(x) is Value), None)
        if recorder is None:
            raise TraceError(
                f"{getattr(func, '__name__', func)} got a recorded tensor where none can be found"
            )
        if getattr(func, "__name__", "") in ("__set__", "__delete__"):
            return set_attribute(func, args)
        return recorder.call(func, tuple(args), kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a static function
        cls, func: object, types: object, args: Any = (), kwargs: object = None
    ) -> object:
        if func is _aten.detach.default:  # `Variable(v)`, of torch before 0.4
            recorder = args[0]._recorder
            again = _fast is not None and recorder is state.recorder
            view = _fast.recorded_before(recorder, torch.detach, args, {}) if again else None
            return recorder.call(torch.detach, args, {}) if view is None else view
        asked = _SIZES.get(func)
        if asked is not None:  # torch's parser of arguments wants to know whether it could be a number
            return asked(args[0])
        raise TraceError(
            f"{func} got a recorded tensor inside C++, where it has no content yet: TorchScript, C++ extensions and "
            f"constructors such as torch.Tensor(v) can't be recorded; use Python's torch functions there "
            f"(v.clone(), torch.as_tensor(v)), or v.tolist() for its numbers{at_line()}"
        )

    # What the type tells

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a property there too
        return self._recorder.table.sizes[self._type]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._recorder.table.types[self._type].dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._recorder.table.types[self._type].device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._recorder.table.sizes[self._type])

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.strided

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return not self.requires_grad

    @property
    def requires_grad(self) -> bool:
        return self._recorder.requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    @property
    def grad_fn(self) -> object:  # type: ignore[override]
        real = self._recorder.tensor(self)
        if real is not None:
            return real.grad_fn
        return RecordedGradient() if self.requires_grad else None

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        real = self._recorder.tensor(self)
        return None if real is None else real.grad

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, _: object) -> None:
        raise InPlaceError(
            f"assigning .data of a value can't be recorded: use copy_(), or a new name{at_line()}"
        )

    def dim(self) -> int:
        return len(self._recorder.table.sizes[self._type])

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        shape = self._recorder.table.sizes[self._type]
        if dim is None:
            return shape
        if not -len(shape) <= dim < max(len(shape), 1):
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-len(shape)}, {len(shape) - 1}], "
                f"but got {dim})"
            )
        return shape[dim]

    def numel(self) -> int:
        return self._recorder.table.sizes[self._type].numel()

    nelement = numel

    # Where it would lie in memory

    def _laid_out(self) -> Any:
        return self._recorder.real_tensor(
            self,
            "where a value lies in memory can't be told before it is computed; contiguous(), reshape() and clone() "
            "need not know it",
        )

    def stride(self, dim: int | None = None) -> Any:
        strides = self._laid_out().stride()
        return strides if dim is None else strides[dim]

    def storage_offset(self) -> int:
        return int(self._laid_out().storage_offset())

    def is_contiguous(self, *args: object, **kwargs: object) -> bool:
        return self._laid_out().is_contiguous(*args, **kwargs)

    def dim_order(self, *args: object, **kwargs: object) -> tuple[int, ...]:
        return self._laid_out().dim_order(*args, **kwargs)

    def __len__(self) -> int:
        shape = self._recorder.table.sizes[self._type]
        if not shape:
            raise NoLengthError(
                f"len() of a 0-d tensor, as torch.Tensor([v]) asks; torch.tensor([v]){at_line()}"
            )
        return shape[0]

    def __hash__(self) -> int:
        return object.__hash__(self)

    # What needs the content

    def _read(self) -> torch.Tensor:
        return self._recorder.read([self])[0]

    def item(self) -> Any:
        one = self._one()
        return one.item() if isinstance(one, torch.Tensor) else one

    def tolist(self) -> Any:
        return self._recorder.read_plain(self)

    def _one(self, kinds: frozenset[torch.dtype] | None = None) -> Any:
        """The only element, as Python's number; the tensor where there are others, or it is not of these kinds."""
        recorder = self._recorder
        spec = recorder.table.types[self._type]
        if spec.numel != 1 or (kinds is not None and spec.dtype not in kinds):
            return self._read()
        number = recorder.read_plain(self)
        while type(number) is list:
            (number,) = number
        return number

    def numpy(self, *, force: bool = False) -> np.ndarray:
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self._read().numpy(force=force)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __array_wrap__(self, array: np.ndarray, *_: object) -> torch.Tensor:
        return torch.from_numpy(array)

    def __bool__(self) -> bool:
        return self._recorder.is_argument_check(self) or bool(self._one(_REAL))

    def __int__(self) -> int:
        return int(self._one(_WHOLE))

    def __float__(self) -> float:
        return float(self._one(_REAL))

    def __complex__(self) -> complex:
        return complex(self._read())

    def __index__(self) -> int:
        return self._one(_WHOLE).__index__()

    def __contains__(self, element: object) -> bool:
        if not isinstance(element, (torch.Tensor, bool, int, float, complex)):
            raise RuntimeError(
                f"Tensor.__contains__ only supports Tensor or scalar, but you passed in a {type(element)}."
            )
        return bool(torch.eq(self, element).any())

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec) if self.dim() == 0 else object.__format__(str(self), spec)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch names its only argument otherwise
        recorder = getattr(self, "_recorder", None)
        if recorder is None or not recorder.can_read():
            return f"Value({recorder.type_of(self)})" if recorder is not None else "Value()"
        real = recorder.tensor(self)
        return repr(self._read() if real is None else real)

    __str__ = __repr__

    # Structure

    def __getitem__(self, index: object) -> Any:
        if type(index) is int:
            return self._recorder.row_of(self, index)
        if type(index) is tuple and index and type(index[0]) is int and self.dim() > 1:
            written = row_written(self, index)
            if written is not None:
                return written
            row = self[index[0]]
            if len(index) == 2 and type(index[1]) is int:
                return row[index[1]]
            return row[index[1:]] if len(index) > 1 else row
        if (
            type(index) is tuple
            and hasattr(self, "_rows")
            and (at := place_within(self.shape, index)) is not None
        ):
            row = self[at[0]]
            for _ in range(at[1]):
                row = row.unsqueeze(0)
            return row
        if is_position(index) and self.dim():
            recorder = self._recorder
            if recorder.watches_operands and recorder.can_read():  # a kept trace reads it when it runs
                return self[int(index)]
        return self._recorder.call(GETITEM, (self, index), {})

    def __setitem__(self, index: object, new: object) -> None:
        self._recorder.call(SETITEM, (self, index, new), {})

    def __iter__(self) -> Iterator[object]:
        if not self.dim():
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __reversed__(self) -> object:
        return self.flip(0) if self.dim() else self

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        real = self._recorder.tensor(self)
        if real is not None:
            return copy.deepcopy(real, memo)
        if self.requires_grad:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        memo[id(self)] = copied = self.clone()
        return copied

    def __copy__(self) -> object:
        return self.detach()  # as torch makes it: the same memory, a leaf

    def __reduce_ex__(self, protocol: object) -> Any:
        refusal = "a value can't be pickled: it has no content until its minibatch has run"
        return self._recorder.real_tensor(self, refusal).__reduce_ex__(protocol)

    # What a tensor is beside its numbers

    def as_subclass(self, cls: type) -> Any:
        raise TraceError(f"a value can't become a {cls.__name__}: make one of the result{at_line()}")

    # Gradients

    def backward(self, *args: object, **kwargs: object) -> None:
        give = self._recorder.give  # real tensors with gradients, where there are such (`lazy`)
        if give is None:
            raise TraceError(f"backward() inside a per-instance forward: call it on the results{at_line()}")
        give([self])[0].backward(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad and not self.requires_grad:
            if not self._recorder.type_of(self).differentiable:
                raise RuntimeError("only Tensors of floating point and complex dtype can require gradients")
            self._flags |= REQUIRES_GRAD  # a leaf of the forward: nobody asks for its gradient
        elif not requires_grad and self.requires_grad:
            raise RuntimeError("you can only change requires_grad flags of leaf variables.")
        return self

    def retain_grad(self) -> None:
        self._recorder.real_tensor(self, "retain_grad() on a value can't be recorded").retain_grad()

    def apply_(self, *_: object) -> NoReturn:
        """Functions of Python, called with each number: torch hands such calls to nobody."""
        raise InPlaceError(f"apply_(), map_() and map2_() of a value can't be recorded{at_line()}")

    map_ = map2_ = apply_  # type: ignore[assignment]

    def register_hook(self, hook: object) -> object:
        refusal = "register_hook() on a value can't be recorded: register it on a result or a parameter"
        return self._recorder.real_tensor(self, refusal).register_hook(hook)


class RecordedGradient:
    """Stands for `grad_fn` of a value: there will be a gradient function once the minibatch has run."""

    def name(self) -> str:
        return "RecordedBackward"

    def __repr__(self) -> str:
        return "<RecordedBackward>"


GETITEM = torch.Tensor.__getitem__
SETITEM = torch.Tensor.__setitem__

# Operators: torch's function, and the method. Those that were met before are recorded in C.
BINARY = {
    _name: _binary(_name)
    for _name in (
        "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
        "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__matmul__",
        "__rmatmul__",
        "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__rand__", "__or__",
        "__ror__",
        "__xor__", "__rxor__", "__lshift__", "__rlshift__", "__rshift__", "__rrshift__",
    )
    if hasattr(torch.Tensor, _name)
}  # fmt: skip
# What gives numbers, in the order of _fast_numbers.h.
READERS = {
    name: Value.__dict__[name] for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
}
for _name, (_, _operator) in BINARY.items():
    setattr(Value, _name, _operator)


for _name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"):
    if hasattr(torch.Tensor, _name):
        setattr(Value, _name, _binary(_name)[1])


def set_attribute(func: object, args: Any) -> None:
    """Set or delete a tensor's attribute on a value, where that means anything."""
    name = getattr(getattr(func, "__self__", None), "__name__", "an attribute")
    if name == "requires_grad":
        args[0].requires_grad_(args[1])
        return
    raise InPlaceError(f"assigning .{name} of a value can't be recorded{at_line()}")


def _method(name: str) -> Callable[..., object]:
    return lambda v, *args, **kwargs: getattr(v, name)(*args, **kwargs)


# Functions of tensors that a Value answers by its own method, when they are called as functions.
_SPECIAL: dict[object, Callable[..., object]] = {
    getattr(torch.Tensor, name): _method(name)
    for name in (
        "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__",
        "__format__",
        "__repr__", "__len__", "__iter__", "__reversed__", "__array__", "backward", "size", "dim", "numel",
        "stride", "storage_offset", "is_contiguous", "dim_order",
        "requires_grad_", "retain_grad", "register_hook", "__hash__", "__deepcopy__", "__reduce_ex__",
        "as_subclass",
    )
}  # fmt: skip
_SPECIAL[torch.numel] = _method("numel")

_aten = torch.ops.aten
_SIZES: dict[object, Callable[[Any], object]] = {
    _aten.dim.default: Value.dim, _aten.size.default: Value.size, _aten.sym_size.default: Value.size,
    _aten.numel.default: Value.numel, _aten.sym_numel.default: Value.numel,
}  # fmt: skip

# What makes a Value object: a tensor without memory (0.8 µs, 1.2 with an argument by its name; 0.7 with memory, where
# nobody would be told who reads it). By place: class, sizes, strides, offset, memory format, dtype, layout, device,
# whether pinned, whether it requires gradients, who tells its sizes. In C they are used again.
_new_tensor: Callable[..., Value] = torch.Tensor._make_wrapper_subclass
plain_new = functools.partial(
    _new_tensor, Value, (0,), *[None] * 4, torch.strided, None, False, False, "sizes"
)


class WeakValues:
    """The values of a recording where there is no C: those that are referred to when it ends are the user's."""

    def __init__(self) -> None:
        self._values: list[weakref.ref[object]] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, v: object) -> None:
        """A new value, or a tensor that stands for one."""
        self._values.append(weakref.ref(v))

    def _alive(self) -> Iterator[Any]:
        return (v for ref in self._values if (v := ref()) is not None)

    def stale(self) -> list[Value]:
        """The views among them that somebody refers to, and whose root was written to since."""
        return [v for v in self._alive() if is_stale(v)]

    def living(self) -> list[object]:
        """The values that somebody refers to; the list goes on with these alone."""
        alive = list(self._alive())
        self._values = [weakref.ref(v) for v in alive]
        return alive

    def close(self) -> list[object]:
        """The values that the user refers to; no view is known any more."""
        for v in self._alive():
            for name in ("_view", "_rows"):
                if hasattr(v, name):
                    delattr(v, name)
        alive, self._values = list(self._alive()), []
        return alive


class MetTensors:
    """The real tensors that a recording has met, where there is no C."""

    def __init__(self) -> None:
        # Tensor, value, version, type, and the place among the constants of its signature, of the phase.
        self._rows: list[tuple[torch.Tensor, object, int | None, int, int]] = []
        self._last: dict[int, int] = {}  # by id of a tensor: its last row
        self._read = 0

    def get(self, t: torch.Tensor) -> object:
        """The value of a tensor as it is now, or None."""
        place = self._last.get(id(t))
        if place is None:
            return None
        _, v, version, *_ = self._rows[place]
        return v if version is None or version == t._version else None

    def put(self, t: torch.Tensor, v: Value, place: int) -> None:
        """A tensor was met. place: among the constants of its signature, of the phase."""
        self._last[id(t)] = len(self._rows)
        self._rows.append((t, v, None if t.is_inference() else t._version, v._type, place))

    def exchange(self, t: torch.Tensor, other: torch.Tensor, but_lost: bool) -> object:
        """Note that the tensor which was met as `t` is `other`; its value and place, or None. but_lost: None also where
        it was written to since and no phase has read it; `written` finds it."""
        row = self._last.get(id(t))
        if row is None:
            return None
        if but_lost and row >= self._read and self.get(t) is None:
            return None
        _, v, _, kind, place = self._rows[row]
        del self._last[id(t)]
        self._rows[row] = other, v, None if other.is_inference() else other._version, kind, place
        self._last[id(other)] = row
        return v, place

    def integers(self, _: int) -> None:
        """What those of a type held when they were met: not known."""

    def written(self, _: bool) -> int | None:
        """The type of the first that was written to before it was read."""
        rows = self._rows[self._read :]
        return next((kind for t, _, seen, kind, _ in rows if seen is not None and t._version != seen), None)

    def read(self) -> None:
        """A phase has read all."""
        self._read = len(self._rows)

    def let_go(self) -> None:
        """Refer to no value any more."""
        self._rows = [(t, None, version, kind, place) for t, _, version, kind, place in self._rows]


new_constants: Callable[[], object] = MetTensors if _fast is None else _fast.Constants
new_values: Callable[[], object] = WeakValues if _fast is None else _fast.Values


def new_value(recorder: Any, number: int, type_id: int, flags: int) -> Value:
    """A Value object of this number, in the recorder's list."""
    if _fast is not None:
        value: Value = _fast.value(recorder, number, type_id, flags)
        return value
    v = plain_new()
    v._value, v._type, v._flags, v._recorder, v._writes = number, type_id, flags, recorder, 0
    recorder.values.add(v)
    return v


def view_of(v: Value) -> View | None:
    """Whose memory a Value shares, None where it is no view."""
    return getattr(v, "_view", None)


def is_stale(v: Value) -> bool:
    """Whether a value's content is still to be recorded: rows of it were written to, or it is a view of what was."""
    view = view_of(v)
    return hasattr(v, "_rows") or (view is not None and view.seen != view.root._writes)


# Functions that give a view or a copy, depending on strides that a recording does not know.
NEEDS_STRIDES = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})


@contextlib.contextmanager
def recorded_with(recorder: Any, grad: bool) -> Iterator[None]:
    """Record with gradients or without; after it, calls are recorded under the user's modes again."""
    if torch.is_grad_enabled() is grad:
        yield
        return
    of_user = recorder.graded, recorder.switched_on
    with torch.set_grad_enabled(grad):
        yield
    recorder.graded, recorder.switched_on = of_user
    recorder.sync_modes()


def refresh(v: Value) -> Value:
    """A value with its content as it is now: a view of what was written to is recorded anew."""
    if hasattr(v, "_rows"):
        _put_rows(v)
    view: View | None = getattr(v, "_view", None)
    if view is None or view.seen == view.root._writes:
        return v
    refresh(view.source)
    name = "" if view.call is None else getattr(view.call[0], "__name__", "")
    if name in NEEDS_STRIDES:
        raise InPlaceError(
            f"a tensor was written to, of which {name}() gave a view or a copy, by its strides: use view() or "
            f"clone(){at_line()}"
        )
    if view.source._type != view.source_type:
        raise InPlaceError(f"the shape of a tensor that has views was changed in place{at_line()}")
    with recorded_with(view.source._recorder, view.grad):
        new = [x for x in tree_leaves(view.recorded_anew()) if type(x) is Value][view.output]
    v._value, v._flags = new._value, new._flags
    view.seen = view.root._writes
    if view.root._flags & CONSTANT and (shown := view_of(new)) is not None:
        v._view = shown  # of the value that the tensor stands for now
    return v


class Places(dict[int, "Value"]):
    """What was written to `x[i, j]`, by the number of that row among those of all i and j. Of `x[i]` it is a plain
    dictionary. depth: how many numbers a place has."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


def place_in(shape: Sequence[int], index: object) -> tuple[int, ...] | None:
    """The place of a row of a tensor of this shape, counted from the start, for `x[i]` or `x[i, j]`; None where the
    index isn't plain numbers, or out of range."""
    if type(index) is int:
        return (index % shape[0],) if shape and -shape[0] <= index < shape[0] else None
    if type(index) is not tuple or not index:
        return None
    pairs = zip(index, shape, strict=False)
    place = tuple(i % size for i, size in pairs if type(i) is int and -size <= i < size)
    return place if len(place) == len(index) else None


def place_within(shape: Sequence[int], index: object) -> tuple[tuple[int, ...], int] | None:
    """`place_in` of `x[:, t]` and `x[:, t, ...]` as well, where the first dimensions have one element; and
    how many of these the row has. None for other indices."""
    if type(index) is not tuple:
        place = place_in(shape, index)
        return None if place is None else (place, 0)
    end = len(index)
    while end and (index[end - 1] is Ellipsis or is_whole(index[end - 1])):
        end -= 1
    ones = 0
    while ones < end and is_whole(index[ones]) and shape[ones] == 1:
        ones += 1
    if len(index) > len(shape) or (end < len(index) and not ones):  # `x[t, :]` is a call like others
        return None
    place = place_in(shape[ones:], index[ones:end])
    return None if place is None else ((0,) * ones + place, ones)


def is_whole(index: object) -> bool:
    """Whether an index is a plain colon."""
    return type(index) is slice and index.start is None and index.stop is None and index.step is None


def row_number(shape: Sequence[int], place: Sequence[int]) -> int:
    """The number of a place among all rows of its kind."""
    number = 0
    for i, size in zip(place, shape, strict=False):
        number = number * size + i
    return number


def depth_of(rows: dict[int, Value]) -> int:
    """How many numbers a place among these has."""
    return rows.depth if type(rows) is Places else 1


def row_written(v: Value, index: object) -> Value | None:
    """`v[i]` or `v[i, j]` where that was written to and the whole was not asked for since; None for others."""
    rows = getattr(v, "_rows", {})
    at = (place_in(v.shape, index) or ()) if rows else ()
    row = rows.get(row_number(v.shape, at)) if len(at) == depth_of(rows) else None
    if row is None:
        return None
    result = new_value(v._recorder, row._value, row._type, v._flags & REQUIRES_GRAD)  # as a view of the whole
    result._view = View(v, (GETITEM, (v, at if len(at) > 1 else at[0]), {}))
    return result


def row_later(v: Value, index: int, type_id: int) -> Value | None:
    """`v[index]` where places of v were written to: it is recorded when it is used. None for others."""
    if type(getattr(v, "_rows", None)) is not Places:
        return None
    result = new_value(v._recorder, v._value, type_id, v._flags & REQUIRES_GRAD)
    result._view = View(v, (GETITEM, (v, index), {}))
    result._view.seen = -1
    return result


def _put_rows(v: Value) -> None:
    """Record a value's content with the rows that were written to."""
    rows, recorder, depth = v._rows, v._recorder, depth_of(v._rows)
    del v._rows
    before = new_value(recorder, v._value, v._type, v._flags & REQUIRES_GRAD)
    shape = (math.prod(v.shape[:depth]), *v.shape[depth:])
    # The rows were written while gradients counted, whoever reads the whole first.
    with recorded_with(recorder, recorder.graded):
        if depth > 1:
            before = before.reshape(shape)  # type: ignore[assignment]
        if 2 * len(rows) < shape[0]:
            index = torch.tensor(list(rows), device=v.device)
            content = before.index_copy(0, index, torch.stack(list(rows.values())))
        else:
            content = torch.stack([rows[i] if i in rows else before[i] for i in range(shape[0])])
        if depth > 1:
            content = content.reshape(v.shape)
    assert type(content) is Value and content._type == v._type
    v._value, v._flags = content._value, content._flags


def facts_of(values: list[Value]) -> np.ndarray:
    """int64 [values, 3]: number, type and flags of each."""
    if _fast is not None:
        return np.frombuffer(_fast.facts(values), dtype=np.int64).reshape(-1, 3).copy()
    rows = [(v._value, v._type, v._flags) for v in values]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def link_views(entry: Entry, result: Any, inputs: Sequence[Value], call: Any, again: Any = None) -> None:
    """Note which outputs of a call are views of which inputs. call: of a function, else `again` records it anew."""
    plain = entry.single or entry.is_tuple
    leaves = ((result,) if entry.single else result) if plain else tree_leaves(result)
    values = leaves if plain else [x for x in leaves if type(x) is Value]
    for output, (leaf, i) in enumerate(zip(values, entry.aliases, strict=True)):
        if i >= 0:
            leaf._view = View(inputs[i], call, output, again)


RECORD = "_fxbatch_written"


class Written:
    """The value that a tensor stands for which was written to, and the tensor that it was."""

    __slots__ = ("before", "instance", "value")

    def __init__(self, before: torch.Tensor, value: Value) -> None:
        self.before = before  # what it was, with its memory
        self.value = value
        self.instance: int = value._recorder.running  # that has written to it first

    def give_back(self, tensor: torch.Tensor, content: torch.Tensor | None) -> None:
        """Make the user's object a plain tensor again: with this content, or None: as it was."""
        new = self.before
        if content is not None:
            with plain_tensors():
                new = content.clone()
            vars(new).update(vars(self.before))
        tensor.__class__ = torch.Tensor
        torch.utils.swap_tensors(tensor, new)


class WrittenTensor(torch.Tensor):
    """The class of a user's tensor between a write of a value to it and the end of the call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__hash__":
            return object.__hash__(args[0])
        flat = args if not kwargs and is_flat(args) else tree_leaves((args, kwargs or {}))
        pairs = [(x, value_of(x)) for x in flat if type(x) is WrittenTensor]
        args, kwargs = with_values(tuple(args), kwargs or {})
        if name == "__get__":
            return getattr(args[0], _attribute(func))
        if name in ("__set__", "__delete__"):
            return set_attribute(func, args)
        method = None  # a value's own, where the tensor is first: it may be written to another, or be an index of it
        if args and isinstance(args[0], Value) and getattr(torch.Tensor, name, None) is func:
            method = Value.__dict__.get(name)
        result = func(*args, **kwargs) if method is None else method(*args, **kwargs)
        return next((x for x, v in pairs if result is v), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a static function
        cls, func: object, types: object, args: Any = (), kwargs: object = None
    ) -> object:
        if func is _aten.detach.default:  # `Variable(t)`, of torch before 0.4
            return value_of(args[0]).detach()
        raise TraceError(
            f"{func} met a tensor that a value was written to inside C++, where it has no content yet: use Python's "
            f"torch functions there{at_line()}"
        )


def _attribute(asked: Any) -> str:
    """The name of the attribute that a `__get__` asks for: of a property, of what that calls, of an attribute of C."""
    while getattr(asked, "__name__", "__get__") == "__get__":
        asked = asked.fget if isinstance(asked, property) else inspect.unwrap(asked).__self__
    return str(asked.__name__)


def item_of_written(t: torch.Tensor, index: object) -> object:
    """`t[index]`: a row that was written to is there without the whole being put together."""
    item: object = value_of(t)[index]
    return item


def value_of(t: torch.Tensor) -> Value:
    """The value that a WrittenTensor stands for, as it is now."""
    written: Written = vars(t)[RECORD]
    return written.value


_FLAT = frozenset({WrittenTensor, Value, torch.Tensor, torch.nn.Parameter, int, float, bool, type(None), str})


def is_flat(args: Sequence[object]) -> bool:
    """Whether none of these holds others, as in most calls and results; a pytree has them as leaves."""
    return _FLAT.issuperset(map(type, args))


def with_values(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments with values in place of WrittenTensors."""
    if not kwargs and is_flat(args):
        return tuple([value_of(x) if type(x) is WrittenTensor else x for x in args]), kwargs
    arguments: tuple[tuple[object, ...], dict[str, object]] = result_with_values((args, kwargs))
    return arguments


def result_with_values(result: object) -> Any:
    """An instance's result with values in place of WrittenTensors."""
    return tree_map(lambda x: value_of(x) if type(x) is WrittenTensor else x, result)
