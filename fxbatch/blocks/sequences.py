"""Blocks over sequences of any length, the empty one included.

In: a sequence (of Python objects, or of typed values), or a tuple whose items have one type. Out: a sequence,
or one value for all of it.

    fb.Map(fb.Scalar()) >> fb.Sum()
    fb.Map(fb.Vector(8)) >> fb.RNN(nn.GRUCell(8, 16)) >> fb.GetItem(1)

Source: Looks et al. 2017, section 3.3; TensorFlow Fold's "blocks for sequences".
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from fxbatch.blocks.block import Block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.convert import convert_to_block
from fxbatch.blocks.infer import complain, give, link
from fxbatch.blocks.layer import ScopedLayer
from fxbatch.blocks.leaves import Zeros
from fxbatch.blocks.show import call_text
from fxbatch.blocks.tuples import element_of
from fxbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TupleType,
    VoidType,
)
from fxbatch.errors import BlockTypeError

_SEQUENCES = (PyObjectType, SequenceType, TupleType)


class Map(Block):
    """A block on each element.

    Type: SequenceType(a) -> SequenceType(b) for a block a -> b; likewise for broadcast sequences, for tuples of
    a (giving tuples of b), and PyObjectType -> SequenceType(b) for a block over Python objects.

    >>> Map(Scalar()).eval([1, 2])
    [tensor(1.), tensor(2.)]
    """

    input_type_classes = (*_SEQUENCES, BroadcastSequenceType)

    def __init__(self, elem_block: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.element = convert_to_block(elem_block)
        self.adopt("element_block", self.element)
        self.infer_types()

    @property
    def element_block(self) -> Block:
        """The block that is mapped."""
        return self.element

    def infer_types(self) -> None:
        block = self._modules["element"]
        assert isinstance(block, Block)
        taken = self.input_type
        if taken is not None and not isinstance(block.input_type, VoidType):
            give(block, "input", element_of(self, taken), self.origins.get("input", self))
        if taken is None and isinstance(block.input_type, PyObjectType):
            give(self, "input", PyObjectType(), block, "input")
            taken = self.input_type
        t = self.output_type
        if isinstance(t, (SequenceType, BroadcastSequenceType)):
            give(block, "output", t.element_type, self, "output")
        if taken is None or block.output_type is None:
            return
        out: ResultType = SequenceType(block.output_type)
        if isinstance(taken, TupleType):
            out = TupleType(*[block.output_type] * len(taken))
        elif isinstance(taken, BroadcastSequenceType):
            out = BroadcastSequenceType(block.output_type)
        give(self, "output", out, self)

    def expression(self) -> str:
        return call_text("Map", self._modules["element"])

    def build(self, to: Builder) -> Run:
        run = self.element.runnable(to)
        if isinstance(self.input_type, TupleType):
            return lambda x: tuple([run(e) for e in x])
        if isinstance(self.input_type, BroadcastSequenceType):
            return lambda x: itertools.repeat(run(next(x)))
        return lambda x: [run(e) for e in x]


class Fold(Block):
    """A block `(accumulator, element) -> accumulator` from left to right; the start block's output for no elements.

    Type: SequenceType(t) -> a for a combine block TupleType(a, t) -> a and a start block VoidType -> a.

    >>> (Map(Scalar()) >> Fold(Function(torch.sub), FromTensor(torch.tensor(10.)))).eval([1, 2])
    tensor(7.)
    """

    input_type_classes = _SEQUENCES

    def __init__(self, combine_block: Any, start_block: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.combine_block = self.watch(convert_to_block(combine_block))
        self.start_block = self.watch(convert_to_block(start_block))
        self.infer_types()

    def infer_types(self) -> None:
        combine, start = self._modules["combine_block"], self._modules["start_block"]
        assert isinstance(combine, Block) and isinstance(start, Block)
        if start.input_type is None:
            give(start, "input", VoidType(), self)
        link(combine, "output", self, "output")
        link(start, "output", self, "output")
        link(start, "output", combine, "output")
        element = None if self.input_type is None else element_of(self, self.input_type)
        t = combine.input_type
        if t is not None:
            if not isinstance(t, TupleType) or len(t) != 2:
                raise complain(
                    self, f"the combine block takes (accumulator, element), but takes {t!r}", combine
                )
            give(start, "output", t[0], combine, "input")
            give(combine, "output", t[0], combine, "input")
            if self.input_type is None and not isinstance(t[1], PyObjectType):
                give(self, "input", SequenceType(t[1]), combine, "input")
            elif self.input_type is None:
                give(self, "input", PyObjectType(), combine, "input")
        if element is not None and start.output_type is not None:
            give(combine, "input", TupleType(start.output_type, element), self.origins.get("input", self))

    def expression(self) -> str:
        return call_text("Fold", self.combine_block, self.start_block)

    def build(self, to: Builder) -> Run:
        combine, start = self.combine_block.runnable(to), self.start_block.runnable(to)

        def run(x: Any) -> Any:
            a = start(None)
            for e in x:
                a = combine((a, e))
            return a

        return run


class RNN(Block):
    """A cell `(element, state) -> (output, state)` along a sequence; the outputs, and the last state.

    Type: SequenceType(t) -> TupleType(SequenceType(o), s); with `initial_state_from_input`,
    TupleType(SequenceType(t), s) -> the same.

    cell: a block or layer of that type; `nn.RNNCell`, `nn.GRUCell` and `nn.LSTMCell` are taken as they are (see
    ScopedLayer). initial_state: a block or tensor, zeros by default; only without `initial_state_from_input`.

    >>> outputs, state = (Map(Vector(2)) >> RNN(nn.GRUCell(2, 3))).eval([])
    >>> outputs, state
    ([], tensor([0., 0., 0.]))
    """

    input_type_classes = _SEQUENCES

    def __init__(
        self,
        cell: Any,
        initial_state: Any = None,
        initial_state_from_input: bool = False,
        name: str | None = None,
    ) -> None:
        if initial_state_from_input and initial_state is not None:
            raise ValueError("RNN: an initial state and initial_state_from_input=True exclude each other")
        super().__init__(name=name)
        if isinstance(cell, nn.RNNCellBase):
            cell = ScopedLayer(cell)
        self.cell = self.watch(convert_to_block(cell))
        self.from_input = initial_state_from_input
        self.initial_state: Block | None = None
        if not initial_state_from_input:
            self.initial_state = self.watch(
                Zeros() if initial_state is None else convert_to_block(initial_state)
            )
        self.infer_types()

    def infer_types(self) -> None:
        if "cell" not in self._modules or ("initial_state" not in self._modules and not self.from_input):
            return
        cell, start = self.cell, self.initial_state
        if start is not None and start.input_type is None:
            give(start, "input", VoidType(), self)
        sequence, state = self._from_input()
        self._infer_cell(cell, start, sequence, state)
        taken, made = cell.input_type, cell.output_type
        if taken is None:
            return
        if not isinstance(taken, TupleType) or len(taken) != 2:
            raise complain(self, f"the cell takes (element, state), but takes {taken!r}", cell)
        if start is not None:
            give(start, "output", taken[1], cell, "input")
        if self.input_type is None:
            whole: ResultType = SequenceType(taken[0])
            give(self, "input", TupleType(whole, taken[1]) if self.from_input else whole, cell, "input")
        if made is None:
            return
        if not isinstance(made, TupleType) or len(made) != 2:
            raise complain(self, f"the cell gives (output, state), but gives {made!r}", cell)
        if made[1] != taken[1]:
            raise complain(
                self, f"the cell takes the state {taken[1]!r}, but gives the state {made[1]!r}", cell
            )
        give(self, "output", TupleType(SequenceType(made[0]), made[1]), self)

    def _from_input(self) -> tuple[ResultType | None, ResultType | None]:
        """The types of the sequence and of the initial state that the input has, as far as known."""
        t = self.input_type
        if not self.from_input or t is None:
            return t, None
        if not isinstance(t, TupleType) or len(t) != 2:
            raise complain(self, f"takes (sequence, initial state), got {t!r}", self.origins.get("input"))
        return t[0], t[1]

    def _infer_cell(
        self, cell: Block, start: Block | None, sequence: ResultType | None, state: ResultType | None
    ) -> None:
        made = cell.output_type
        if start is not None:
            if start.output_type is None and isinstance(made, TupleType) and len(made) == 2:
                give(start, "output", made[1], cell, "output")
            state = start.output_type
        if sequence is not None and state is not None:
            t = TupleType(element_of(self, sequence), state)
            give(cell, "input", t, self.origins.get("input", self))

    def expression(self) -> str:
        start = None if isinstance(self.initial_state, Zeros) else self.initial_state
        return call_text(
            "RNN", self.cell, initial_state=(start, None), initial_state_from_input=(self.from_input, False)
        )

    def build(self, to: Builder) -> Run:
        cell = self.cell.runnable(to)

        def along(sequence: Any, state: Any) -> Any:
            outputs = []
            for e in sequence:
                output, state = cell((e, state))
                outputs.append(output)
            return outputs, state

        if self.initial_state is None:
            return lambda x: along(x[0], x[1])
        start = self.initial_state.runnable(to)
        return lambda x: along(x, start(None))


class Reduce(Block):
    """A block `(t, t) -> t` over a sequence, as a balanced tree; the default block's output for no elements.

    The halves of a sequence of n elements have n // 2 and n - n // 2 elements, so the tree is about log2(n) deep
    and an associative block gives what a left fold gives.

    Type: SequenceType(t) -> t for a combine block TupleType(t, t) -> t and a default block VoidType -> t, zeros
    when it is left out.

    >>> (Map(Scalar()) >> Reduce(Function(torch.mul))).eval([2, 3, 4])
    tensor(24.)
    """

    input_type_classes = _SEQUENCES

    def __init__(self, combine_block: Any, default_block: Any = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.combine_block = self.watch(convert_to_block(combine_block))
        self.default_block = self.watch(Zeros() if default_block is None else convert_to_block(default_block))
        self.infer_types()

    def infer_types(self) -> None:
        if "default_block" not in self._modules:
            return
        combine, default = self.combine_block, self.default_block
        if default.input_type is None:
            give(default, "input", VoidType(), self)
        link(combine, "output", self, "output")
        link(default, "output", self, "output")
        if self.input_type is not None:
            t = element_of(self, self.input_type)
            give(self, "output", t, self)
            give(combine, "input", TupleType(t, t), self.origins.get("input", self))
            link(combine, "output", self, "output")
            link(default, "output", self, "output")
        taken = combine.input_type
        if isinstance(taken, TupleType) and self.input_type is None:
            if len(taken) != 2 or taken[0] != taken[1]:
                raise complain(self, f"the combine block takes two of one type, but takes {taken!r}", combine)
            give(self, "input", SequenceType(taken[0]), combine, "input")

    def expression(self) -> str:
        default = None if isinstance(self.default_block, Zeros) else self.default_block
        return call_text("Reduce", self.combine_block, default_block=(default, None))

    def build(self, to: Builder) -> Run:
        return balanced(self.combine_block.runnable(to), self.default_block.runnable(to))


def balanced(combine: Run, default: Run) -> Run:
    """The function that reduces a list by `combine((left, right))` as a balanced tree."""

    def reduce(x: Any, first: int, last: int) -> Any:
        n = last - first
        if n == 1:
            return x[first]
        if n == 2:
            return combine((x[first], x[first + 1]))
        middle = first + n // 2
        return combine((reduce(x, first, middle), reduce(x, middle, last)))

    return lambda x: reduce(x, 0, len(x)) if len(x) else default(None)


class Broadcast(Block):
    """An endless sequence of the input; for `Zip` and `Map`. Type: t -> BroadcastSequenceType(t).

    >>> (AllOf(Map(Scalar()), Length() >> Broadcast()) >> ZipWith(Function(torch.div))).eval([1, 2])
    [tensor(0.5000), tensor(1.)]
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    def infer_types(self) -> None:
        if isinstance(self.output_type, BroadcastSequenceType):
            give(self, "input", self.output_type.element_type, self)
        if self.input_type is not None:
            give(self, "output", BroadcastSequenceType(self.input_type), self)

    def build(self, to: Builder) -> Run:
        return itertools.repeat


class Zip(Block):
    """A tuple of sequences to a sequence of tuples, as long as the shortest of them.

    Type: TupleType(SequenceType(a), SequenceType(b), ...) -> SequenceType(TupleType(a, b, ...)). Items may be
    broadcast sequences (all of them: the output is one too) or Python objects; PyObjectType -> PyObjectType.

    >>> ((Map(Scalar()), Map(OneHot(2))) >> Zip()).eval(([1, 2, 3], [0]))
    [(tensor(1.), tensor([1., 0.]))]
    """

    input_type_classes = (TupleType, PyObjectType)

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    def infer_types(self) -> None:
        t = self.input_type
        if isinstance(t, PyObjectType):
            give(self, "output", PyObjectType(), self)
        if not isinstance(t, TupleType):
            return
        if not len(t):
            raise complain(self, "takes at least one sequence", self.origins.get("input"))
        endless = all(isinstance(x, BroadcastSequenceType) for x in t)
        items = TupleType(*(element_of(self, x) for x in t))
        give(self, "output", BroadcastSequenceType(items) if endless else SequenceType(items), self)

    def build(self, to: Builder) -> Run:
        if isinstance(self.output_type, BroadcastSequenceType):
            return lambda x: itertools.repeat(tuple([next(s) for s in x]))
        return lambda x: list(zip(*x, strict=False))


def ZipWith(elem_block: Any, name: str | None = None) -> Block:  # a block's name
    """`Zip() >> Map(elem_block)`. Type: TupleType of sequences -> SequenceType of what the block gives.

    >>> ((Map(Scalar()), Map(Scalar())) >> ZipWith(Function(torch.add))).eval(([1, 2], [3, 4]))
    [tensor(4.), tensor(6.)]
    """
    from fxbatch.blocks.composition import Pipe

    return Pipe(Zip(), Map(elem_block), name=name)


class NGrams(Block):
    """All runs of n neighbours, as tuples; none when the sequence is shorter than n.

    Type: SequenceType(t) -> SequenceType(TupleType(t, ... n times)); PyObjectType -> PyObjectType.

    >>> (NGrams(2) >> InputTransform(list)).eval("abc")
    [('a', 'b'), ('b', 'c')]
    """

    input_type_classes = _SEQUENCES

    def __init__(self, n: int, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(n, int) or n <= 0:
            raise BlockTypeError(f"NGrams: n is a positive integer, got {n!r}")
        self.n = n

    def expression(self) -> str:
        return call_text("NGrams", self.n)

    def infer_types(self) -> None:
        t = self.input_type
        if isinstance(t, PyObjectType):
            give(self, "output", t, self)
        elif t is not None:
            give(self, "output", SequenceType(TupleType(*[element_of(self, t)] * self.n)), self)

    def build(self, to: Builder) -> Run:
        n = self.n
        return lambda x: list(zip(*[x[i:] for i in range(n)], strict=False))
