"""An operation graph as a native program: records of int64 that `_native.c` runs without Python.

In: an operation graph. Out: a NativeProgram, or the reason why there is none.

    program = make_program(module, shared)     # NativeProgram(bases, instructions), or "aten.foo"
    program.instructions["width"]                       # array([450, 450, ...])

Records are declared in `native_table.py`. Calls in a row that are pointwise over the same rows run fused, in blocks
of rows, so that what they read of each other is in the first cache.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from fxbatch.codegen import native_calls as calls
from fxbatch.codegen.kernel import call_alone, find_prepared
from fxbatch.codegen.native import CALLS
from fxbatch.codegen.native_calls import CODES, Pointwise, pointwise
from fxbatch.codegen.native_layouts import (
    DTYPES,
    ONE,
    NotNative,
    Span,
    around,
    as_matrix,
    as_rows,
    broadcast,
    contiguous,
    dense,
    dtype_name,
    even_rows,
    narrow,
    need,
    of_type,
    rows_and_width,
    same_rows,
    view,
    walk,
)
from fxbatch.codegen.native_table import (
    MOST_BASES,
    MOST_RANK,
    Base,
    Dimension,
    Instruction,
    Memory,
    Operand,
    View,
)
from fxbatch.codegen.operation_graphs import (
    Shape,
    Size,
    concatenated,
    fit,
    is_size,
    is_tensor,
    is_view,
    sample_sizes,
    shape,
)
from fxbatch.codegen.operation_graphs import dtype as dtype_of
from fxbatch.codegen.simplify import constant_value, is_random

aten = torch.ops.aten
UNUSED = Operand()
MOST_CONSTANT = 4096  # elements of a constant that each launch copies; a larger one Python makes once a run
SHORT = 16  # elements of a dimension that is added up one addition after another


@dataclass(frozen=True, eq=False)
class NativeProgram:
    """Records, Base, Instruction and View, as C reads them, and what its instructions of kind CALL call."""

    bases: np.ndarray
    instructions: np.ndarray
    views: np.ndarray
    functions: tuple[Callable[..., object], ...]
    calls: tuple[str, ...]  # of torch: their names


def record_type(record: type) -> np.dtype[Any]:
    """A record of `native_table.py` as numbers in memory."""
    return np.dtype([(name, np.int64 if kind is int else record_type(kind), MOST_RANK if kind is Dimension else ())
                     for name, kind in record.__annotations__.items()])  # fmt: skip


def records(record: type, items: Sequence[object]) -> np.ndarray:
    """Records one after another, for C."""
    return np.array(list(items), dtype=record_type(record))


def make_program(
    module: fx.GraphModule, shared: Sequence[torch.Tensor], *, adding: bool = False
) -> NativeProgram | str:
    """The native program of an operation graph whose last inputs are the shared operands `shared`. adding: it adds to
    its results, which are float32, and can't fail."""
    try:
        return Lowering(module.graph, shared, adding).run()
    except NotNative as reason:
        return str(reason)


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a concatenation."""

    node: fx.Node
    dim: int
    start: int
    size: int


@dataclass
class Lowering:
    """The program as it is written."""

    graph: fx.Graph
    shared: Sequence[torch.Tensor]
    adding: bool = False
    bases: list[Base] = field(default_factory=list)
    items: list[Instruction] = field(default_factory=list)
    views: list[tuple[object, ...]] = field(default_factory=list)  # as View has them
    calls: list[tuple[str, Callable[..., object]]] = field(default_factory=list)  # of torch
    spans: dict[fx.Node, Span] = field(default_factory=dict)
    output_base: list[int] = field(default_factory=list)
    place: dict[fx.Node, int] = field(default_factory=dict)  # node -> the result that is written with it
    # Node -> its part of a concatenation.
    pieces: dict[fx.Node, tuple[fx.Node, Part]] = field(default_factory=dict)
    copied: dict[fx.Node, list[Part]] = field(default_factory=dict)  # concatenation -> parts that are copied

    def run(self) -> NativeProgram:
        self.outputs: list[fx.Node] = list(self.graph.output_node().args[0])
        # What no row needs: else blocks of rows would end there.
        first = self.first = find_prepared(self.graph)[0]
        strided = all(is_tensor(x) and x.meta["values"][0].layout is torch.strided for x in self.outputs)
        need(strided, "a result that is no dense tensor")
        need(not self.adding or self._can_add(), "a result that can't be added to")
        self._inputs()
        self._place()
        for node in self.outputs:
            self.output_base.append(self.base(shape(node), dtype_of(node), Memory.OUTPUT))
        for node in (*first, *(x for x in self.graph.nodes if x not in first)):
            self.node = node
            if node.op == "call_function":
                self._node(node)
        for i, node in enumerate(self.outputs):
            if i not in self.place.values():
                out = contiguous(self.output_base[i], shape(node), dtype_of(node))
                if self.adding:
                    self.loops(out, [out, self.span(node)], "add", 1.0)
                else:
                    self.copy(out, self.span(node))
        need(len(self.bases) <= MOST_BASES, f"more than {MOST_BASES} tensors")
        need(bool(self.items), "nothing to do")
        bases, views = records(Base, self.bases), records(View, self.views)
        instructions = records(Instruction, group_pointwise(self.items))
        functions = tuple(function for _, function in self.calls)
        return NativeProgram(bases, instructions, views, functions, tuple(name for name, _ in self.calls))

    # -- memory

    def base(self, dims: Shape, dtype: torch.dtype, kind: Memory) -> int:
        """A new piece of memory for a contiguous tensor."""
        need(dtype in DTYPES, f"numbers of type {dtype_name(dtype)}")
        (a, b), width = rows_and_width(dims)
        need(a >= 0 and b >= 0 and a + b > 0 and width > 0, "a tensor without elements")
        self.bases.append(Base(a, b, width * dtype.itemsize, kind))
        return len(self.bases) - 1

    def new_span(self, dims: Shape, dtype: torch.dtype = torch.float32, kind: Memory = Memory.OWN) -> Span:
        """A new contiguous tensor, in memory of the program's own or as an input."""
        return contiguous(self.base(dims, dtype, kind), dims, dtype)

    def in_new_span(self, source: Span) -> Span:
        """A span, or a number, in new memory of the program's own."""
        whole = self.new_span(source.shape, source.dtype)
        self.copy(whole, source)
        return whole

    def _place(self) -> None:
        """A result, or what it is a reshape of, is written where the caller wants it; what only a concatenation
        reads, straight into its place there."""
        for i, node in enumerate(self.outputs):
            while node.target is aten.reshape.default:
                node = node.args[0]  # type: ignore[assignment]
            whole = not self.adding or self._added_in_place(node, self.outputs[i])
            if self._writes(node) and node not in self.place and whole:
                self.place[node] = i
        for node in reversed(self.graph.nodes):
            pieces = concatenated(node) if self._writes(node) else None
            if pieces is None:
                continue
            self.copied[node] = []
            for x, start, end in pieces[1]:
                piece = Part(x, pieces[0], start, end - start)
                alone = len(x.users) == 1 and node.args[0].count(x) == 1 and x not in self.place
                if alone and dtype_of(x) == dtype_of(node) and self._writes(x):
                    self.pieces[x] = node, piece
                else:
                    self.copied[node].append(piece)

    def _can_add(self) -> bool:
        """Whether no index that is out of range may end the program when some results were added to."""
        sums = all(x.target not in ROW_CALLS or x.target in _SUMS for x in self.graph.nodes)
        return sums and all(dtype_of(x) is torch.float32 for x in self.outputs)

    def _added_in_place(self, node: fx.Node, result: fx.Node) -> bool:
        """Whether a product, as it is or reshaped, is a result that nobody else reads."""
        alone = len(node.users) == len(result.users) == 1 and self.outputs.count(result) == 1
        return alone and node.target is aten.mm.default and (node is result or node is result.args[0])

    def _writes(self, node: fx.Node) -> bool:
        """Whether instructions of its own write the node."""
        if node.op != "call_function" or not is_tensor(node) or is_view(node):
            return False
        return constant_value(node) is None

    def _inputs(self) -> None:
        nodes = [x for x in self.graph.nodes if x.op == "placeholder"][1:]
        first = len(nodes) - len(self.shared)
        for i, node in enumerate(nodes):
            need(is_tensor(node), "an input that is no tensor")
            if i < first:
                need(shape(node)[:1] == ((1, 0),), "an input without rows")
                self.spans[node] = self.new_span(shape(node), dtype_of(node), Memory.INPUT)
            else:
                self.spans[node] = self._shared(shape(node), dtype_of(node), self.shared[i - first])

    def _shared(self, dims: Shape, dtype: torch.dtype, like: torch.Tensor) -> Span:
        """Memory of a shared operand as it is, from its first element to its last."""
        dense = like.layout is torch.strided and like.device.type == "cpu" and like.numel() > 0
        need(dense and like.dtype == dtype, "a shared operand that is not dense on the CPU")
        last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1
        number = self.base(((0, last),), dtype, Memory.INPUT)
        strides = tuple(0 if n == 1 else s for n, s in zip(like.shape, like.stride(), strict=True))
        return Span(number, 0, dims, strides, dtype)

    def span(self, node: object) -> Span:
        """Where a node, or a number, is."""
        if isinstance(node, (bool, int, float)):
            return Span(-1, 0, (), (), torch.float32, node)
        if not isinstance(node, fx.Node):
            raise NotNative("an argument that is no tensor")
        if node in self.spans:
            return self.spans[node]
        number = constant_value(node)
        if number is None:
            raise NotNative(f"{node.target}")
        return Span(-1, 0, shape(node), (0,) * len(shape(node)), dtype_of(node), number)

    def target(self, node: fx.Node) -> Span:
        """Where a node is to be written."""
        if node in self.spans:
            return self.spans[node]
        if node in self.place:
            span = contiguous(self.output_base[self.place[node]], shape(node), dtype_of(node))
        elif node in self.pieces:
            whole, piece = self.pieces[node]
            span = narrow(self.target(whole), piece.dim, piece.start, piece.size)
        else:
            span = self.new_span(shape(node), dtype_of(node))
        self.spans[node] = span
        return span

    # -- nodes

    def _node(self, node: fx.Node) -> None:
        if not is_tensor(node):
            if isinstance(node.meta["values"][0], int) or node.target in _EXTREMES:
                return  # sizes, which are known; pairs, of which each is written by itself
            self.call(node, f"{node.target}")
            return
        if constant_value(node) is not None or (node.target is operator.getitem and node in self.spans):
            return
        if node in self.copied:
            for piece in self.copied[node]:
                place = narrow(self.target(node), piece.dim, piece.start, piece.size)
                self.copy(place, self.span(piece.node))
        elif is_view(node):
            self._view(node)
        else:
            parts = self.bases, self.items, self.views, self.calls, self.spans
            bases, items, views, calls, spans = map(len, parts)
            try:
                if (call := pointwise(node)) is not None:
                    self.pointwise(self.target(node), call)
                elif node.target in ROW_CALLS:
                    ROW_CALLS[node.target](self, node)
                else:
                    raise NotNative(f"{node.target}")
            except NotNative as reason:
                del self.bases[bases:], self.items[items:], self.views[views:], self.calls[calls:]
                for new in list(self.spans)[spans:]:
                    del self.spans[new]
                self.call(node, str(reason))

    def call(self, node: fx.Node, reason: str) -> None:
        """A call that C has no instruction for is torch's, of what lies in the program's memory."""
        results = [node] if is_tensor(node) else [x for x in node.users if x.target is operator.getitem]
        if node in self.first:
            constant = of_numbers(node)
            need(constant is not None and constant.numel() <= MOST_CONSTANT, reason)
            self.give_to_torch(
                f"{node.target}", lambda outs: outs[0].copy_(constant), [self.target(node)], 1, reason
            )
            return
        read = node.all_input_nodes
        readable = all(is_tensor(x) for x in results) and all(is_tensor(x) or is_size(x) for x in read)
        need(readable and bool(results) and not is_random(node), reason)
        spans = [_in_memory(self, self.span(x)) for x in read if is_tensor(x)]
        spans += [*map(self.target, results)]
        function = call_alone(node, results)
        if not all(map(is_tensor, read)):
            function = counting_rows(function, read, spans)
        self.give_to_torch(f"{node.target}", function, spans, len(results), reason)

    def give_to_torch(
        self, name: str, function: Callable[..., object], spans: Sequence[Span], results: int, reason: str
    ) -> None:
        """An instruction that gives these to a function of torch's, which writes to the last `results` of them."""
        need(CALLS and not self.adding, reason)
        need(all(x.base >= 0 and len(x.shape) <= MOST_RANK for x in spans), reason)
        fields = {"views": len(self.views), "view_count": len(spans), "results": results}
        self.items.append(Instruction(CODES["CALL"], 1, 0, 1, UNUSED, number=len(self.calls), **fields))
        self.calls.append((name, function))
        for x in spans:
            dims = [Dimension(a, b, stride) for (a, b), stride in zip(x.shape, x.strides, strict=True)]
            dims += [Dimension()] * (MOST_RANK - len(dims))
            self.views.append((x.base, x.offset, DTYPES.index(x.dtype), len(x.shape), dims))

    def _view(self, node: fx.Node) -> None:
        source = self.span(node.args[0])
        span = view(source, node) or view(self.in_new_span(source), node)  # a reshape that copies
        if span is None:
            raise NotNative(f"{node.target}")
        self.spans[node] = span

    # -- instructions

    def copy(self, out: Span, source: Span) -> None:
        """Write a span, or a number, to another."""
        call = calls.cast(out.dtype, out.dtype, None)
        if call is None or (source.base >= 0 and source.dtype != out.dtype):
            raise NotNative("a copy to another type")
        try:
            self.loops(out, [as_number(source, out.dtype)], call.name, 0.0)
        except NotNative as reason:
            need(self.node not in self.first, str(reason))
            self.give_to_torch("copy", _copied, [source, out], 1, str(reason))

    def pointwise(self, out: Span, call: Pointwise) -> None:
        """A pointwise call, as one loop or a few."""
        kinds = call.dtypes()
        operands = [as_number(self.span(x), kind) for x, kind in zip(call.operands, kinds[1:], strict=True)]
        for span, kind in zip((out, *operands), kinds, strict=True):
            need(span.dtype == kind, f"{call.name} of {dtype_name(span.dtype)}")
        self.loops(out, operands, call.name, call.number)

    def loops(self, out: Span, operands: list[Span], name: str, number: float) -> None:
        """Pointwise instructions that write `out`."""
        for rows, width, loop in walk(out.shape, [out, *operands]):
            read = [
                Operand(offset=_bits(span.number, span.dtype)) if span.base < 0 else place
                for span, place in zip((out, *operands), loop, strict=True)
            ]
            bits = struct.unpack("<q", struct.pack("<d", number))[0]
            self.add(name, rows, width, *read, number=bits, group=0)

    def add(
        self, name: str, rows: Size, width: int, *operands: Operand, depth: Size = ONE, **fields: int
    ) -> None:
        """One instruction: operation, rows, width and operands (the result first), and what else it needs."""
        (per_row, rest), (out, a, b, c) = depth, (*operands, UNUSED, UNUSED, UNUSED)[:4]
        code = CODES[name]
        self.items.append(
            Instruction(code, *rows, width, out, a, b, c, depth_per_row=per_row, depth_rest=rest, **fields)
        )

    def floats(self, node: object) -> Span:
        """Where a node of float32 is, which is no number."""
        return of_type(self.span(node), torch.float32)

    def integers(self, node: object) -> Span:
        """Where a node of int64 is, which is no number."""
        return of_type(self.span(node), torch.int64)


def of_numbers(node: fx.Node) -> torch.Tensor | None:
    """What a call gives that reads no input, as `triu(ones(8, 8))`; None for others."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    read = {x: of_numbers(x) for x in node.all_input_nodes}
    if is_random(node) or any(x is None for x in read.values()):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), read.__getitem__)
    return node.target(*args, **kwargs)


def counting_rows(
    function: Callable[[Sequence[object]], object], read: Sequence[fx.Node], spans: Sequence[Span]
) -> Callable[[Sequence[object]], object]:
    """A call that reads numbers of rows as well, as the groups of a convolution: told by the sizes of its tensors."""
    place = next(
        ((i, d, size) for i, x in enumerate(spans) for d, size in enumerate(x.shape) if size[0]), None
    )
    if place is None:
        raise NotNative("a number of rows that no tensor has")
    (of, dim, (factor, rest)), rows = place, sample_sizes(read[0].graph)
    pairs = [(i, x.meta["values"]) for i, x in enumerate(read) if not is_tensor(x)]
    numbers = [(i, fit(first, second, rows)) for i, (first, second) in pairs]

    def call(tensors: Sequence[torch.Tensor]) -> object:
        n, operands = (tensors[of].shape[dim] - rest) // factor, list[object](tensors)
        for i, (a, b) in numbers:
            operands.insert(i, a * n + b)
        return function(operands)

    return call


def _copied(tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors[1].copy_(tensors[0])


def as_number(span: Span, kind: torch.dtype) -> Span:
    """A number as one of that type; memory as it is."""
    return span if span.base >= 0 else Span(-1, 0, span.shape, span.strides, kind, span.number)


def _bits(number: float, dtype: torch.dtype) -> int:
    if dtype is torch.float32:
        return int(np.array([number, 0.0], dtype=np.float32).view(np.int64)[0])
    return int(number)


def group_pointwise(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The runs of pointwise instructions that may go block by block of rows are numbered.

    They walk the same rows, and what one writes another reads from the same rows: with the same stride.
    """
    number, rows, written = -1, (-1, -1), dict[int, int]()
    numbered = []
    for x in instructions:
        if x.group < 0:
            rows = (-1, -1)
            numbered.append(x)
            continue
        apart = any(o.base >= 0 and written.get(o.base, o.stride) != o.stride for o in (x.a, x.b, x.c))
        mine = (x.per_row, x.rest)
        if mine != rows or (apart and mine != ONE):
            number, rows, written = number + 1, mine, {}
        numbered.append(x._replace(group=number))
        written[x.out.base] = x.out.stride
    return numbered


# -- calls that aren't pointwise: each adds an instruction, or raises NotNative


def product(lowering: Lowering, node: fx.Node) -> None:
    """mm(a, b) and addmm(c, a, b)."""
    args = list(node.args)
    out = lowering.target(node)
    start = out.lines if lowering.adding and node in lowering.place else UNUSED
    if node.target is aten.addmm.default:
        need(not node.kwargs and len(args) == 3, "a product with factors")
        start = _start(lowering, out, lowering.span(args.pop(0)))
    a, b = (_in_memory(lowering, lowering.span(x)) for x in args)
    of_type(out, torch.float32)
    (rows, columns), depth = out.shape, a.shape[1]
    need(columns[0] == 0, "as many columns as rows")
    need(columns == ONE or out.strides[1] == 1, "a result that isn't contiguous")
    lowering.add("PRODUCT", rows, columns[1], out.lines, as_matrix(a), as_matrix(b), start, depth=depth)


def _start(lowering: Lowering, out: Span, span: Span) -> Operand:
    """The operand that a product is added to (a bias): read where it lies, or copied to the result first."""
    row, inner = broadcast(span, out.shape)
    if span.base >= 0 and span.dtype is torch.float32 and (inner == 1 or out.shape[1] == ONE):
        return Operand(span.base, span.offset, row, 1)
    lowering.copy(out, span)
    return out.lines


def _in_memory(lowering: Lowering, span: Span) -> Span:
    """A span, or the memory that a number is written to: a state of zeros, multiplied by its weights."""
    return span if span.base >= 0 or not span.shape else lowering.in_new_span(span)


def lookup(lowering: Lowering, node: fx.Node) -> None:
    """index_select(table, 0, index)."""
    table, index = lowering.floats(node.args[0]), lowering.integers(node.args[2])
    first = node.args[1] == 0 and len(table.shape) == 2 and len(index.shape) == 1
    need(first, "another dimension than the first")
    size, width = table.shape
    need(size[0] == 0 and (width == ONE or table.strides[1] == 1), "a table with other strides")
    rows, place = as_rows(lowering.target(node))
    lowering.add("LOOKUP", rows, width[1], place, table.lines, index.lines, depth=size)


def _position(dim: Any, dims: Shape) -> int:
    return int(dim) % max(len(dims), 1)


def sum_dimensions(lowering: Lowering, node: fx.Node) -> None:
    """sum over the rows, over the last dimension, over a short one, or over some of one element (then a copy)."""
    source, out = lowering.span(node.args[0]), lowering.target(node)
    need(not node.kwargs.get("dtype"), "a sum in another type")
    dims = source.shape
    dims_given = node.args[1] if len(node.args) > 1 else None
    every = dims_given if isinstance(dims_given, (list, tuple)) else range(len(dims))
    over = [d for d in sorted({_position(d, dims) for d in every}) if dims[d] != ONE]
    left = [d for d in range(len(dims)) if d not in over and dims[d] != ONE]
    squeezed = replace(out, shape=tuple(dims[d] for d in left), strides=dense(out, len(left)))
    reduced = replace(source, shape=squeezed.shape, strides=tuple(source.strides[d] for d in left))
    if not over:
        cast_name = calls.cast(source.dtype, out.dtype, None)
        if cast_name is None or source.base < 0:
            raise NotNative("a sum of that type")
        lowering.loops(squeezed, [reduced], cast_name.name, 0.0)
        return
    of_type(source, torch.float32)
    if over == list(range(len(over))) and len(over) < len(dims):
        summed, step = even_rows(dims[: len(over)], source.strides[: len(over)])
        for rows, width, (to, place) in walk(reduced.shape, [squeezed, reduced]):
            need(rows == ONE and place.inner == 1 and to.inner == 1, "a sum over rows that aren't contiguous")
            lowering.add("SUM_ROWS", summed, width, to._replace(stride=0), place._replace(stride=step))
        return
    if len(over) == 1 and over[0] < len(dims) - 1 and dims[over[0]][1] <= SHORT:
        _sum_short(lowering, squeezed, reduced, source.strides[over[0]], dims[over[0]][1])
        return
    need(over == [len(dims) - 1], "a sum over other dimensions")
    rows, place_in = as_rows(source)
    same, stride = even_rows(squeezed.shape, squeezed.strides)
    need(same == rows, "a sum over other dimensions")
    lowering.add("SUM_LAST", rows, dims[-1][1], Operand(out.base, out.offset, stride, 1), place_in)


def _sum_short(lowering: Lowering, out: Span, first: Span, step: int, size: int) -> None:
    """Add up `size` spans that are `step` apart, in order."""
    spans = [replace(first, offset=first.offset + i * step) for i in range(size)]
    lowering.loops(out, spans[:2], "add", 1.0)
    for span in spans[2:]:
        lowering.loops(out, [out, span], "add", 1.0)


def mean_dimensions(lowering: Lowering, node: fx.Node) -> None:
    """mean over dimensions that don't depend on the rows: the sum over how many there are."""
    dims = shape(node.args[0])
    dims_given: Any = node.args[1] if len(node.args) > 1 else None
    over = {_position(d, dims) for d in (dims_given or range(len(dims)))}
    need(all(dims[d][0] == 0 for d in over), "a mean over rows")
    sum_dimensions(lowering, node)
    out = lowering.target(node)
    count = Span(-1, 0, (), (), torch.float32, float(math.prod(dims[d][1] for d in over)))
    lowering.loops(out, [out, count], "div", 0.0)


def softmax(lowering: Lowering, node: fx.Node) -> None:
    """log_softmax and softmax along the last dimension, and their gradients, of the gradient and the result."""
    *values, dim, half_to_float_or_dtype = node.args
    spans, backward = list(map(lowering.floats, values)), len(values) == 2
    last = _position(dim, spans[0].shape) == len(spans[0].shape) - 1
    need(last and (backward or not half_to_float_or_dtype), "another dimension")
    rows, operands = same_rows(lowering.target(node), *spans)
    logarithm = node.target in (aten._log_softmax.default, aten._log_softmax_backward_data.default)
    name = "LOG_SOFTMAX_BACKWARD" if backward else "LOG_SOFTMAX"
    lowering.add(name, rows, spans[0].shape[-1][1], *operands, logarithm=int(logarithm))


def pick(lowering: Lowering, node: fx.Node) -> None:
    """gather(x, 1, index)."""
    source, index = lowering.floats(node.args[0]), lowering.integers(node.args[2])
    need(len(source.shape) == 2 and _position(node.args[1], source.shape) == 1, "another dimension")
    rows, operands = same_rows(lowering.target(node), source, index)
    lowering.add("PICK", rows, index.shape[1][1], *operands, depth=source.shape[1])


def put(lowering: Lowering, node: fx.Node) -> None:
    """scatter_add(x, dim, index, source), and scatter of numbers that take the places of others."""
    x, dim, index_node, source_node = node.args
    need(not node.kwargs and isinstance(source_node, fx.Node), "numbers that are put with others")
    index, source, out = lowering.integers(index_node), lowering.floats(source_node), lowering.target(node)
    at = _position(dim, out.shape)
    need(index.shape == source.shape, "other rows")
    need((*index.shape[:at], *index.shape[at + 1 :]) == (*out.shape[:at], *out.shape[at + 1 :]), "other rows")
    lowering.copy(out, lowering.span(x))
    parts = [around(span, at) for span in (out, index, source)]
    rows, column = parts[0].rows, parts[0].width
    need(all(p.step == column or p.count == 1 for p in parts), "columns that lie apart")
    to, b, c = (p.operand for p in parts)
    depth, replaces = (0, parts[0].count * column), int(node.target is aten.scatter.src)
    width = parts[1].count * column
    lowering.add("PUT", rows, width, to, UNUSED, b, c, depth=depth, column=column, replaces=replaces)


def _reduce(lowering: Lowering, name: str, source: Span, over: object, out: Span, *, least: int = 0) -> None:
    """One instruction that takes a dimension to one element. over: the dimension, or a list with nothing else."""
    dims = over if isinstance(over, (list, tuple)) else [over]
    need(len(dims) == 1 and dims[0] is not None and bool(source.shape), "several dimensions")
    at = _position(dims[0], source.shape)
    spans = around(source, at)
    if len(out.shape) < len(source.shape):
        shape, strides = (*out.shape[:at], ONE, *out.shape[at:]), (*out.strides[:at], 0, *out.strides[at:])
        out = replace(out, shape=shape, strides=strides)
    to = around(out, at)
    need(to.count == 1 and (to.rows, to.width) == (spans.rows, spans.width), "a result of another shape")
    read = spans.operand._replace(inner=spans.step)
    lowering.add(name, spans.rows, spans.width, to.operand, read, depth=(0, spans.count), least=least)


def extreme(lowering: Lowering, node: fx.Node) -> None:
    """amax, amin, argmax, argmin over one dimension, and either result of max and min over one."""
    result: Any = node
    place: bool = node.target in (aten.argmax.default, aten.argmin.default)
    if node.target is operator.getitem:
        result, place = node.args[0], bool(node.args[1] == 1)
        need(result.target in _EXTREMES, "one of several results")
    over, source = result.args[1] if len(result.args) > 1 else None, lowering.floats(result.args[0])
    least = result.target in (aten.amin.default, aten.argmin.default, aten.min.dim)
    name = "PLACE_OF_EXTREME" if place else "EXTREME"
    _reduce(lowering, name, source, over, lowering.target(node), least=int(least))


def log_sum_exp(lowering: Lowering, node: fx.Node) -> None:
    """logsumexp over one dimension."""
    _reduce(lowering, "LOG_SUM_EXP", lowering.floats(node.args[0]), node.args[1], lowering.target(node))


def stack(lowering: Lowering, node: fx.Node) -> None:
    """stack(tensors, dim): each is copied to its place."""
    tensors: Any = node.args[0]
    out = lowering.target(node)
    dim = _position(node.args[1] if len(node.args) > 1 else 0, out.shape)
    for i, x in enumerate(tensors):
        offset, shape = out.offset + i * out.strides[dim], (*out.shape[:dim], *out.shape[dim + 1 :])
        strides = (*out.strides[:dim], *out.strides[dim + 1 :])
        lowering.copy(Span(out.base, offset, shape, strides, out.dtype), lowering.span(x))


def table_gradient(lowering: Lowering, node: fx.Node) -> None:
    """embedding_dense_backward(gradient, index, rows, padding, by frequency)."""
    grad, index = lowering.floats(node.args[0]), lowering.integers(node.args[1])
    size, padding, by_frequency = node.args[2:]
    need(not by_frequency and isinstance(size, int), "gradients by frequency")
    rows, place = as_rows(grad)
    dims = [(n, s) for n, s in zip(index.shape, index.strides, strict=True) if n != ONE]
    need([n for n, _ in dims] in ([rows], []), "indices of more than one dimension")
    at = Operand(index.base, index.offset, dims[0][1] if dims else 0, 1)
    assert isinstance(padding, int) and isinstance(size, int)
    out = lowering.target(node).lines
    lowering.add("TABLE_GRADIENT", rows, grad.shape[-1][1], out, place, at, depth=(0, size), padding=padding)


ROW_CALLS: dict[object, Callable[[Lowering, fx.Node], None]] = {
    aten.mm.default: product,
    aten.addmm.default: product,
    aten.index_select.default: lookup,
    aten.sum.dim_IntList: sum_dimensions,
    aten.sum.default: sum_dimensions,
    aten.mean.dim: mean_dimensions,
    aten._log_softmax.default: softmax,
    aten._softmax.default: softmax,
    aten._log_softmax_backward_data.default: softmax,
    aten._softmax_backward_data.default: softmax,
    aten.gather.default: pick,
    aten.scatter_add.default: put,
    aten.scatter.src: put,
    aten.amax.default: extreme,
    aten.amin.default: extreme,
    aten.argmax.default: extreme,
    aten.argmin.default: extreme,
    operator.getitem: extreme,
    aten.logsumexp.default: log_sum_exp,
    aten.stack.default: stack,
    aten.embedding_dense_backward.default: table_gradient,
}
_EXTREMES = (aten.max.dim, aten.min.dim)
_SUMS = (aten.mm.default, aten.sum.dim_IntList, aten.sum.default)
