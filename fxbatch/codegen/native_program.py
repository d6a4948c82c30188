"""An operation graph as a native program: int64 columns that `_native.c` runs without Python.

In: an operation graph, with the memory of its nodes. Out: a NativeProgram, or the reason why there is none.

    program = make_program(module, sources, shared)     # NativeProgram(bases, instructions, fixed), or "aten.foo"
    program.instructions.shape                          # (7, 32)

An instruction is [code, rows per n, further rows, width, 4 operands of (base, offset, stride, inner), number, ...] as
`_native.h` names them. Calls in a row that are pointwise over the same rows run fused, block by block of rows: what
only they read lives in the first cache.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from fxbatch.codegen import native_calls as calls
from fxbatch.codegen.assign_memory import Memory, assign_memory
from fxbatch.codegen.clean import constant_value
from fxbatch.codegen.kernel_calls import is_view
from fxbatch.codegen.native_calls import Pointwise, pointwise
from fxbatch.codegen.native_layouts import (
    NotNative,
    Span,
    contiguous,
    element_bytes,
    rows_and_width,
    view,
    walk,
)
from fxbatch.codegen.native_rows import ROW_CALLS
from fxbatch.codegen.sizes import Shape, is_tensor, sample_sizes, shape

aten = torch.ops.aten
INPUT, OUTPUT, FIXED, OWN, LOCAL = range(5)
MOST_BASES = 192
FixedTensor = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class NativeProgram:
    """bases: int64 [bases, 4]; instructions: int64 [length, 32]; fixed: which results of the kernel's `prepare`
    are its bases after inputs and outputs, with the shapes and strides that they must have."""

    bases: np.ndarray
    instructions: np.ndarray
    fixed: tuple[FixedTensor, ...]
    given: tuple[int, ...]  # the shared operands that `prepare` takes


def make_program(module: fx.GraphModule, shared: Sequence[torch.Tensor]) -> NativeProgram | str:
    """The native program of an operation graph whose last inputs are the shared operands `shared`."""
    try:
        return Lowering(module.graph, assign_memory(module.graph), shared).run()
    except NotNative as reason:
        return str(reason)


@dataclass
class Lowering:
    """The program as it is written."""

    graph: fx.Graph
    memory: Memory
    shared: Sequence[torch.Tensor]
    bases: list[list[int]] = field(default_factory=list)
    items: list[list[int]] = field(default_factory=list)
    spans: dict[fx.Node, Span] = field(default_factory=dict)
    output_base: list[int] = field(default_factory=list)
    fixed: list[FixedTensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes an element of each base

    def run(self) -> NativeProgram:
        if self.memory.returned:
            raise NotNative("a result that is no dense tensor")
        self._inputs()
        for node in self.memory.outputs:
            self.output_base.append(self.base(shape(node), node.meta["values"][0].dtype, OUTPUT))
        self._prepared()
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in self.memory.hoisted:
                self._node(node)
        for i, node in enumerate(self.memory.outputs):
            made = i in self.memory.fresh and self.span(node).base == self.output_base[i]
            if not self.memory.written_in_place(i) and not made:
                out = contiguous(self.output_base[i], shape(node), node.meta["values"][0].dtype)
                self.copy(out, self.span(node))
        if len(self.bases) > MOST_BASES:
            raise NotNative(f"more than {MOST_BASES} tensors")
        bases, code = (
            np.array(self.bases, dtype=np.int64),
            np.array(self.items, dtype=np.int64).reshape(-1, 32),
        )
        group_pointwise(code)
        localise(bases, code, self.sizes)
        return NativeProgram(bases, code, tuple(self.fixed), self._given())

    # -- memory

    def base(self, dims: Shape, dtype: torch.dtype, kind: int) -> int:
        """A new piece of memory for a contiguous tensor."""
        if dtype not in (torch.float32, torch.int64, torch.bool):
            raise NotNative(f"numbers of type {str(dtype).removeprefix('torch.')}")
        (a, b), width = rows_and_width(dims)
        if a < 0 or b < 0 or a + b == 0 or width == 0:
            raise NotNative("a tensor without elements")
        self.sizes.append(element_bytes(dtype))
        self.bases.append([a, b, width * element_bytes(dtype), kind])
        return len(self.bases) - 1

    def _inputs(self) -> None:
        nodes = [x for x in self.graph.nodes if x.op == "placeholder"][1:]
        first = len(nodes) - len(self.shared)
        for i, node in enumerate(nodes):
            if not is_tensor(node):
                raise NotNative("an input that is no tensor")
            value = node.meta["values"][0]
            if i < first:
                if not shape(node) or shape(node)[0] != (1, 0):
                    raise NotNative("an input without rows")
                number = self.base(shape(node), value.dtype, INPUT)
                self.spans[node] = contiguous(number, shape(node), value.dtype)
            else:
                self.spans[node] = self._strided(shape(node), value.dtype, self.shared[i - first], INPUT)

    def _strided(self, dims: Shape, dtype: torch.dtype, like: torch.Tensor, kind: int) -> Span:
        """Memory of a tensor that is as it is, from its first element to its last."""
        if (
            like.layout is not torch.strided
            or like.device.type != "cpu"
            or not like.numel()
            or like.dtype != dtype
        ):
            raise NotNative("a shared operand that is not dense on the CPU")
        last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1
        number = self.base(((0, last),), dtype, kind)
        strides = tuple(0 if n == 1 else s for n, s in zip(like.shape, like.stride(), strict=True))
        return Span(number, 0, dims, strides, dtype)

    def _prepared(self) -> None:
        """What the kernel computes once a run is read from the tensors that it made."""
        hoisted = self.memory.hoisted
        kept = [x for x in hoisted if any(u not in hoisted for u in x.users)]
        for i, node in enumerate(kept):
            if _number(node) is not None:
                continue
            value = node.meta["values"][0]
            self.spans[node] = self._strided(shape(node), value.dtype, value, FIXED)
            self.fixed.append((i, tuple(value.shape), self.spans[node].strides))

    def _given(self) -> tuple[int, ...]:
        nodes = [x for x in self.graph.nodes if x.op == "placeholder"][1:]
        first = len(nodes) - len(self.shared)
        return tuple(i - first for i, x in enumerate(nodes) if any(u in self.memory.hoisted for u in x.users))

    def span(self, node: Any) -> Span:
        """Where a node, or a number, is."""
        if not isinstance(node, fx.Node):
            if isinstance(node, (bool, int, float)):
                return Span(-1, 0, (), (), torch.float32, float(node))
            raise NotNative("an argument that is no tensor")
        found = self.spans.get(node)
        if found is None:
            number = _number(node)
            if number is None:
                raise NotNative(f"{node.target}")
            dims = shape(node)
            found = Span(-1, 0, dims, (0,) * len(dims), node.meta["values"][0].dtype, number)
        return found

    def own_result(self, node: fx.Node) -> int | None:
        """Which result the node is that a Python kernel would hand out as the call made it."""
        return next((i for i in self.memory.fresh if self.memory.outputs[i] is node), None)

    def target(self, node: fx.Node) -> Span:
        """Where a node is to be written."""
        found = self.spans.get(node)
        if found is not None:
            return found
        place, dtype = self.memory.place.get(node), node.meta["values"][0].dtype
        own = self.own_result(node)
        if own is not None:
            made = contiguous(self.output_base[own], shape(node), dtype)
        elif place is None or place.kind == "slot":
            made = contiguous(self.base(shape(node), dtype, OWN), shape(node), dtype)
        elif place.kind == "output":
            made = contiguous(self.output_base[place.index], shape(node), dtype)
        else:
            assert place.parent is not None
            whole = self.target(place.parent)
            made = narrow(whole, place.dim, place.start, place.size)
        self.spans[node] = made
        return made

    # -- nodes

    def _node(self, node: fx.Node) -> None:
        if not is_tensor(node):
            if isinstance(node.meta["values"][0], int):
                return  # sizes, which are known
            raise NotNative(f"{node.target}")
        if _number(node) is not None:
            return
        if node in self.memory.copies:
            for piece in self.memory.copies[node]:
                source = self.span(piece.source if piece.fill is None else piece.fill)
                self.copy(narrow(self.target(node), piece.dim, piece.start, piece.size), source)
        elif is_view(node):
            self._view(node)
        elif (call := pointwise(node)) is not None:
            self.pointwise(self.target(node), call)
        elif node.target in ROW_CALLS:
            ROW_CALLS[node.target](self, node)
        else:
            raise NotNative(f"{node.target}")

    def _view(self, node: fx.Node) -> None:
        source = self.span(node.args[0])
        found = view(source, (), lambda like, i: _look(node, like, i), sample_sizes(self.graph))
        if found is None:  # a reshape that copies
            whole = contiguous(self.base(source.shape, source.dtype, OWN), source.shape, source.dtype)
            self.copy(whole, source)
            found = view(whole, (), lambda like, i: _look(node, like, i), sample_sizes(self.graph))
            if found is None:
                raise NotNative(f"{node.target}")
        self.spans[node] = found

    # -- instructions

    def copy(self, out: Span, source: Span) -> None:
        """Write a span, or a number, to another."""
        call = calls.cast(out.dtype, out.dtype, None)
        if call is None or (source.base >= 0 and source.dtype != out.dtype):
            raise NotNative("a copy to another type")
        self.loops(out, [as_number(source, out.dtype)], calls.CODES[call.name], 0.0)

    def pointwise(self, out: Span, call: Pointwise) -> None:
        """A pointwise call, as one loop or a few."""
        kinds = call.dtypes()
        operands = [as_number(self.span(x), kind) for x, kind in zip(call.operands, kinds[1:], strict=True)]
        for span, kind in zip((out, *operands), kinds, strict=True):
            if span.dtype != kind:
                raise NotNative(f"{call.name} of {str(span.dtype).removeprefix('torch.')}")
        self.loops(out, operands, calls.CODES[call.name], call.number)

    def loops(self, out: Span, operands: list[Span], code: int, number: float) -> None:
        """Pointwise instructions that write `out`."""
        for rows, width, places in walk(out.shape, [out, *operands]):
            item = [code, *rows, width]
            for span, place in zip((out, *operands), places, strict=True):
                item += [-1, _bits(span.number, span.dtype), 0, 0] if span.base < 0 else [span.base, *place]
            self.add(item, number=number, group=0)

    def add(
        self,
        item: list[int],
        *,
        number: float = 0.0,
        depth: tuple[int, int] = (0, 1),
        flag: int = 0,
        group: int = -1,
    ) -> None:
        """One instruction: code, rows, width and operands, and what else it needs."""
        item = item + [-1, 0, 0, 0] * ((20 - len(item)) // 4)
        bits = struct.unpack("<q", struct.pack("<d", number))[0]
        self.items.append([*item, bits, *depth, flag, group, *([0] * 7)])


def as_number(span: Span, kind: torch.dtype) -> Span:
    """A number as one of that type; memory as it is."""
    return span if span.base >= 0 else Span(-1, 0, span.shape, span.strides, kind, span.number)


def _bits(number: float, dtype: torch.dtype) -> int:
    if dtype is torch.float32:
        return int(np.array([number, 0.0], dtype=np.float32).view(np.int64)[0])
    return int(number)


def _number(node: fx.Node) -> float | None:
    """The number that a constant tensor is filled with."""
    while node.op == "call_function" and node.target in (aten.expand.default, aten.reshape.default):
        node = node.args[0]  # type: ignore[assignment]
    if node.op == "call_function" and node.target is aten.scalar_tensor.default:
        return float(node.args[0])
    return constant_value(node)


def _look(node: fx.Node, like: torch.Tensor, i: int) -> torch.Tensor:
    args = fx.map_arg(node.args[1:], lambda x: x.meta["values"][i])
    if node.target is aten.reshape.default:
        return like.view(args[0])
    return node.target(like, *args, **node.kwargs)


def narrow(span: Span, dim: int, start: int, size: int) -> Span:
    """Part of a span along one dimension."""
    dims = (*span.shape[:dim], (0, size), *span.shape[dim + 1 :])
    strides = tuple(0 if n == (0, 1) else s for n, s in zip(dims, span.strides, strict=True))
    return Span(span.base, span.offset + start * span.strides[dim], dims, strides, span.dtype)


def group_pointwise(code: np.ndarray) -> None:
    """Number the runs of pointwise instructions that may go block by block of rows.

    They walk the same rows, and what one writes another reads from the same rows: with the same stride.
    """
    number, rows, written = -1, (-1, -1), dict[int, int]()
    for item in code:
        if item[24] < 0:
            rows = (-1, -1)
            continue
        operands = item[4:20].reshape(4, 4)
        reads = [(int(o[0]), int(o[2])) for o in operands[1:] if o[0] >= 0]
        mine = (int(item[1]), int(item[2]))
        apart = any(base in written and written[base] != stride for base, stride in reads)
        if mine != rows or (apart and mine != (0, 1)):
            number, rows, written = number + 1, mine, {}
        item[24] = number
        written[int(operands[0][0])] = int(operands[0][2])


def localise(bases: np.ndarray, code: np.ndarray, sizes: Sequence[int]) -> None:
    """Intermediates that only one group of instructions touches, row by row, live in its block."""
    users: dict[int, list[tuple[int, int, int, int]]] = {}
    for item in code:
        for operand in item[4:20].reshape(4, 4):
            if operand[0] >= 0:
                place = (int(item[24]), int(operand[2]), int(item[1]), int(item[2]))
                users.setdefault(int(operand[0]), []).append(place)
    for base, uses in users.items():
        a, b, row_bytes, kind = bases[base].tolist()
        group = uses[0][0]
        if kind != OWN or group < 0 or (a, b) == (0, 1):
            continue
        if all(u == (group, row_bytes // sizes[base], a, b) for u in uses):
            bases[base][3] = LOCAL
