"""Gradients of slices are put side by side, not padded with zeros and added.

slice_backward(g, [n, 750], 1, 0, 150, 1)         =>  cat([g, zeros [n, 600]], 1)
add(cat([g, zeros], 1), cat([zeros, h], 1))       =>  cat([g, h], 1)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import fx

from fxbatch.codegen.clean import apply_rules, constant_value
from fxbatch.codegen.sizes import Shape, add_call, dtype, shape, shape_argument

aten = torch.ops.aten


def rewrite_slices(graph: fx.Graph) -> bool:
    """Returns whether anything changed."""
    changed = apply_rules(
        graph,
        {aten.slice_backward.default: (_slice_to_cat,), aten.select_backward.default: (_select_to_cat,)},
    )
    while apply_rules(graph, {aten.add.Tensor: (_merge,)}):
        changed = True
    return changed


@dataclass(frozen=True)
class Segment:
    """Part `start:end` of a concatenation: a node, or zeros where it is None."""

    start: int
    end: int
    node: fx.Node | None


def segments(node: fx.Node) -> tuple[int, list[Segment]] | None:
    """(dim, parts) of a concatenation along a dimension that doesn't depend on n."""
    if node.target is not aten.cat.default:
        return None
    dims = shape(node)
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(dims)
    if dims[dim][0]:
        return None
    parts: list[Segment] = []
    start = 0
    for piece in node.args[0]:
        if len(shape(piece)) != len(dims):
            return None
        end = start + shape(piece)[dim][1]
        parts.append(Segment(start, end, None if constant_value(piece) == 0.0 else piece))
        start = end
    return dim, parts


def _slice_to_cat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    grad, _, dim, start, end, step = node.args
    dims = shape(node)
    dim %= len(dims)
    if dims[dim][0] or step != 1 or isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    first, last, _ = slice(start, end).indices(dims[dim][1])
    return concatenate(graph, node, dim, [Segment(first, last, grad)])


def _select_to_cat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    grad, _, dim, index = node.args
    dims = shape(node)
    dim %= len(dims)
    if dims[dim][0] or isinstance(index, fx.Node):
        return None
    index %= dims[dim][1]
    one = (*dims[:dim], (0, 1), *dims[dim + 1 :])
    wide = add_call(graph, aten.reshape.default, (grad, shape_argument(graph, one)))
    return concatenate(graph, node, dim, [Segment(index, index + 1, wide)])


def concatenate(graph: fx.Graph, like: fx.Node, dim: int, parts: list[Segment]) -> fx.Node:
    """The concatenation of the parts along `dim`, zeros between them, in the form of `like`."""
    dims = shape(like)
    pieces: list[fx.Node] = []
    at = 0
    for part in [*parts, Segment(dims[dim][1], dims[dim][1], None)]:
        if part.start > at:
            pieces.append(_zeros(graph, like, (*dims[:dim], (0, part.start - at), *dims[dim + 1 :])))
        if part.node is not None:
            pieces.append(part.node)
        at = part.end
    return pieces[0] if len(pieces) == 1 else add_call(graph, aten.cat.default, (pieces, dim))


def _zeros(graph: fx.Graph, like: fx.Node, dims: Shape) -> fx.Node:
    value = like.meta["values"][0]
    arguments = {"dtype": dtype(like), "device": value.device}
    return add_call(graph, aten.zeros.default, (shape_argument(graph, dims),), arguments)


def _merge(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A sum of two concatenations whose non-zero parts don't overlap, or are the same parts."""
    if node.kwargs or not all(isinstance(x, fx.Node) and len(x.users) == 1 for x in node.args):
        return None
    left, right = (segments(x) for x in node.args)
    if left is None or right is None or left[0] != right[0]:
        return None
    if shape(node.args[0]) != shape(node) or shape(node.args[1]) != shape(node):
        return None
    merged: dict[tuple[int, int], list[fx.Node]] = {}
    for part in (*left[1], *right[1]):
        if part.node is not None:
            merged.setdefault((part.start, part.end), []).append(part.node)
    bounds = sorted(merged)
    if any(a[1] > b[0] for a, b in itertools.pairwise(bounds)):
        return None
    parts = []
    for start, end in bounds:
        nodes = merged[start, end]
        total = nodes[0] if len(nodes) == 1 else add_call(graph, aten.add.Tensor, tuple(nodes))
        parts.append(Segment(start, end, total))
    return concatenate(graph, node, left[0], parts)
