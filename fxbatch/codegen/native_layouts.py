"""Where each node of an operation graph lies for the native program: a base, an offset and strides.

In: a node's shape and memory. Out: Spans, rows of operands that one loop can walk together, and operands of
instructions, or NotNative with what the instruction can't read.

    span = contiguous(base, ((1, 0), (0, 450)), torch.float32)      # [n, 450]
    walks = walk(shape, [out_span, in_span])                        # [(rows, width, [Operand, ...])]
    rows, operand = as_rows(span)                                   # [n, 2, 5] contiguous: (2, 0) rows, 5 apart

A dimension is (a, b): a * n + b rows, as in `operation_graphs.py`. Strides never depend on n: only a leading
dimension may.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.native_table import Operand
from fxbatch.codegen.operation_graphs import Shape, Size, fit, sample_sizes

ONE: Size = (0, 1)
DTYPES = (torch.float32, torch.int64, torch.bool)
_SPREAD = 16  # walks that one call may become


class NotNative(Exception):
    """Why a kernel has no native program."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def need(good: bool, what: str) -> None:
    if not good:
        raise NotNative(what)


@dataclass(frozen=True)
class Span:
    """Elements of base `base`: of which shape, from where on, how far apart. `base` -1: `number` everywhere."""

    base: int
    offset: int
    shape: Shape
    strides: tuple[int, ...]
    dtype: torch.dtype
    number: float = 0.0

    @property
    def lines(self) -> Operand:
        """As an operand whose rows are those of the first dimension, of neighbouring elements."""
        return Operand(self.base, self.offset, self.strides[0], 1)


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """Strides of contiguous memory of that shape."""
    strides: list[int] = []
    step, varies = 1, False
    for a, b in reversed(shape):
        need(not varies or (a, b) == ONE, "a stride depends on the number of rows")
        strides.append(0 if (a, b) == ONE else step)
        varies |= bool(a)
        step *= 1 if a else b
    return tuple(reversed(strides))


def contiguous(base: int, shape: Shape, dtype: torch.dtype) -> Span:
    """The whole of a base, contiguous."""
    return Span(base, 0, shape, contiguous_strides(shape), dtype)


def rows_and_width(shape: Shape) -> tuple[Size, int]:
    """Contiguous memory of a shape as rows (that may depend on n) of so many elements."""
    sizes = [x for x in shape if x != ONE]
    if not sizes:
        return ONE, 1
    need(not any(a for a, _ in sizes[1:]), "a dimension after the first depends on the number of rows")
    if sizes[0][0] == 0:
        return ONE, math.prod(b for _, b in sizes)
    return sizes[0], math.prod(b for _, b in sizes[1:])


def broadcast(span: Span, shape: Shape) -> tuple[int, ...]:
    """The strides of a span where it is read as a tensor of this shape."""
    missing = len(shape) - len(span.shape)
    need(missing >= 0, "more dimensions than the result")
    strides = [0] * missing
    for mine, wanted, stride in zip(span.shape, shape[missing:], span.strides, strict=True):
        need(mine in (wanted, ONE), "shapes that don't broadcast")
        strides.append(stride if mine == wanted else 0)
    return tuple(strides)


def walk(shape: Shape, spans: Sequence[Span]) -> list[tuple[Size, int, list[Operand]]]:
    """Loops of (rows, width) that walk all spans together, as tensors of `shape`.

    Usually one; a few where the middle of three dimensions can't be walked with the others.
    """
    strides = [broadcast(span, shape) for span in spans]
    wide_dims = [d for d, size in enumerate(shape) if size != ONE]
    dims = [shape[d] for d in wide_dims]
    steps = [[s[d] for d in wide_dims] for s in strides]
    need(not any(a for a, _ in dims[1:]), "a dimension after the first depends on the number of rows")
    rows: Size = ONE
    row_steps = [0] * len(spans)
    if dims and dims[0][0]:
        rows, row_steps = dims[0], [s[0] for s in steps]
        dims, steps = dims[1:], [s[1:] for s in steps]
    sizes, steps = _collapse([b for _, b in dims], steps)
    if sizes and any(s[-1] not in (0, 1) for s in steps):
        sizes, steps = [*sizes, 1], [[*s, 0] for s in steps]  # elements one by one
    width, inner = (sizes[-1], [s[-1] for s in steps]) if sizes else (1, [0] * len(spans))
    outer, outer_steps = sizes[:-1], [s[:-1] for s in steps]
    if rows == ONE and outer:
        rows, row_steps = (0, outer[0]), [s[0] for s in outer_steps]
        outer, outer_steps = outer[1:], [s[1:] for s in outer_steps]
    elif len(outer) == 1 and all(
        row == s[0] * outer[0] for row, s in zip(row_steps, outer_steps, strict=True)
    ):
        # A state of several lines, [n, 20, 128]: as many rows of one line.
        rows, row_steps = (rows[0] * outer[0], rows[1] * outer[0]), [s[0] for s in outer_steps]
        outer, outer_steps = [], [[] for _ in spans]
    need(math.prod(outer) <= _SPREAD, "strides of more than two dimensions")
    walks = []
    for at in itertools.product(*map(range, outer)):
        operands = [
            Operand(span.base, span.offset + sum(map(operator.mul, at, step)), row, 1 if width == 1 else last)
            for span, step, row, last in zip(spans, outer_steps, row_steps, inner, strict=True)
        ]
        walks.append((rows, width, operands))
    return walks


def _collapse(sizes: list[int], steps: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Neighbouring dimensions that all walk as one become one."""
    d = len(sizes) - 2
    while d >= 0:
        if all(s[d] == s[d + 1] * sizes[d + 1] for s in steps):
            sizes = [*sizes[:d], sizes[d] * sizes[d + 1], *sizes[d + 2 :]]
            steps = [[*s[:d], *s[d + 1 :]] for s in steps]
        d -= 1
    return sizes, steps


def view(span: Span, node: fx.Node) -> Span | None:
    """The span of a view, a call on the node that the span is of. None: it would have to copy."""
    sizes = sample_sizes(node.graph)
    view_strides = []
    for i in (0, 1):
        whole = [a * sizes[i] + b for a, b in span.shape]
        like = torch.empty_strided(whole, span.strides, dtype=torch.bool, device="meta")
        try:
            view_strides.append(_look(node, like, i))
        except RuntimeError:
            return None
    first, second = view_strides
    same = first.storage_offset() == second.storage_offset() and first.dim() == second.dim()
    shape = tuple(fit(x, y, sizes) for x, y in zip(first.shape, second.shape, strict=True))
    strides, other = (
        tuple(0 if size == ONE else s for s, size in zip(x.stride(), shape, strict=True))
        for x in view_strides
    )
    need(same and strides == other, "a view's strides depend on the number of rows")
    return Span(span.base, span.offset + first.storage_offset(), shape, strides, span.dtype, span.number)


def _look(node: fx.Node, like: torch.Tensor, i: int) -> torch.Tensor:
    """The view of a tensor at sample i."""
    args: Any = fx.map_arg(node.args[1:], lambda x: x.meta["values"][i])
    target: Any = node.target
    if target is torch.ops.aten.reshape.default:
        return like.view(args[0])
    return target(like, *args, **node.kwargs)


# -- operands: rows of a stride, matrices, what lies around a dimension


def of_type(span: Span, dtype: torch.dtype) -> Span:
    need(span.base >= 0 and span.dtype == dtype, f"{dtype_name(span.dtype)} or a number there")
    return span


def as_rows(span: Span) -> tuple[Size, Operand]:
    """A span whose last dimension is contiguous as (rows, operand): one row per element of the others."""
    need(bool(span.shape), "no dimension")
    width = span.shape[-1]
    need(width[0] == 0 and (span.strides[-1] == 1 or width == ONE), "rows that aren't contiguous")
    rows, stride = even_rows(span.shape[:-1], span.strides[:-1])
    return rows, Operand(span.base, span.offset, stride, 1)


def same_rows(*spans: Span) -> tuple[Size, list[Operand]]:
    """The rows that all of these have, and each of these as an operand."""
    rows, operands = zip(*map(as_rows, spans), strict=True)
    need(len(set(rows)) == 1, "other rows")
    return rows[0], list(operands)


def even_rows(shape: Shape, strides: tuple[int, ...]) -> tuple[Size, int]:
    """Some dimensions as one: (n, 2) as 2n rows, where they are evenly spaced."""
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n != ONE]
    if not dims:
        return ONE, 0
    rows, stride = dims[-1]
    for size, step in reversed(dims[:-1]):
        need(rows[0] == 0 and step == stride * rows[1], "rows of more than two dimensions")
        rows = (size[0] * rows[1], size[1] * rows[1])
    return rows, stride


def as_matrix(span: Span) -> Operand:
    """A matrix as an operand of a product: contiguous along one of its dimensions."""
    of_type(span, torch.float32)
    need(len(span.shape) == 2, "a product of no matrices")
    (rows, columns), (stride, inner) = span.shape, span.strides
    if columns == ONE and rows == ONE:
        return Operand(span.base, span.offset, 1, 1)
    if columns == ONE:
        need(stride > 0, "a matrix with other strides")
        return Operand(span.base, span.offset, stride, 1)
    if rows == ONE:
        return Operand(span.base, span.offset, int(inner != 1), inner)
    good = (inner == 1 and covers(stride, columns)) or (stride == 1 and covers(inner, rows))
    need(good, "a matrix with other strides")
    return Operand(span.base, span.offset, stride, inner)


def covers(stride: int, size: Size) -> bool:
    """Whether lines that are `stride` apart don't overlap; of lines as long as n there is one number each."""
    return stride >= size[1] if size[0] == 0 else False


@dataclass(frozen=True)
class Around:
    """A span around one of its dimensions: rows of `count` elements that are `step` apart, `width` side by side."""

    rows: Size
    count: int
    step: int
    width: int
    operand: Operand


def around(span: Span, dim: int) -> Around:
    """Sizes and strides of memory before and after one of its dimensions. Raises where C can't read it so."""
    count, step = span.shape[dim], span.strides[dim]
    need(count[0] == 0 and count[1] > 0, "as many as rows")
    rows, stride = even_rows(span.shape[:dim], span.strides[:dim])
    width = 1
    for size, apart in zip(reversed(span.shape[dim + 1 :]), reversed(span.strides[dim + 1 :]), strict=True):
        need(size[0] == 0 and (size == ONE or apart == width), "columns that aren't contiguous")
        width *= size[1]
    return Around(rows, count[1], step, width, Operand(span.base, span.offset, stride, 1))


def narrow(span: Span, dim: int, start: int, size: int) -> Span:
    """Part of a span along one dimension."""
    dims = (*span.shape[:dim], (0, size), *span.shape[dim + 1 :])
    strides = tuple(0 if n == ONE else s for n, s in zip(dims, span.strides, strict=True))
    return Span(span.base, span.offset + start * span.strides[dim], dims, strides, span.dtype)


def dense(out: Span, count: int) -> tuple[int, ...]:
    """The strides of a result without its dimensions of one element."""
    strides = tuple(s for s, n in zip(out.strides, out.shape, strict=True) if n != ONE)
    need(len(strides) == count, "a sum with a result of another shape")
    return strides
