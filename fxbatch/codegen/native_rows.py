"""The calls of a native program that aren't pointwise: products, sums, look-ups, softmax, and what they need.

ROW_CALLS[aten.mm.default](lowering, node)      # adds an instruction, or raises NotNative
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxbatch.codegen import native_calls as calls
from fxbatch.codegen.native_layouts import NotNative, Span, walk
from fxbatch.codegen.sizes import Shape, Size, shape

if TYPE_CHECKING:
    from fxbatch.codegen.native_program import Lowering

aten = torch.ops.aten
ONE: Size = (0, 1)
SHORT = 16  # elements of a dimension that is added up one addition after another


def _need(good: bool, what: str) -> None:
    if not good:
        raise NotNative(what)


def _is(span: Span, dtype: torch.dtype) -> Span:
    _need(
        span.base >= 0 and span.dtype == dtype, f"{str(span.dtype).removeprefix('torch.')} or a number there"
    )
    return span


def _rows(span: Span) -> tuple[Size, list[int]]:
    """A span whose last dimension is contiguous as (rows, operand): one row per element of the others."""
    _need(bool(span.shape), "no dimension")
    width = span.shape[-1]
    _need(width[0] == 0 and (span.strides[-1] == 1 or width == ONE), "rows that aren't contiguous")
    rows, stride = _even(span.shape[:-1], span.strides[:-1])
    return rows, [span.base, span.offset, stride, 1]


def _even(shape: Shape, strides: tuple[int, ...]) -> tuple[Size, int]:
    """Some dimensions as one: (n, 2) as 2n rows, where they are evenly spaced."""
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n != ONE]
    if not dims:
        return ONE, 0
    rows, stride = dims[-1]
    for size, step in reversed(dims[:-1]):
        _need(rows[0] == 0 and step == stride * rows[1], "rows of more than two dimensions")
        rows = (size[0] * rows[1], size[1] * rows[1])
    return rows, stride


def _matrix(span: Span) -> list[int]:
    """A matrix as an operand of a product: contiguous along one of its dimensions."""
    _is(span, torch.float32)
    _need(len(span.shape) == 2, "a product of no matrices")
    (rows, columns), (stride, inner) = span.shape, span.strides
    if columns == ONE and rows == ONE:
        return [span.base, span.offset, 1, 1]
    if columns == ONE:
        _need(stride > 0, "a matrix with other strides")
        return [span.base, span.offset, stride, 1]
    if rows == ONE:
        return [span.base, span.offset, 0, 1] if inner == 1 else [span.base, span.offset, 1, inner]
    good = (inner == 1 and _covers(stride, columns)) or (stride == 1 and _covers(inner, rows))
    _need(good, "a matrix with other strides")
    return [span.base, span.offset, stride, inner]


def _covers(stride: int, size: Size) -> bool:
    """Whether lines that are `stride` apart don't overlap; of lines as long as n there is one number each."""
    return stride >= size[1] if size[0] == 0 else False


def product(lowering: Lowering, node: fx.Node) -> None:
    """mm(a, b) and addmm(c, a, b)."""
    args = list(node.args)
    out = lowering.target(node)
    added = node.target is aten.addmm.default
    if added:
        _need(not node.kwargs and len(args) == 3, "a product with factors")
        lowering.copy(out, lowering.span(args.pop(0)))
    a, b = lowering.span(args[0]), lowering.span(args[1])
    _is(out, torch.float32)
    (rows, columns), depth = out.shape, a.shape[1]
    _need(columns[0] == 0, "as many columns as rows")
    _need(columns == ONE or out.strides[1] == 1, "a result that isn't contiguous")
    item = [
        calls.PRODUCT,
        *rows,
        columns[1],
        out.base,
        out.offset,
        out.strides[0],
        1,
        *_matrix(a),
        *_matrix(b),
    ]
    lowering.add(item, depth=depth, flag=int(added))


def lookup(lowering: Lowering, node: fx.Node) -> None:
    """index_select(table, 0, index)."""
    table, index = (
        _is(lowering.span(node.args[0]), torch.float32),
        _is(lowering.span(node.args[2]), torch.int64),
    )
    _need(
        node.args[1] == 0 and len(table.shape) == 2 and len(index.shape) == 1,
        "another dimension than the first",
    )
    (size, width), out = table.shape, lowering.target(node)
    _need(size[0] == 0 and (width == ONE or table.strides[1] == 1), "a table with other strides")
    rows, place = _rows(out)
    item = [calls.LOOKUP, *rows, width[1], *place, table.base, table.offset, table.strides[0], 1]
    lowering.add([*item, index.base, index.offset, index.strides[0], 1], depth=(0, size[1]))


def _position(dim: Any, dims: Shape) -> int:
    return int(dim) % max(len(dims), 1)


def sum_dimensions(lowering: Lowering, node: fx.Node) -> None:
    """sum over the rows, over the last dimension, over a short one, or over some of one element (then a copy)."""
    source, out = lowering.span(node.args[0]), lowering.target(node)
    _need(not node.kwargs.get("dtype"), "a sum in another type")
    dims = source.shape
    given = list(node.args[1]) if len(node.args) > 1 and node.args[1] is not None else list(range(len(dims)))
    over = [d for d in sorted({_position(d, dims) for d in given}) if dims[d] != ONE]
    left = [d for d in range(len(dims)) if d not in over and dims[d] != ONE]
    squeezed = Span(out.base, out.offset, tuple(dims[d] for d in left), _dense(out, len(left)), out.dtype)
    reduced = Span(
        source.base, source.offset, tuple(dims[d] for d in left), tuple(source.strides[d] for d in left), source.dtype
    )  # fmt: skip
    if not over:
        found = calls.cast(source.dtype, out.dtype, None)
        _need(found is not None and source.base >= 0, "a sum of that type")
        assert found is not None
        lowering.loops(squeezed, [reduced], calls.CODES[found.name], 0.0)
        return
    _is(source, torch.float32)
    if over == list(range(len(over))) and len(over) < len(dims):
        summed, step = _even(dims[: len(over)], source.strides[: len(over)])
        for rows, width, (to, place) in walk(reduced.shape, [squeezed, reduced]):
            _need(rows == ONE and place[2] == 1 and to[2] == 1, "a sum over rows that aren't contiguous")
            item = [calls.SUM_ROWS, *summed, width, out.base, to[0], 0, 1]
            lowering.add([*item, source.base, place[0], step, 1])
        return
    if len(over) == 1 and over[0] < len(dims) - 1 and dims[over[0]][1] <= SHORT:
        _sum_short(lowering, squeezed, reduced, source.strides[over[0]], dims[over[0]][1])
        return
    _need(over == [len(dims) - 1], "a sum over other dimensions")
    rows, place_in = _rows(source)
    same, stride = _even(squeezed.shape, squeezed.strides)
    _need(same == rows, "a sum over other dimensions")
    item = [calls.SUM_LAST, *rows, dims[-1][1], out.base, out.offset, stride, 1, *place_in]
    lowering.add(item)


def _sum_short(lowering: Lowering, out: Span, first: Span, step: int, size: int) -> None:
    """Add up `size` spans that are `step` apart, in order."""
    add = calls.CODES["add"]
    spans = [replace(first, offset=first.offset + i * step) for i in range(size)]
    lowering.loops(out, spans[:2], add, 1.0)
    for span in spans[2:]:
        lowering.loops(out, [out, span], add, 1.0)


def mean_dimensions(lowering: Lowering, node: fx.Node) -> None:
    """mean over dimensions that don't depend on the rows: the sum over how many there are."""
    dims = shape(node.args[0])
    given: Any = node.args[1] if len(node.args) > 1 else None
    over = {_position(d, dims) for d in (given or range(len(dims)))}
    _need(all(dims[d][0] == 0 for d in over), "a mean over rows")
    sum_dimensions(lowering, node)
    out = lowering.target(node)
    count = Span(-1, 0, (), (), torch.float32, float(math.prod(dims[d][1] for d in over)))
    lowering.loops(out, [out, count], calls.CODES["div"], 0.0)


def _dense(out: Span, count: int) -> tuple[int, ...]:
    """The strides of a result without its dimensions of one element."""
    strides = tuple(s for s, n in zip(out.strides, out.shape, strict=True) if n != ONE)
    _need(len(strides) == count, "a sum with a result of another shape")
    return strides


def softmax(lowering: Lowering, node: fx.Node) -> None:
    """log_softmax and softmax along the last dimension."""
    source, out = _is(lowering.span(node.args[0]), torch.float32), lowering.target(node)
    _need(
        _position(node.args[1], source.shape) == len(source.shape) - 1 and not node.args[2],
        "another dimension",
    )
    rows, place = _rows(source)
    same, to = _rows(out)
    _need(same == rows, "other rows")
    item = [calls.LOG_SOFTMAX, *rows, source.shape[-1][1], *to, *place]
    lowering.add(item, flag=int(node.target is aten._log_softmax.default))


def softmax_backward(lowering: Lowering, node: fx.Node) -> None:
    """The gradients of log_softmax and softmax along the last dimension."""
    grad, result = (_is(lowering.span(x), torch.float32) for x in node.args[:2])
    _need(_position(node.args[2], grad.shape) == len(grad.shape) - 1, "another dimension")
    out = lowering.target(node)
    (rows, a), (same, b), (third, to) = _rows(grad), _rows(result), _rows(out)
    _need(rows == same == third, "other rows")
    item = [calls.LOG_SOFTMAX_BACKWARD, *rows, grad.shape[-1][1], *to, *a, *b]
    lowering.add(item, flag=int(node.target is aten._log_softmax_backward_data.default))


def pick(lowering: Lowering, node: fx.Node) -> None:
    """gather(x, 1, index)."""
    source, index = (
        _is(lowering.span(node.args[0]), torch.float32),
        _is(lowering.span(node.args[2]), torch.int64),
    )
    _need(len(source.shape) == 2 and _position(node.args[1], source.shape) == 1, "another dimension")
    out = lowering.target(node)
    (rows, a), (same, b), (third, to) = _rows(source), _rows(index), _rows(out)
    _need(rows == same == third, "other rows")
    lowering.add([calls.PICK, *rows, index.shape[1][1], *to, *a, *b], depth=(0, source.shape[1][1]))


def put(lowering: Lowering, node: fx.Node) -> None:
    """scatter_add(x, 1, index, source)."""
    index, source = (
        _is(lowering.span(node.args[2]), torch.int64),
        _is(lowering.span(node.args[3]), torch.float32),
    )
    out = lowering.target(node)
    _need(len(out.shape) == 2 and _position(node.args[1], out.shape) == 1, "another dimension")
    lowering.copy(out, lowering.span(node.args[0]))
    (rows, to), (same, b), (third, c) = _rows(out), _rows(index), _rows(source)
    _need(rows == same == third and index.shape == source.shape, "other rows")
    unused = [-1, 0, 0, 0]
    lowering.add([calls.PUT_ADD, *rows, index.shape[1][1], *to, *unused, *b, *c], depth=(0, out.shape[1][1]))


def table_gradient(lowering: Lowering, node: fx.Node) -> None:
    """embedding_dense_backward(gradient, index, rows, padding, by frequency)."""
    grad, index = (
        _is(lowering.span(node.args[0]), torch.float32),
        _is(lowering.span(node.args[1]), torch.int64),
    )
    size, padding, by_frequency = node.args[2:]
    _need(not by_frequency and isinstance(size, int), "gradients by frequency")
    out = lowering.target(node)
    rows, place = _rows(grad)
    found = [(n, s) for n, s in zip(index.shape, index.strides, strict=True) if n != ONE]
    _need([n for n, _ in found] in ([rows], []), "indices of more than one dimension")
    stride = found[0][1] if found else 0
    item = [calls.TABLE_GRADIENT, *rows, grad.shape[-1][1], out.base, out.offset, out.strides[0], 1, *place]
    assert isinstance(padding, int) and isinstance(size, int)
    lowering.add([*item, index.base, index.offset, stride, 1], depth=(0, size), flag=padding)


ROW_CALLS: dict[Any, Callable[[Lowering, fx.Node], None]] = {
    aten.mm.default: product,
    aten.addmm.default: product,
    aten.index_select.default: lookup,
    aten.sum.dim_IntList: sum_dimensions,
    aten.sum.default: sum_dimensions,
    aten.mean.dim: mean_dimensions,
    aten._log_softmax.default: softmax,
    aten._softmax.default: softmax,
    aten._log_softmax_backward_data.default: softmax_backward,
    aten._softmax_backward_data.default: softmax_backward,
    aten.gather.default: pick,
    aten.scatter_add.default: put,
    aten.embedding_dense_backward.default: table_gradient,
}
