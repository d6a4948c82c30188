"""Where each node of an operation graph lies for the native program: a base, an offset and strides.

In: a node's shape and memory. Out: Spans, and rows of operands that one loop can walk together.

    span = contiguous(base, ((1, 0), (0, 450)), torch.float32)      # [n, 450]
    walks = walk(shape, [out_span, in_span])                        # [(rows, width, [(offset, stride, inner), ...])]

A dimension is (a, b): a * n + b rows, as in `shapes.py`. Strides never depend on n: only a leading dimension may.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.shapes import Shape, Size, fit, sample_sizes

DTYPES = (torch.float32, torch.int64, torch.bool)
_SPREAD = 16  # walks that one call may become


class NotNative(Exception):
    """Why a kernel has no native program."""


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
    def lines(self) -> tuple[int, int, int, int]:
        """As an operand whose rows are those of the first dimension, of neighbouring elements."""
        return self.base, self.offset, self.strides[0], 1


Place = tuple[int, int, int]  # offset, stride from row to row, stride within a row (0 or 1)


def element_bytes(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else dtype.itemsize


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """Strides of contiguous memory of that shape."""
    strides: list[int] = []
    step, varies = 1, False
    for a, b in reversed(shape):
        if varies and (a, b) != (0, 1):
            raise NotNative("a stride depends on the number of rows")
        strides.append(0 if (a, b) == (0, 1) else step)
        varies |= bool(a)
        step *= 1 if a else b
    return tuple(reversed(strides))


def contiguous(base: int, shape: Shape, dtype: torch.dtype) -> Span:
    """The whole of a base, contiguous."""
    if dtype not in DTYPES:
        raise NotNative(f"numbers of type {str(dtype).removeprefix('torch.')}")
    return Span(base, 0, shape, contiguous_strides(shape), dtype)


def rows_and_width(shape: Shape) -> tuple[Size, int]:
    """Contiguous memory of a shape as rows (that may depend on n) of so many elements."""
    sizes = [x for x in shape if x != (0, 1)]
    if not sizes:
        return (0, 1), 1
    if any(a for a, _ in sizes[1:]):
        raise NotNative("a dimension after the first depends on the number of rows")
    if sizes[0][0] == 0:
        return (0, 1), math.prod(b for _, b in sizes)
    return sizes[0], math.prod(b for _, b in sizes[1:])


def broadcast(span: Span, shape: Shape) -> tuple[int, ...]:
    """The strides of a span where it is read as a tensor of this shape."""
    missing = len(shape) - len(span.shape)
    if missing < 0:
        raise NotNative("more dimensions than the result")
    strides = [0] * missing
    for mine, wanted, stride in zip(span.shape, shape[missing:], span.strides, strict=True):
        if mine != wanted and mine != (0, 1):
            raise NotNative("shapes that don't broadcast")
        strides.append(stride if mine == wanted else 0)
    return tuple(strides)


def walk(shape: Shape, spans: Sequence[Span]) -> list[tuple[Size, int, list[Place]]]:
    """Loops of (rows, width) that walk all spans together, as tensors of `shape`.

    Usually one; a few where the middle of three dimensions can't be walked with the others.
    """
    strides = [broadcast(span, shape) for span in spans]
    kept = [d for d, size in enumerate(shape) if size != (0, 1)]
    dims = [shape[d] for d in kept]
    steps = [[s[d] for d in kept] for s in strides]
    if any(a for a, _ in dims[1:]):
        raise NotNative("a dimension after the first depends on the number of rows")
    rows: Size = (0, 1)
    row_steps = [0] * len(spans)
    if dims and dims[0][0]:
        rows, row_steps = dims[0], [s[0] for s in steps]
        dims, steps = dims[1:], [s[1:] for s in steps]
    sizes, steps = _collapse([b for _, b in dims], steps)
    if sizes and any(s[-1] not in (0, 1) for s in steps):
        sizes, steps = [*sizes, 1], [[*s, 0] for s in steps]  # elements one by one
    width, inner = (sizes[-1], [s[-1] for s in steps]) if sizes else (1, [0] * len(spans))
    outer, outer_steps = sizes[:-1], [s[:-1] for s in steps]
    if rows == (0, 1) and outer:
        rows, row_steps = (0, outer[0]), [s[0] for s in outer_steps]
        outer, outer_steps = outer[1:], [s[1:] for s in outer_steps]
    if math.prod(outer) > _SPREAD:
        raise NotNative("strides of more than two dimensions")
    walks = []
    for at in itertools.product(*map(range, outer)):
        places = [
            (span.offset + sum(i * s for i, s in zip(at, step, strict=True)), row, 1 if width == 1 else last)
            for span, step, row, last in zip(spans, outer_steps, row_steps, inner, strict=True)
        ]
        walks.append((rows, width, places))
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
    found = []
    for i in (0, 1):
        whole = [a * sizes[i] + b for a, b in span.shape]
        like = torch.empty_strided(whole, span.strides, dtype=torch.bool, device="meta")
        try:
            found.append(_look(node, like, i))
        except RuntimeError:
            return None
    first, second = found
    same = first.storage_offset() == second.storage_offset() and first.dim() == second.dim()
    shape = tuple(fit(x, y, sizes) for x, y in zip(first.shape, second.shape, strict=True))
    strides, other = (
        tuple(0 if size == (0, 1) else s for s, size in zip(x.stride(), shape, strict=True)) for x in found
    )
    if not same or strides != other:
        raise NotNative("a view's strides depend on the number of rows")
    return Span(span.base, span.offset + first.storage_offset(), shape, strides, span.dtype, span.number)


def _look(node: fx.Node, like: torch.Tensor, i: int) -> torch.Tensor:
    """The view of a tensor at sample i."""
    args: Any = fx.map_arg(node.args[1:], lambda x: x.meta["values"][i])
    target: Any = node.target
    if target is torch.ops.aten.reshape.default:
        return like.view(args[0])
    return target(like, *args, **node.kwargs)
