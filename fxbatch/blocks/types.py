"""The types of blocks: immutable, comparable, printable, with Fold's shorthand.

In: type-likes (`3`, `[3, "int32"]`, `([], "int64")`). Out: types, canonical: tuples and sequences of
Python objects are Python objects.

    convert_to_type([3, "int32"])       # TensorType((3,), 'int32')
    str(TensorType((3,), "int32"))      # "[3, 'int32']"
    TupleType(3, []) == convert_to_type((3, []))
    convert_to_type((3, [])).flatten(([1, 2, 3], 4))        # [[1, 2, 3], 4]

Source: Looks et al. 2017, section 3.1; the type shorthand of TensorFlow Fold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from fxbatch.errors import BlockTypeError


@functools.total_ordering
class ResultType:
    """Base class of all types. Types are immutable, hashable and totally ordered."""

    __slots__ = ()

    def sort_key(self) -> tuple[Any, ...]:
        """The key that types are ordered by: their kind, then their fields."""
        raise NotImplementedError

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, ResultType):
            return NotImplemented
        return self.sort_key() < other.sort_key()

    def terminal_types(self) -> Iterator[ResultType]:
        """The tensor and Python object types in this type, in order."""
        yield self

    @property
    def size(self) -> int | None:
        """Scalar elements in a value of this type; None when that is not fixed."""
        return None

    # -- values of the type: nests with tensors and Python objects as leaves ------------------------

    def for_each_terminal(self, fn: Callable[[ResultType, Any], Any], instance: Any) -> None:
        """Call `fn(terminal type, leaf)` for each leaf of a value of this type, in order."""
        fn(self, instance)

    def flatten(self, instance: Any) -> list[Any]:
        """The leaves of a value of this type, in order.

        >>> convert_to_type(([], (2, []))).flatten((1, ([2, 3], 4)))
        [1, [2, 3], 4]
        """
        leaves: list[Any] = []
        self.for_each_terminal(lambda _, leaf: leaves.append(leaf), instance)
        return leaves

    def unflatten(self, flat: Iterable[Any], shaped_like: Any = None) -> Any:
        """The value of this type with these leaves, taken from the front of an iterator: `flatten` undone.

        shaped_like: a value of this type with as many elements in each sequence; without sequences, None.

        >>> SequenceType(([], 2)).unflatten([1, [2, 3], 4, [5, 6]], [(0, 0), (0, 0)])
        [(1, [2, 3]), (4, [5, 6])]
        """
        return next(iter(flat))


@dataclass(frozen=True, slots=True)
class VoidType(ResultType):
    """No input, or no output; its one value is None."""

    def __repr__(self) -> str:
        return "VoidType()"

    def sort_key(self) -> tuple[Any, ...]:
        return (0,)

    def terminal_types(self) -> Iterator[ResultType]:
        return iter(())

    def for_each_terminal(self, fn: Callable[[ResultType, Any], Any], instance: Any) -> None:
        pass

    def unflatten(self, flat: Iterable[Any], shaped_like: Any = None) -> Any:
        return None

    @property
    def size(self) -> int | None:
        return 0


@dataclass(frozen=True, slots=True)
class PyObjectType(ResultType):
    """Any Python object: the paper's Input."""

    def __repr__(self) -> str:
        return "PyObjectType()"

    def sort_key(self) -> tuple[Any, ...]:
        return (1,)


@dataclass(frozen=True, slots=True, init=False)
class TensorType(ResultType):
    """Tensors of one shape (of one instance, without batch dimension) and dtype.

    As an array it is zeros: `np.zeros_like(t)`, `np.ones_like(t)` are arrays of its shape and dtype.
    Raises BlockTypeError for a shape that is no list of non-negative integers, or an unknown dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __init__(self, shape: Any = (), dtype: Any = "float32") -> None:
        object.__setattr__(self, "shape", _shape(shape))
        object.__setattr__(self, "dtype", to_dtype(dtype))

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        """The type of a tensor."""
        return TensorType(tuple(tensor.shape), tensor.dtype)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int | None:
        n = 1
        for d in self.shape:
            n *= d
        return n

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self!r} is no array: its array is made anew, so copy=False can't be")
        own = numpy_dtype(self.dtype)
        if own is None and dtype is None:
            raise BlockTypeError(f"{self!r}: NumPy has no {dtype_name(self.dtype)}")
        return np.zeros(self.shape, own if dtype is None else dtype)

    def __repr__(self) -> str:
        return f"TensorType({self.shape!r}, {dtype_name(self.dtype)!r})"

    def __str__(self) -> str:
        return repr([*self.shape, dtype_name(self.dtype)])

    def sort_key(self) -> tuple[Any, ...]:
        return (2, self.shape, dtype_name(self.dtype))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TupleType(ResultType, Sequence[ResultType]):
    """Tuples of a fixed number of items, each of its own type; a sequence of its item types.

    Takes the item types, or one iterable of them: `TupleType(a, b)`, `TupleType((a, b))`, `TupleType(x for x in
    types)`; `TupleType([])` is the type of the empty tuple. A list that can only be the shorthand of a tensor type
    (`[3, "int32"]`) is one item.
    """

    items: tuple[ResultType, ...]

    def __init__(self, *item_types: Any) -> None:
        if len(item_types) == 1 and _is_iterable_of_types(item_types[0]):
            item_types = tuple(item_types[0])
        object.__setattr__(self, "items", tuple(convert_to_type(t) for t in item_types))

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[ResultType]:
        return iter(self.items)

    @overload
    def __getitem__(self, i: int) -> ResultType: ...

    @overload
    def __getitem__(self, i: slice) -> TupleType: ...

    def __getitem__(self, i: int | slice) -> ResultType:
        return TupleType(self.items[i]) if isinstance(i, slice) else self.items[i]

    def __repr__(self) -> str:
        return f"TupleType({', '.join(map(repr, self.items))})"

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))}{',' if len(self.items) == 1 else ''})"

    def sort_key(self) -> tuple[Any, ...]:
        return (3, tuple(t.sort_key() for t in self.items))

    def terminal_types(self) -> Iterator[ResultType]:
        for t in self.items:
            yield from t.terminal_types()

    @property
    def size(self) -> int | None:
        sizes = [t.size for t in self.items]
        return None if None in sizes else sum(s for s in sizes if s is not None)

    def for_each_terminal(self, fn: Callable[[ResultType, Any], Any], instance: Any) -> None:
        for t, x in zip(self.items, instance, strict=True):
            t.for_each_terminal(fn, x)

    def unflatten(self, flat: Iterable[Any], shaped_like: Any = None) -> Any:
        leaves = iter(flat)
        shapes = [None] * len(self) if shaped_like is None else shaped_like
        return tuple([t.unflatten(leaves, x) for t, x in zip(self.items, shapes, strict=True)])


@dataclass(frozen=True, slots=True, init=False, repr=False)
class SequenceType(ResultType):
    """Sequences of any length, the empty one included, of elements of one type."""

    element_type: ResultType

    def __init__(self, element_type: Any) -> None:
        object.__setattr__(self, "element_type", convert_to_type(element_type))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.element_type!r})"

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.element_type})"

    def sort_key(self) -> tuple[Any, ...]:
        return (4, self.element_type.sort_key())

    def terminal_types(self) -> Iterator[ResultType]:
        return self.element_type.terminal_types()

    def for_each_terminal(self, fn: Callable[[ResultType, Any], Any], instance: Any) -> None:
        for x in instance:
            self.element_type.for_each_terminal(fn, x)

    def unflatten(self, flat: Iterable[Any], shaped_like: Any = None) -> Any:
        leaves = iter(flat)
        return [self.element_type.unflatten(leaves, x) for x in self._like(shaped_like)]

    def _like(self, shaped_like: Any) -> Any:
        if shaped_like is None:
            raise BlockTypeError(
                f"{self!r}.unflatten: how many elements? Give a value with as many as `shaped_like`"
            )
        return shaped_like


@dataclass(frozen=True, slots=True, init=False, repr=False)
class BroadcastSequenceType(SequenceType):
    """Endless sequences that repeat one element; its value is `itertools.repeat(element)`."""

    def sort_key(self) -> tuple[Any, ...]:
        return (5, self.element_type.sort_key())

    def for_each_terminal(self, fn: Callable[[ResultType, Any], Any], instance: Any) -> None:
        self.element_type.for_each_terminal(fn, next(instance))

    def unflatten(self, flat: Iterable[Any], shaped_like: Any = None) -> Any:
        element = None if shaped_like is None else next(shaped_like)
        return itertools.repeat(self.element_type.unflatten(flat, element))


def is_finite_sequence(t: ResultType | None) -> bool:
    """Whether t is a SequenceType, and no BroadcastSequenceType."""
    return isinstance(t, SequenceType) and not isinstance(t, BroadcastSequenceType)


def _is_iterable_of_types(x: Any) -> bool:
    """Whether a lone argument of TupleType holds its items, and is no item itself."""
    if isinstance(x, (ResultType, str, torch.Size, torch.dtype, np.dtype)) or not isinstance(x, Iterable):
        return False
    return not isinstance(x, list) or not x or any(isinstance(y, (ResultType, list, tuple)) for y in x)


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (list, tuple, torch.Size)):
        sizes = tuple(shape)
        if all(isinstance(d, (int, np.integer)) and not isinstance(d, bool) and d >= 0 for d in sizes):
            return tuple(int(d) for d in sizes)
    raise BlockTypeError(f"a shape is a tuple or list of non-negative integers, got {shape!r}")


def to_dtype(dtype: Any) -> torch.dtype:
    """A torch.dtype from itself, its name (`"int64"`, `"bool"`), or a numpy dtype; BlockTypeError otherwise."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if isinstance(found, torch.dtype):
            return found
    elif isinstance(dtype, (np.dtype, type)):
        name = np.dtype(dtype).name
        found = getattr(torch, name, None)
        if isinstance(found, torch.dtype):
            return found
    raise BlockTypeError(f"{dtype!r} is no dtype of PyTorch")


def numpy_dtype(dtype: torch.dtype) -> np.dtype | None:
    """The dtype of NumPy of the same name; None for those that NumPy lacks, like bfloat16."""
    try:
        return np.dtype(dtype_name(dtype))
    except TypeError:
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.int64` -> `"int64"`."""
    return str(dtype).removeprefix("torch.")


def convert_to_type(type_like: Any) -> ResultType:
    """A type from a type or its shorthand; BlockTypeError for anything else.

    `3` is a vector, `[]` a scalar, `[3, 4, "int32"]` a tensor, `"int64"` or a dtype a scalar of it, a
    `torch.Size` a float32 tensor, a tuple a TupleType of its converted items.
    """
    if isinstance(type_like, ResultType):
        return type_like
    if isinstance(type_like, torch.Size):
        return TensorType(tuple(type_like))
    if isinstance(type_like, tuple):
        return TupleType([convert_to_type(t) for t in type_like])
    if isinstance(type_like, list):
        last = type_like[-1] if type_like else None
        if isinstance(last, (str, torch.dtype, np.dtype, type)):
            return TensorType(type_like[:-1], last)
        return TensorType(type_like)
    if isinstance(type_like, (int, np.integer)) and not isinstance(type_like, bool):
        return TensorType((int(type_like),))
    if isinstance(type_like, (str, torch.dtype, np.dtype)):
        return TensorType((), type_like)
    raise BlockTypeError(f"{type_like!r} is no type: {convert_to_type.__doc__}")


def canonicalize_type(type_like: Any) -> ResultType:
    """The canonical form: tuples and sequences of Python objects become one Python object type.

    >>> canonicalize_type((PyObjectType(), SequenceType(PyObjectType())))
    PyObjectType()
    """
    t = convert_to_type(type_like)
    if isinstance(t, TupleType):
        items = [canonicalize_type(x) for x in t.items]
        if items and all(isinstance(x, PyObjectType) for x in items):
            return PyObjectType()
        return TupleType(items)
    if isinstance(t, SequenceType):
        element = canonicalize_type(t.element_type)
        if isinstance(element, PyObjectType):
            return PyObjectType()
        return type(t)(element)
    return t


def map_tensors(t: ResultType, fn: Any) -> ResultType:
    """The type with each TensorType x replaced by `fn(x)`."""
    if isinstance(t, TensorType):
        return fn(t)
    if isinstance(t, TupleType):
        return TupleType([map_tensors(x, fn) for x in t.items])
    if isinstance(t, SequenceType):
        return type(t)(map_tensors(t.element_type, fn))
    return t


def is_nest_of_tensors(t: ResultType) -> bool:
    """Whether t is a tensor type or a tuple of nests of tensors: what a Function takes and gives."""
    if isinstance(t, TupleType):
        return all(is_nest_of_tensors(x) for x in t.items)
    return isinstance(t, TensorType)
