"""Blocks over tuples, and over anything that is indexed: `GetItem`, `Slice`, `Nth`, `Length`, `Concat`.

In: a tuple, a sequence or a Python object. Out: a part of it, its length, its items as one tensor.

    (fb.Scalar(), fb.Vector(2)) >> fb.GetItem(1)
    (fb.Vector(2), fb.Vector(3)) >> fb.Concat()

Source: Looks et al. 2017, section 3.2; TensorFlow Fold's blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from fxbatch.blocks.block import Block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.infer import complain, give
from fxbatch.blocks.show import call_text
from fxbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    canonicalize_type,
)
from fxbatch.errors import BlockTypeError


class GetItem(Block):
    """`x[key]`.

    Type: PyObjectType -> PyObjectType; TupleType -> its item; SequenceType(t) -> t. KeyError or IndexError where
    there is no such item: when the block is built for a tuple, else at run time.

    >>> ((Scalar(), OneHot(2)) >> GetItem(-1)).eval((3, 0))
    tensor([1., 0.])
    """

    input_type_classes = (PyObjectType, TupleType, SequenceType)

    def __init__(self, key: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.key = key
        if not isinstance(key, int):
            self.set_input_type(PyObjectType())

    def expression(self) -> str:
        return call_text("GetItem", self.key)

    def infer_types(self) -> None:
        t = self.input_type
        if isinstance(t, PyObjectType):
            give(self, "output", PyObjectType(), self)
        elif isinstance(t, SequenceType):
            give(self, "output", t.element_type, self)
        elif isinstance(t, TupleType):
            if not -len(t) <= self.key < len(t):
                raise complain(self, f"there is no item {self.key} in {t!r}", self.origins.get("input"))
            give(self, "output", t[self.key], self)

    def build(self, to: Builder) -> Run:
        key = self.key
        return lambda x: x[key]


class Slice(Block):
    """`x[start:stop:step]`; keyword arguments only, as `Slice(3)` would be ambiguous.

    Type: PyObjectType -> PyObjectType; TupleType -> the tuple of those items; SequenceType -> itself.

    >>> (Map(Scalar("int64")) >> Slice(step=-1) >> Map(Function(torch.neg))).eval([1, 2])
    [tensor(-2), tensor(-1)]
    """

    input_type_classes = (PyObjectType, TupleType, SequenceType)

    def __init__(
        self,
        *,
        start: int | None = None,
        stop: int | None = None,
        step: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.slice = slice(start, stop, step)

    def expression(self) -> str:
        s = self.slice
        return call_text("Slice", start=(s.start, None), stop=(s.stop, None), step=(s.step, None))

    def infer_types(self) -> None:
        t = self.input_type
        if isinstance(t, TupleType):
            give(self, "output", t[self.slice], self)
        elif t is not None:
            give(self, "output", t, self)
        elif isinstance(self.output_type, (PyObjectType, SequenceType)):
            give(self, "input", self.output_type, self)

    def build(self, to: Builder) -> Run:
        s = self.slice
        return lambda x: x[s]


class Nth(Block):
    """The n-th element of a sequence, n being a Python integer: the input is the pair (sequence, n).

    Type: TupleType(SequenceType(t), PyObjectType) -> t; PyObjectType -> PyObjectType.

    >>> ((Map(Scalar()), Identity()) >> Nth()).eval(([5, 6, 7], 1))
    tensor(6.)
    """

    input_type_classes = (PyObjectType, TupleType)

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    def infer_types(self) -> None:
        t = self.input_type
        if isinstance(t, PyObjectType):
            give(self, "output", PyObjectType(), self)
        elif isinstance(t, TupleType):
            pair = len(t) == 2 and isinstance(t[1], PyObjectType)
            if not pair or not isinstance(t[0], (SequenceType, TupleType, BroadcastSequenceType)):
                raise complain(
                    self, f"takes (SequenceType, PyObjectType), got {t!r}", self.origins.get("input")
                )
            give(self, "output", element_of(self, t[0]), self)

    def build(self, to: Builder) -> Run:
        t = self.input_type
        if isinstance(t, TupleType) and isinstance(t[0], BroadcastSequenceType):
            return lambda x: next(x[0])
        return lambda x: x[0][x[1]]


class Length(Block):
    """The length of the input as a scalar.

    Type: PyObjectType, TupleType or SequenceType -> TensorType((), dtype).

    >>> (Map(Scalar()) >> Length()).eval([5, 6, 7])
    tensor(3.)
    """

    input_type_classes = (PyObjectType, TupleType, SequenceType)

    def __init__(self, dtype: Any = "float32", name: str | None = None) -> None:
        super().__init__(output_type=TensorType((), dtype), name=name)

    def expression(self) -> str:
        assert isinstance(self.output_type, TensorType)
        return call_text("Length", dtype=(self.output_type.dtype, torch.float32))

    def build(self, to: Builder) -> Run:
        assert isinstance(self.output_type, TensorType)
        dtype, device = self.output_type.dtype, self.device
        number = to.scalar(self, dtype, lambda n: torch.tensor(n, dtype=dtype, device=device))
        return lambda x: number(len(x))


class Concat(Block):
    """The tensors of a tuple as one tensor, side by side along a dimension of the instance's tensors.

    Type: a tuple of tensors that agree in dtype and in all sizes but `concat_dim` -> TensorType; tensors have at
    least one dimension. With `flatten`, also tuples of tuples. BlockTypeError otherwise, or for no tensors.

    >>> ((Vector(2), Vector(1)) >> Concat()).eval(([1, 2], [3]))
    tensor([1., 2., 3.])
    """

    input_type_classes = (TupleType,)
    output_type_classes = (TensorType,)

    def __init__(self, concat_dim: int = 0, flatten: bool = False, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(concat_dim, int):
            raise BlockTypeError(f"Concat: concat_dim is an integer, got {concat_dim!r}")
        self.concat_dim, self.flatten = concat_dim, flatten

    def expression(self) -> str:
        return call_text("Concat", concat_dim=(self.concat_dim, 0), flatten=(self.flatten, False))

    def infer_types(self) -> None:
        t = self.input_type
        if t is None:
            return
        assert isinstance(t, TupleType)
        origin = self.origins.get("input")
        items = list(t.terminal_types()) if self.flatten else list(t)
        if not items:
            raise complain(self, f"takes a non-empty tuple of tensors, got {t!r}", origin)
        first = items[0]
        for i, item in enumerate(items):
            if not isinstance(item, TensorType):
                nested = " (flatten=True concatenates nested tuples)" if isinstance(item, TupleType) else ""
                raise complain(self, f"takes a tuple of tensors, got {item!r} as item {i}{nested}", origin)
            assert isinstance(first, TensorType)
            d = self.concat_dim
            if not -item.ndim <= d < item.ndim:
                raise complain(self, f"there is no dimension {d} in item {i}, {item!r}", origin)
            if item.dtype != first.dtype or item.ndim != first.ndim or _rest(item, d) != _rest(first, d):
                raise complain(
                    self,
                    f"items must agree in dtype and in all sizes but dimension {d}: {first!r} and {item!r}",
                    origin,
                )
        assert isinstance(first, TensorType)
        d = self.concat_dim % first.ndim
        size = sum(x.shape[d] for x in items)  # type: ignore[attr-defined]  # checked above
        give(self, "output", TensorType((*first.shape[:d], size, *first.shape[d + 1 :]), first.dtype), self)

    def build(self, to: Builder) -> Run:
        t, out = self.input_type, self.output_type
        assert isinstance(t, TupleType) and isinstance(out, TensorType)
        nested = any(isinstance(x, TupleType) for x in t)
        flat = TupleType(*t.terminal_types())
        if len(flat) == 1:
            return lambda x: _leaves(x)[0]
        d = self.concat_dim
        call = to.call(self, lambda *xs: torch.cat(xs, d), flat, out)
        return (lambda x: call(_leaves(x))) if nested else call


def _rest(t: TensorType, d: int) -> tuple[int, ...]:
    d %= t.ndim
    return (*t.shape[:d], *t.shape[d + 1 :])


def _leaves(x: Any) -> tuple[Any, ...]:
    return tuple(z for y in x for z in (_leaves(y) if isinstance(y, tuple) else (y,)))


def element_of(block: Block, t: ResultType) -> ResultType:
    """The type of the elements of a sequence type, or of a tuple whose items have one type."""
    if isinstance(t, PyObjectType):
        return t
    if isinstance(t, (SequenceType, BroadcastSequenceType)):
        return t.element_type
    if isinstance(t, TupleType):
        kinds = list(dict.fromkeys(t.items))
        if len(kinds) == 1:
            return canonicalize_type(kinds[0])
        raise complain(
            block, f"takes a tuple whose items have one type, got {t!r}", block.origins.get("input")
        )
    raise complain(block, f"takes a sequence or a tuple, got {t!r}", block.origins.get("input"))
