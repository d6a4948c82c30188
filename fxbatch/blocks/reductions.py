"""`Sum`, `Min`, `Max`, `Mean`: one tensor of a sequence of tensors, zero for none.

In: a sequence of tensors of one type. Out: a tensor of that type.

    fb.Map(fb.Scalar()) >> fb.Mean()

Sequences of different lengths batch as a balanced tree: all additions of one depth, of all sequences of the
minibatch, are one operation, so a minibatch takes about log2(longest) of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fxbatch.blocks.block import Block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.infer import complain, give
from fxbatch.blocks.leaves import zero_of
from fxbatch.blocks.sequences import balanced
from fxbatch.blocks.tuples import element_of
from fxbatch.blocks.types import SequenceType, TensorType, TupleType


class Reduction(Block):
    """Base class: an associative function of two tensors over a sequence, zero for no elements."""

    input_type_classes = (SequenceType, TupleType)
    output_type_classes = (TensorType,)
    combine: ClassVar[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    def infer_types(self) -> None:
        if self.input_type is None:
            if isinstance(self.output_type, TensorType):
                give(self, "input", SequenceType(self.output_type), self)
            return
        t = element_of(self, self.input_type)
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
        combine = to.call(self, type(self).combine, TupleType(t, t), t)
        return balanced(combine, zero_of(to, t, self.device))


class Sum(Reduction):
    """The sum of the elements, zero for none. Type: SequenceType(t) -> t, t a tensor type.

    >>> (Map(Scalar()) >> Sum()).eval([1, 2, 3])
    tensor(6.)
    """

    combine = torch.add


class Min(Reduction):
    """The element-wise minimum, zero for no elements. Type: SequenceType(t) -> t, t a tensor type.

    >>> (Map(Scalar()) >> Min()).eval([3, 1, 2])
    tensor(1.)
    """

    combine = torch.minimum


class Max(Reduction):
    """The element-wise maximum, zero for no elements. Type: SequenceType(t) -> t, t a tensor type.

    >>> (Map(Scalar()) >> Max()).eval([3, 1, 2])
    tensor(3.)
    """

    combine = torch.maximum


class Mean(Reduction):
    """The mean of the elements, zero for none. Type: SequenceType(t) -> t, t a floating point tensor type.

    >>> (Map(Scalar()) >> Mean()).eval([1, 2])
    tensor(1.5000)
    """

    combine = torch.add

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
