"""`Sum`, `Min`, `Max`, `Mean`: one tensor of a sequence of tensors, zero for none.

In: a sequence of tensors of one type. Out: a tensor of that type.

    fb.Map(fb.Scalar()) >> fb.Mean()

Sequences of different lengths batch as a tree of groups of up to 8 neighbours: all groups of one size and depth, of
all sequences of the minibatch, are one operation, so a minibatch takes about 7 log8(longest) of them at most.
Measured (`python -m benchmarks.block_cost`), groups of 8 take 0.5 to 0.7 of the time of a tree of pairs; one operation
for each length can be faster still, but is a new operation for every length that is met.
"""

from __future__ import annotations

from typing import Any

import torch

from fxbatch.blocks.block import Block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.leaves import zero_of
from fxbatch.blocks.tuples import element_of
from fxbatch.blocks.typed import complain, give
from fxbatch.blocks.types import SequenceType, TensorType, TupleType


class Reduction(Block):
    """Base class: an associative function over a sequence of tensors, zero for no elements."""

    input_type_classes = (SequenceType, TupleType)
    output_type_classes = (TensorType,)
    width = 8  # elements that one operation takes: see benchmarks/block_cost.py

    @staticmethod
    def combine(*xs: torch.Tensor) -> torch.Tensor:
        """Two or more tensors of one type to one."""
        raise NotImplementedError

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    def infer_types(self) -> None:
        if self.input_type is None:
            return
        t = element_of(self, self.input_type, finite=True)
        if not isinstance(t, TensorType):
            raise complain(
                self, f"takes a sequence of tensors, got {self.input_type!r}", self.origins.get("input")
            )
        self.check_element(t)
        give(self, "output", t, self)

    def check_element(self, t: TensorType) -> None:
        """Raise for elements that can't be reduced."""

    def build(self, to: Builder) -> Run:
        t = self.output_type
        assert isinstance(t, TensorType)
        width = self.width
        whole = {n: to.call(self, type(self).combine, TupleType(*[t] * n), t) for n in range(2, width + 1)}
        zero = zero_of(to, t, self.device)

        def run(x: Any) -> Any:
            if not len(x):
                return zero(None)
            while len(x) > 1:
                groups = [tuple(x[i : i + width]) for i in range(0, len(x), width)]
                x = [whole[len(g)](g) if len(g) > 1 else g[0] for g in groups]
            return x[0]

        return run


def total(xs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum of tensors of one type, in that type: PyTorch adds integers up in int64.

    A dtype is given to these only: sums of floating point tensors with one have no native program.
    """
    stacked = torch.stack(xs)
    if stacked.dtype.is_floating_point or stacked.dtype.is_complex:
        return stacked.sum(0)
    return stacked.sum(0, dtype=stacked.dtype)


class Sum(Reduction):
    """The sum of the elements, zero for none. Type: SequenceType(t), or a tuple of t -> t, t a tensor type.

    >>> (Map(Scalar()) >> Sum()).eval([1, 2, 3])
    tensor(6.)
    """

    @staticmethod
    def combine(*xs: torch.Tensor) -> torch.Tensor:
        return total(xs)


class Min(Reduction):
    """The element-wise minimum, zero for no elements. Type: SequenceType(t), or a tuple of t -> t, t a tensor type.

    >>> (Map(Scalar()) >> Min()).eval([3, 1, 2])
    tensor(1.)
    """

    @staticmethod
    def combine(*xs: torch.Tensor) -> torch.Tensor:
        return torch.stack(xs).amin(0)


class Max(Reduction):
    """The element-wise maximum, zero for no elements. Type: SequenceType(t), or a tuple of t -> t, t a tensor type.

    >>> (Map(Scalar()) >> Max()).eval([3, 1, 2])
    tensor(3.)
    """

    @staticmethod
    def combine(*xs: torch.Tensor) -> torch.Tensor:
        return torch.stack(xs).amax(0)


class Mean(Reduction):
    """The mean of the elements, zero for none.

    Type: SequenceType(t), or a tuple of t -> t, t a floating point tensor type.

    >>> (Map(Scalar()) >> Mean()).eval([1, 2])
    tensor(1.5000)
    """

    @staticmethod
    def combine(*xs: torch.Tensor) -> torch.Tensor:
        return total(xs)

    def check_element(self, t: TensorType) -> None:
        if not t.dtype.is_floating_point and not t.dtype.is_complex:
            raise complain(self, f"takes floating point tensors, got {t!r}", self.origins.get("input"))

    def build(self, to: Builder) -> Run:
        t = self.output_type
        assert isinstance(t, TensorType)
        device, scalar = self.device, TensorType((), t.dtype)
        total = super().build(to)
        length = to.scalar(self, scalar.dtype, lambda n: torch.tensor(n, dtype=scalar.dtype, device=device))
        divide = to.call(self, torch.div, TupleType(t, scalar), t)

        def run(x: Any) -> Any:
            return divide((total(x), length(len(x)))) if len(x) else total(x)

        return run
