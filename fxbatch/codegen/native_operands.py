"""Spans as operands of native instructions: rows of a stride, matrices, what lies around a dimension.

In: a Span. Out: (base, offset, stride, inner), or NotNative with what the instruction can't read.

    rows, place = as_rows(span)          # [n, 2, 5] contiguous: (2, 0) rows, 5 apart
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fxbatch.codegen.native_layouts import NotNative, Span
from fxbatch.codegen.shapes import Shape, Size

ONE: Size = (0, 1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def need(good: bool, what: str) -> None:
    if not good:
        raise NotNative(what)


def of_type(span: Span, dtype: torch.dtype) -> Span:
    need(span.base >= 0 and span.dtype == dtype, f"{dtype_name(span.dtype)} or a number there")
    return span


def as_rows(span: Span) -> tuple[Size, list[int]]:
    """A span whose last dimension is contiguous as (rows, operand): one row per element of the others."""
    need(bool(span.shape), "no dimension")
    width = span.shape[-1]
    need(width[0] == 0 and (span.strides[-1] == 1 or width == ONE), "rows that aren't contiguous")
    rows, stride = even_rows(span.shape[:-1], span.strides[:-1])
    return rows, [span.base, span.offset, stride, 1]


def same_rows(*spans: Span) -> list[Any]:
    """The rows that all of these have, and each of these as an operand."""
    rows, operands = zip(*map(as_rows, spans), strict=True)
    need(len(set(rows)) == 1, "other rows")
    return [rows[0], *operands]


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


def as_matrix(span: Span) -> list[int]:
    """A matrix as an operand of a product: contiguous along one of its dimensions."""
    of_type(span, torch.float32)
    need(len(span.shape) == 2, "a product of no matrices")
    (rows, columns), (stride, inner) = span.shape, span.strides
    if columns == ONE and rows == ONE:
        return [span.base, span.offset, 1, 1]
    if columns == ONE:
        need(stride > 0, "a matrix with other strides")
        return [span.base, span.offset, stride, 1]
    if rows == ONE:
        return [span.base, span.offset, 0, 1] if inner == 1 else [span.base, span.offset, 1, inner]
    good = (inner == 1 and covers(stride, columns)) or (stride == 1 and covers(inner, rows))
    need(good, "a matrix with other strides")
    return [span.base, span.offset, stride, inner]


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
    place: list[int]


def around(span: Span, dim: int) -> Around:
    """What lies before and after a dimension of memory."""
    count, step = span.shape[dim], span.strides[dim]
    need(count[0] == 0 and count[1] > 0, "as many as rows")
    rows, stride = even_rows(span.shape[:dim], span.strides[:dim])
    width = 1
    for size, apart in zip(reversed(span.shape[dim + 1 :]), reversed(span.strides[dim + 1 :]), strict=True):
        need(size[0] == 0 and (size == ONE or apart == width), "columns that aren't contiguous")
        width *= size[1]
    return Around(rows, count[1], step, width, [span.base, span.offset, stride, 1])


def narrow(span: Span, dim: int, start: int, size: int) -> Span:
    """Part of a span along one dimension."""
    dims = (*span.shape[:dim], (0, size), *span.shape[dim + 1 :])
    strides = tuple(0 if n == (0, 1) else s for n, s in zip(dims, span.strides, strict=True))
    return Span(span.base, span.offset + start * span.strides[dim], dims, strides, span.dtype)


def turned(span: Span) -> Span:
    """Matrices with lines and columns exchanged."""
    rows, lines, columns = span.shape
    return replace(
        span, shape=(rows, columns, lines), strides=(span.strides[0], span.strides[2], span.strides[1])
    )


def dense(out: Span, count: int) -> tuple[int, ...]:
    """The strides of a result without its dimensions of one element."""
    strides = tuple(s for s, n in zip(out.strides, out.shape, strict=True) if n != ONE)
    need(len(strides) == count, "a sum with a result of another shape")
    return strides
