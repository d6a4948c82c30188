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

from fxbatch.blocks.block import Block, Pipe, convert_to_block
from fxbatch.blocks.build import Builder, Run
from fxbatch.blocks.function import ScopedLayer
from fxbatch.blocks.leaves import Zeros
from fxbatch.blocks.show import call_text
from fxbatch.blocks.tuples import element_of
from fxbatch.blocks.typed import complain, give, give_nothing, link, mismatch
from fxbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TupleType,
    VoidType,
)
from fxbatch.errors import BlockValueError

_SEQUENCES = (PyObjectType, SequenceType, TupleType)


class Map(Block):
    """A block on each element.

    Type: SequenceType(a), or a tuple of a -> SequenceType(b) for a block a -> b; BroadcastSequenceType(a) ->
    BroadcastSequenceType(b); PyObjectType -> SequenceType(b) for a block over Python objects.

    >>> Map(Scalar()).eval([1, 2])
    [tensor(1.), tensor(2.)]
    """

    input_type_classes = _SEQUENCES
    output_type_classes = (SequenceType, PyObjectType)

    def __init__(self, elem_block: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.element = convert_to_block(elem_block)
        self.adopt("element_block", self.element)

    @property
    def element_block(self) -> Block:
        """The block that is mapped."""
        return self.element

    def infer_types(self) -> None:
        block, t = self.element, self.output_type
        if self.input_type is None and isinstance(block.type_at("input"), PyObjectType):
            give(self, "input", PyObjectType(), block, "input")
        taken = self.input_type
        if taken is not None and not isinstance(block.input_type, VoidType):
            give(block, "input", element_of(self, taken), self.origins.get("input", self))
        if t is not None:
            give(block, "output", element_of(self, t), self, "output")
        made = block.type_at("output")
        if taken is not None and made is not None:
            kind = BroadcastSequenceType if isinstance(taken, BroadcastSequenceType) else SequenceType
            give(self, "output", kind(made), self)

    def expression(self) -> str:
        return call_text("Map", self.element)

    def build(self, to: Builder) -> Run:
        run = self.element.runnable(to)
        if isinstance(self.input_type, BroadcastSequenceType):
            return lambda x: itertools.repeat(run(next(x)))
        return lambda x: [run(e) for e in x]


class Fold(Block):
    """A block `(accumulator, element) -> accumulator` from left to right; the start block's output for no elements.

    Type: SequenceType(t), or a tuple of t -> a for a combine block TupleType(a, t) -> a and a start block
    VoidType -> a.

    >>> (Map(Scalar()) >> Fold(Function(torch.sub), FromTensor(torch.tensor(10.)))).eval([1, 2])
    tensor(7.)
    """

    input_type_classes = _SEQUENCES

    def __init__(self, combine_block: Any, start_block: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        combine, start = convert_to_block(combine_block), convert_to_block(start_block)
        self.combine_block, self.start_block = self.watch(combine), self.watch(start)

    def infer_types(self) -> None:
        combine, start = self.combine_block, self.start_block
        give_nothing(self, start, "the start block")
        link(start, "output", self, "output")
        link(combine, "output", self, "output")
        taken = combine.type_at("input")
        if taken is not None:
            taken = _pair(self, combine, taken, "the combine block takes (accumulator, element)")
            give(self, "output", taken[0], combine, "input")
            if self.input_type is None and isinstance(taken[1], PyObjectType):
                give(self, "input", PyObjectType(), combine, "input")
        element = None if self.input_type is None else element_of(self, self.input_type, finite=True)
        if element is not None and self.output_type is not None:
            _give_cell(self, combine, TupleType(self.output_type, element), element, 1)

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

    Type: SequenceType(t), or a tuple of t -> TupleType(SequenceType(o), s); with `initial_state_from_input`,
    TupleType(SequenceType(t), s) -> the same.

    cell: a block or layer of that type; `nn.RNNCell`, `nn.GRUCell` and `nn.LSTMCell` are taken as they are (see
    ScopedLayer). initial_state: a block or tensor, zeros by default; only without `initial_state_from_input`.

    >>> outputs, state = (Map(Vector(2)) >> RNN(nn.GRUCell(2, 3))).eval([])
    >>> outputs, state
    ([], tensor([0., 0., 0.]))
    """

    input_type_classes = _SEQUENCES
    output_type_classes = (TupleType,)

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
        block = convert_to_block(cell)
        start = Zeros() if initial_state is None else convert_to_block(initial_state)
        self.cell = self.watch(block)
        self.from_input = initial_state_from_input
        self.initial_state: Block | None = None if initial_state_from_input else self.watch(start)

    def infer_types(self) -> None:
        cell, start = self.cell, self.initial_state
        sequence, state = self._from_input()
        if start is not None:
            give_nothing(self, start, "the block of the initial state")
            state = start.type_at("output")
        element = None if sequence is None else element_of(self, sequence, finite=True)
        if isinstance(self.output_type, TupleType):
            self._infer_from_output(self.output_type)
        if element is not None and state is not None:
            _give_cell(self, cell, TupleType(element, state), element, 0)
        taken, made = cell.type_at("input"), cell.type_at("output")
        if taken is not None:
            taken = _pair(self, cell, taken, "the cell takes (element, state)")
            if start is not None:
                give(start, "output", taken[1], cell, "input")
                if self.input_type is None and isinstance(taken[0], PyObjectType):
                    give(self, "input", PyObjectType(), cell, "input")
        if made is None:
            return
        made = _pair(self, cell, made, "the cell gives (output, state)")
        if taken is not None and made[1] != taken[1]:
            raise complain(
                self, f"the cell takes the state {taken[1]!r}, but gives the state {made[1]!r}", cell
            )
        if start is not None:
            give(start, "output", made[1], cell, "output")
        give(self, "output", TupleType(SequenceType(made[0]), made[1]), self)

    def _from_input(self) -> tuple[ResultType | None, ResultType | None]:
        """The types of the sequence and of the initial state that the input has, as far as known."""
        t = self.input_type
        if not self.from_input or t is None:
            return t, None
        if not isinstance(t, TupleType) or len(t) != 2:
            raise complain(self, f"takes (sequence, initial state), got {t!r}", self.origins.get("input"))
        return t[0], t[1]

    def _infer_from_output(self, t: TupleType) -> None:
        if len(t) != 2 or not isinstance(t[0], (SequenceType, PyObjectType)):
            raise complain(self, f"gives (sequence of outputs, state), not {t!r}", self.origins.get("output"))
        give(self.cell, "output", TupleType(element_of(self, t[0], finite=True), t[1]), self, "output")

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

    Neighbours are combined in pairs, an odd last element is carried to the next round, until one is left: the tree is
    about log2(n) deep for n elements, and an associative block gives what a left fold gives.

    Type: SequenceType(t), or a tuple of t -> t for a combine block TupleType(t, t) -> t and a default block
    VoidType -> t, zeros when it is left out.

    >>> (Map(Scalar()) >> Reduce(Function(torch.mul))).eval([2, 3, 4])
    tensor(24.)
    >>> (Map(Scalar()) >> Reduce(Function(torch.sub))).eval([1, 2, 3])
    tensor(-4.)
    """

    input_type_classes = (SequenceType, TupleType)

    def __init__(self, combine_block: Any, default_block: Any = None, name: str | None = None) -> None:
        super().__init__(name=name)
        combine = convert_to_block(combine_block)
        default = Zeros() if default_block is None else convert_to_block(default_block)
        self.combine_block, self.default_block = self.watch(combine), self.watch(default)

    def infer_types(self) -> None:
        combine, default = self.combine_block, self.default_block
        give_nothing(self, default, "the default block")
        link(combine, "output", self, "output")
        link(default, "output", self, "output")
        taken = combine.type_at("input")
        if taken is not None:
            taken = _pair(self, combine, taken, "the combine block takes two of one type")
            if taken[0] != taken[1]:
                raise complain(self, f"the combine block takes two of one type, but takes {taken!r}", combine)
            give(self, "output", taken[0], combine, "input")
        if self.input_type is not None:
            t = element_of(self, self.input_type, finite=True)
            _give_cell(self, combine, TupleType(t, t), t, 0)
            give(self, "output", t, self)

    def expression(self) -> str:
        default = None if isinstance(self.default_block, Zeros) else self.default_block
        return call_text("Reduce", self.combine_block, default_block=(default, None))

    def build(self, to: Builder) -> Run:
        combine, default = self.combine_block.runnable(to), self.default_block.runnable(to)

        def run(x: Any) -> Any:
            if not len(x):
                return default(None)
            while len(x) > 1:
                pairs = [combine((x[i], x[i + 1])) for i in range(0, len(x) - 1, 2)]
                x = [*pairs, x[-1]] if len(x) % 2 else pairs
            return x[0]

        return run


def _pair(block: Block, cell: Block, t: ResultType, what: str) -> TupleType:
    """t, which a part of a block takes or gives, checked to be the type of a pair; BlockTypeError."""
    if not isinstance(t, TupleType) or len(t) != 2:
        raise complain(block, f"{what}, not {t!r}", cell)
    return t


def _give_cell(block: Block, cell: Block, t: TupleType, element: ResultType, place: int) -> None:
    """Tell a cell what it takes; the error of a cell that takes other elements names what gives them."""
    known, origin = cell.type_at("input"), block.origins.get("input", block)
    if isinstance(known, TupleType) and len(known) == 2 and known[place] != element:
        raise mismatch(block, f"takes elements of {known[place]!r}", origin, f"gives {block.input_type!r}")
    give(cell, "input", t, origin)


class Broadcast(Block):
    """An endless sequence of the input; for `Zip` and `Map`.

    Type: t -> BroadcastSequenceType(t), t being no Python object.

    >>> (AllOf(Map(Scalar()), Length() >> Broadcast()) >> ZipWith(Function(torch.div))).eval([1, 2])
    [tensor(0.5000), tensor(1.)]
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    output_type_classes = (BroadcastSequenceType,)

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
    output_type_classes = (SequenceType, PyObjectType)

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
        wrong = next((x for x in t if not isinstance(x, (SequenceType, PyObjectType))), None)
        if wrong is not None:
            raise complain(
                self, f"takes a tuple of sequences, got {wrong!r} in it", self.origins.get("input")
            )
        endless = all(isinstance(x, BroadcastSequenceType) for x in t)
        items = TupleType([element_of(self, x) for x in t])
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
    return Pipe(Zip(), Map(elem_block), name=name)


class NGrams(Block):
    """All runs of n neighbours, as tuples; none when the sequence is shorter than n.

    Type: SequenceType(t), or a tuple of t -> SequenceType(TupleType(t, ... n times)); BroadcastSequenceType ->
    BroadcastSequenceType; PyObjectType -> PyObjectType.

    >>> (NGrams(2) >> InputTransform(list)).eval("abc")
    [('a', 'b'), ('b', 'c')]
    """

    input_type_classes = _SEQUENCES
    output_type_classes = (SequenceType, PyObjectType)

    def __init__(self, n: int, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(n, int) or n <= 0:
            raise BlockValueError(f"NGrams: n is a positive integer, got {n!r}")
        self.n = n

    def expression(self) -> str:
        return call_text("NGrams", self.n)

    def infer_types(self) -> None:
        t = self.input_type
        if isinstance(t, PyObjectType):
            give(self, "output", t, self)
        elif t is not None:
            kind = BroadcastSequenceType if isinstance(t, BroadcastSequenceType) else SequenceType
            give(self, "output", kind(TupleType([element_of(self, t)] * self.n)), self)

    def build(self, to: Builder) -> Run:
        n = self.n
        if isinstance(self.input_type, BroadcastSequenceType):
            return lambda x: itertools.repeat((next(x),) * n)
        return lambda x: list(zip(*[x[i:] for i in range(n)], strict=False))
