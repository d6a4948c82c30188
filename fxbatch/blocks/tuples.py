"""Blocks over tuples and sequences: `Slice`, `Nth`, `Length`, `Concat`.

In: a tuple, a sequence or a Python object. Out: a part of it, its length, its items as one tensor.

    (fb.Scalar(), fb.Vector(2)) >> fb.Length()
    (fb.Scalar(), fb.Vector(3)) >> fb.Concat()

Source: Looks et al. 2017, section 3.2; TensorFlow Fold's blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from fxbatch.blocks.block import Block, GetItem
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
    canonicalize_type,
    is_finite_sequence,
    is_nest_of_tensors,
)
from fxbatch.errors import BlockTypeError


class Slice(GetItem):
    """`x[start:stop:step]`; keyword arguments only, as `Slice(3)` would be ambiguous.

    Type: PyObjectType -> PyObjectType; TupleType -> the tuple of those items; SequenceType -> itself.

    >>> (Map(Scalar("int64")) >> Slice(step=-1) >> Map(Function(torch.neg))).eval([1, 2])
    [tensor(-2), tensor(-1)]
    """

    def __init__(
        self,
        *,
        start: int | None = None,
        stop: int | None = None,
        step: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(slice(start, stop, step), name=name)

    def expression(self) -> str:
        s = self.key
        return call_text("Slice", start=(s.start, None), stop=(s.stop, None), step=(s.step, None))


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
            if not pair or not is_finite_sequence(t[0]):
                raise complain(
                    self, f"takes (SequenceType, PyObjectType), got {t!r}", self.origins.get("input")
                )
            give(self, "output", element_of(self, t[0]), self)

    def build(self, to: Builder) -> Run:
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

    def infer_types(self) -> None:
        if isinstance(self.input_type, BroadcastSequenceType):
            raise complain(
                self, f"an infinite sequence, {self.input_type!r}, has no length", self.origins.get("input")
            )

    def build(self, to: Builder) -> Run:
        assert isinstance(self.output_type, TensorType)
        dtype, device = self.output_type.dtype, self.device
        number = to.scalar(self, dtype, lambda n: torch.tensor(n, dtype=dtype, device=device))
        return lambda x: number(len(x))


class Concat(Block):
    """The tensors of a tuple as one tensor, side by side along a dimension of the instance's tensors.

    Type: a non-empty tuple of tensors that agree in dtype and in all sizes but `concat_dim` -> TensorType; a scalar is
    a vector of one element. With `flatten`, also tuples of tuples. BlockTypeError otherwise.

    >>> ((Vector(2), Scalar()) >> Concat()).eval(([1, 2], 3))
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
        origin = self.origins.get("input")
        assert isinstance(t, TupleType)
        wrong = next((x for x in t if not is_nest_of_tensors(x)), None)
        nested = next((x for x in t if isinstance(x, TupleType)), None)
        if wrong is not None:
            raise complain(self, f"takes a tuple of tensors, got {wrong!r} in it", origin)
        if nested is not None and not self.flatten:
            raise complain(
                self,
                f"takes a tuple of tensors, got {nested!r} in it (flatten=True takes nested tuples)",
                origin,
            )
        shapes: list[tuple[int, ...]] = []
        items = [x for x in t.terminal_types() if isinstance(x, TensorType)]
        if not items:
            raise complain(self, f"takes at least one tensor, got {t!r}", origin)
        for i, item in enumerate(items):
            shape = item.shape or (1,)
            if not -len(shape) <= self.concat_dim < len(shape):
                raise complain(
                    self, f"there is no dimension {self.concat_dim} in tensor {i}, {item!r}", origin
                )
            shapes.append(shape)
            if item.dtype != items[0].dtype or self._others(shape) != self._others(shapes[0]):
                raise complain(
                    self,
                    f"tensors must agree in dtype and in all sizes but dimension {self.concat_dim}: {items[0]!r} "
                    f"and {item!r}",
                    origin,
                )
        d = self.concat_dim % len(shapes[0])
        size = sum(shape[d] for shape in shapes)
        give(self, "output", TensorType((*shapes[0][:d], size, *shapes[0][d + 1 :]), items[0].dtype), self)

    def _others(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes that all tensors have in common."""
        d = self.concat_dim % len(shape)
        return (*shape[:d], -1, *shape[d + 1 :])

    def build(self, to: Builder) -> Run:
        t, out = self.input_type, self.output_type
        assert isinstance(t, TupleType) and isinstance(out, TensorType)
        flat, d = TupleType(t.terminal_types()), self.concat_dim
        if len(flat) == 1 and flat[0] == out:
            return lambda x: t.flatten(x)[0]
        scalars = [isinstance(item, TensorType) and not item.shape for item in flat]

        def concat(*xs: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.reshape(1) if s else x for x, s in zip(xs, scalars, strict=True)], d)

        call = to.call(self, concat, flat, out)
        return (lambda x: call(tuple(t.flatten(x)))) if len(flat) != len(t) or self.flatten else call


def element_of(block: Block, t: ResultType, *, finite: bool = False) -> ResultType:
    """The type of the elements of a sequence type, or of a tuple whose items have one type.

    BlockTypeError in the name of `block` for others, and with `finite` for an endless sequence.
    """
    origin = block.origins.get("input")
    if isinstance(t, PyObjectType):
        return t
    if finite and isinstance(t, BroadcastSequenceType):
        raise complain(block, f"takes no infinite sequence, got {t!r}", origin)
    if isinstance(t, SequenceType):
        return t.element_type
    if isinstance(t, TupleType):
        kinds = list(dict.fromkeys(t.items))
        if len(kinds) == 1:
            return canonicalize_type(kinds[0])
        raise complain(block, f"takes a non-empty tuple whose items have one type, got {t!r}", origin)
    raise complain(block, f"takes a sequence or a tuple, got {t!r}", origin)
