"""Blocks that make tensors of Python objects, and the other blocks without parts.

In: one Python object, or any type for the last few. Out: a tensor, a Python object, nothing.

    fb.Vector(3).eval([1, 2, 3])        # tensor([1., 2., 3.])
    fb.OneHot(4).eval(2)                # tensor([0., 0., 1., 0.])

Source: Looks et al. 2017, section 3.1; TensorFlow Fold's "blocks for input" and "blocks for tensors".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.blocks.block import Block, convert_to_block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.show import call_text
from fxbatch.blocks.typed import complain, give
from fxbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    numpy_dtype,
)
from fxbatch.errors import BlockTypeError


class Tensor(Block):
    """A Python object (number, nested list, array, tensor) as a tensor of a fixed shape and dtype.

    Objects are converted as NumPy does it: `"3"` is a 3, 3.7 as an integer is 3.

    Type: PyObjectType -> TensorType(shape, dtype). ValueError at run time for an object that is no array of this
    dtype, or has another shape.

    >>> Tensor([2, 2], "int64").eval([[1, 2], [3, 4]])
    tensor([[1, 2],
            [3, 4]])
    """

    input_type_classes = (PyObjectType,)

    def __init__(self, shape: Any, dtype: Any = "float32", name: str | None = None) -> None:
        super().__init__(input_type=PyObjectType(), output_type=TensorType(shape, dtype), name=name)

    def expression(self) -> str:
        t = self.output_type
        assert isinstance(t, TensorType)
        dtype = (t.dtype, torch.float32)
        if t.ndim == 0:
            return call_text("Scalar", dtype=dtype)
        if t.ndim == 1:
            return call_text("Vector", t.shape[0], dtype=dtype)
        return call_text("Tensor", list(t.shape), dtype=dtype)

    def build(self, to: Builder) -> Run:
        t = self.output_type
        assert isinstance(t, TensorType)
        dtype, device, shape = t.dtype, self.device, t.shape
        of_numpy = numpy_dtype(dtype)
        target = of_numpy or np.dtype(np.complex64 if dtype.is_complex else np.float32)  # for bfloat16

        def array(x: Any) -> np.ndarray:
            made = _as_array(self, x, target)
            if made.shape != shape:
                raise ValueError(f"{self!r} takes an object of shape {list(shape)}, got {list(made.shape)}")
            return made

        def convert(x: Any) -> torch.Tensor:
            if not isinstance(x, torch.Tensor):
                made = array(x)
                x = torch.from_numpy(made if made.flags.writeable else made.copy())
            if x.dtype != dtype or x.device != device:
                x = x.to(device=device, dtype=dtype)
            if tuple(x.shape) != shape:
                raise ValueError(f"{self!r} takes an object of shape {list(shape)}, got {list(x.shape)}")
            return x

        exact = None if of_numpy is None else array
        return to.tensor(self, convert, exact) if shape else to.scalar(self, dtype, convert, exact)


def _as_array(block: Block, x: Any, dtype: np.dtype) -> np.ndarray:
    """An object by NumPy's conversion; an array of the dtype itself is not copied. ValueError for what is no array."""
    try:
        if isinstance(x, (list, tuple)) and any(isinstance(y, torch.Tensor) for y in x):
            x = [y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else y for y in x]
        return np.asarray(x, dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError) as e:
        raise ValueError(f"{block!r} can't make {dtype} numbers of {_short(x)}: {e}") from e


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 80 else text[:77] + "..."


def Scalar(dtype: Any = "float32", name: str | None = None) -> Tensor:  # a block's name
    """A Python number as a tensor without dimensions. Type: PyObjectType -> TensorType((), dtype).

    >>> Scalar().eval(42)
    tensor(42.)
    """
    return Tensor((), dtype, name)


def Vector(size: int, dtype: Any = "float32", name: str | None = None) -> Tensor:
    """A list of numbers as a vector. Type: PyObjectType -> TensorType((size,), dtype).

    >>> Vector(2).eval([1, 2])
    tensor([1., 2.])
    """
    return Tensor((size,), dtype, name)


class OneHot(Block):
    """An integer of `range(start, stop)`, or `range(start)`, as a one-hot vector; KeyError outside.

    Type: PyObjectType -> TensorType((stop - start,), dtype). IndexError when the range is empty.

    >>> OneHot(5, 8).eval(6)
    tensor([0., 1., 0.])
    """

    input_type_classes = (PyObjectType,)

    def __init__(
        self, start: int, stop: int | None = None, dtype: Any = "float32", name: str | None = None
    ) -> None:
        if stop is None:
            start, stop = 0, start
        if stop <= start:
            raise IndexError(f"OneHot({start}, {stop}): the range is empty")
        super().__init__(input_type=PyObjectType(), output_type=TensorType((stop - start,), dtype), name=name)
        self.start, self.stop = start, stop

    def expression(self) -> str:
        assert isinstance(self.output_type, TensorType)
        bounds = (self.stop,) if self.start == 0 else (self.start, self.stop)
        return call_text("OneHot", *bounds, dtype=(self.output_type.dtype, torch.float32))

    def build(self, to: Builder) -> Run:
        assert isinstance(self.output_type, TensorType)
        rows = torch.eye(self.stop - self.start, dtype=self.output_type.dtype, device=self.device).unbind(0)
        row_of: dict[Any, torch.Tensor] = dict(zip(range(self.start, self.stop), rows, strict=True))

        def convert(x: Any) -> torch.Tensor:
            row = row_of.get(x.item() if isinstance(x, (torch.Tensor, np.ndarray)) else x)
            if row is None:
                raise KeyError(f"{self!r} takes an integer from {self.start} to {self.stop - 1}, got {x!r}")
            return row

        return to.tensor(self, convert)


class OneHotFromList(Block):
    """One of a list of hashable elements as a one-hot vector.

    Type: PyObjectType -> TensorType((len(elements),), dtype). An object that is none of them is a KeyError, or
    with `strict=False` the zero vector. AssertionError when two elements are equal.

    >>> OneHotFromList(["a", "b"]).eval("b")
    tensor([0., 1.])
    """

    input_type_classes = (PyObjectType,)

    def __init__(
        self, elements: Sequence[Any], dtype: Any = "float32", strict: bool = True, name: str | None = None
    ) -> None:
        elements = list(elements)
        self_index = {e: i for i, e in enumerate(elements)}
        if len(self_index) != len(elements):
            raise AssertionError(f"OneHotFromList: two of the elements are equal: {_short(elements)}")
        super().__init__(
            input_type=PyObjectType(), output_type=TensorType((len(elements),), dtype), name=name
        )
        self.elements, self.strict, self._index = elements, strict, self_index

    def expression(self) -> str:
        assert isinstance(self.output_type, TensorType)
        dtype = (self.output_type.dtype, torch.float32)
        return call_text("OneHotFromList", self.elements, dtype=dtype, strict=(self.strict, True))

    def build(self, to: Builder) -> Run:
        assert isinstance(self.output_type, TensorType)
        n = len(self.elements)
        rows = torch.eye(n, dtype=self.output_type.dtype, device=self.device).unbind(0)
        zero = torch.zeros(n, dtype=self.output_type.dtype, device=self.device)
        index, strict = self._index, self.strict

        def convert(x: Any) -> torch.Tensor:
            i = index.get(x)
            if i is None:
                if strict:
                    raise KeyError(f"{self!r} has no element {x!r}")
                return zero
            return rows[i]

        return to.tensor(self, convert)


class FromTensor(Block):
    """A particular tensor, whatever the input. An `nn.Parameter` is trained; a tensor or array is a constant.

    Type: VoidType -> the tensor's type. BlockTypeError when it is no tensor and no array.

    >>> FromTensor(torch.ones(2)).eval(None)
    tensor([1., 1.])
    """

    def __init__(self, tensor: torch.Tensor | np.ndarray, name: str | None = None) -> None:
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor.copy())
        if not isinstance(tensor, torch.Tensor):
            raise BlockTypeError(f"FromTensor takes a tensor or an array, got {type(tensor).__name__}")
        super().__init__(input_type=VoidType(), output_type=TensorType.of(tensor), name=name)
        if isinstance(tensor, torch.nn.Parameter):
            self.tensor = tensor
        else:
            self.register_buffer("tensor", tensor, persistent=False)

    def expression(self) -> str:
        return call_text("FromTensor", self.tensor)

    def build(self, to: Builder) -> Run:
        return to.shared(lambda: self.tensor)


@convert_to_block.register(torch.Tensor)
@convert_to_block.register(np.ndarray)
def _(tensor: torch.Tensor | np.ndarray, input_type: ResultType | None = None) -> Block:
    return FromTensor(tensor)


class Zeros(Block):
    """Zeros of a type: zero tensors, tuples of them, an empty list for a sequence, None for void.

    Type: VoidType -> output_type. BlockTypeError when it holds a Python object. Without a type, it becomes
    known from what reads it.

    >>> Zeros(([2], SequenceType([]))).eval(None)
    (tensor([0., 0.]), [])
    """

    def __init__(self, output_type: Any = None, name: str | None = None) -> None:
        super().__init__(input_type=VoidType(), output_type=output_type, name=name)

    def infer_types(self) -> None:
        t = self.output_type
        if t is None:
            return
        if any(isinstance(x, PyObjectType) for x in t.terminal_types()):
            raise complain(self, f"there is no zero of a Python object, in {t!r}", self.origins.get("output"))
        if _has_broadcast(t):
            raise complain(
                self, f"there is no zero of an endless sequence, in {t!r}", self.origins.get("output")
            )

    def expression(self) -> str:
        return f"Zeros({'' if self.output_type is None else self.output_type})"

    def build(self, to: Builder) -> Run:
        assert self.output_type is not None
        return zero_of(to, self.output_type, self.device)


def _has_broadcast(t: ResultType) -> bool:
    """Whether a value of type t always holds a broadcast sequence: no element of an empty sequence is needed."""
    if isinstance(t, TupleType):
        return any(map(_has_broadcast, t))
    return isinstance(t, BroadcastSequenceType)


def zero_of(to: Builder, t: ResultType, device: torch.device) -> Run:
    """The function from anything to the zero of a type."""
    if isinstance(t, TensorType):
        zero = torch.zeros(t.shape, dtype=t.dtype, device=device)
        return to.shared(lambda: zero)
    if isinstance(t, TupleType):
        items = [zero_of(to, x, device) for x in t.items]
        return lambda x: tuple([item(x) for item in items])
    if isinstance(t, BroadcastSequenceType):
        raise BlockTypeError(f"there is no empty {t!r}: a broadcast sequence is endless")
    if isinstance(t, SequenceType):
        return lambda x: []
    return lambda x: None


class InputTransform(Block):
    """A Python function over Python objects; it runs while the minibatch is read, never batched.

    Type: PyObjectType -> PyObjectType.

    >>> (InputTransform(str.split) >> Map(InputTransform(len))).eval("ab cde")
    [2, 3]
    """

    input_type_classes = (PyObjectType,)
    output_type_classes = (PyObjectType,)

    def __init__(self, py_fn: Callable[[Any], Any], name: str | None = None) -> None:
        if not callable(py_fn):
            raise BlockTypeError(f"InputTransform takes a function, got {py_fn!r}")
        super().__init__(input_type=PyObjectType(), output_type=PyObjectType(), name=name)
        self.py_fn = py_fn

    def expression(self) -> str:
        return call_text("InputTransform", self.py_fn)

    def build(self, to: Builder) -> Run:
        return self.py_fn


class Void(Block):
    """Nothing, whatever the input. Type: any -> VoidType.

    >>> Void().eval("dropped") is None
    True
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(output_type=VoidType(), name=name)

    def infer_types(self) -> None:
        give(self, "output", VoidType(), self)

    def build(self, to: Builder) -> Run:
        return lambda x: None
