"""Rewrites of operation graphs to fewer kernels: one table, forward and backward graphs pass through alike.

In and out: an fx graph whose nodes carry their values at two numbers of rows (see `operation_graphs`), cleaned.

    embedding(table, indices)              =>  index_select(table, 0, indices)             indices: [n]
    embedding(table, indices)              =>  reshape(index_select(table, 0, reshape(indices, [n * k])), [n, k, d])
    sum(scatter_add(zeros [n, v, d], 1, expand(i, [n, k, d]), g), [0])
                                           =>  embedding_dense_backward(reshape(g, [n * k, d]), reshape(i, [n * k]), v)
    bmm(x [n, r, k], expand(w [k, m]))            =>  reshape(mm(reshape(x, [n * r, k]), w), [n, r, m])
    bmm(expand(w [r, k]), x [n, k, 1])            =>  reshape(mm(reshape(x, [n, k]), t(w)), [n, r, 1])
    sum(bmm(g [n, r, 1], x [n, 1, m]), [0])       =>  mm(t(reshape(g, [n, r])), reshape(x, [n, m]))
    bmm(x [n, 1, k], y [n, k, 1])                 =>  reshape(sum(mul(x, y), [1]), [n, 1, 1])
    bmm(g [n, r, 1], x [n, 1, m])                 =>  mul(g, x)
    mm(w [r, k], t(x [n, k]))                     =>  t(mm(x, t(w)))
    tanh(t(x [n, r]))                             =>  t(tanh(x))
    add(mm(x, w), b)                       =>  addmm(b, x, w)
    add(reshape(mm(x, w), [n, L, k]), b)   =>  reshape(addmm(b, x, w), [n, L, k])      b: [k]
    slice_backward(g, [n, 750], 1, 0, 150, 1)         =>  cat([g, zeros [n, 600]], 1)
    add(cat([g, zeros], 1), cat([zeros, h], 1))       =>  cat([g, h], 1)
    sigmoid(z[:, 0:150]), sigmoid(z[:, 150:300])   =>  s = sigmoid(z[:, 0:300]);  s[:, 0:150], s[:, 150:300]
    cat([sigmoid_backward(a, s[:, 0:150]), sigmoid_backward(b, s[:, 150:300])], 1)
                                                   =>  sigmoid_backward(cat([a, b], 1), s[:, 0:300])
    add(x, mul(a, b))                        =>  addcmul(x, a, b)
    add(x, tanh_backward(mul(a, b), y))      =>  addcmul(x, tanh_backward(a, y), b)
    add(addmm(b, x, w), mm(h, u))            =>  addmm(addmm(b, x, w), h, u)       (written over itself)
    add(addmm(b, x, w), addmm(c, h, u))      =>  addmm(addmm(add(b, c), x, w), h, u)

A rule is a function that returns the node to take another's place, or None, and a row of `REWRITES` (docs/
extending-native.md has an example).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.operation_graphs import (
    Shape,
    Size,
    add_call,
    concatenated,
    device_of,
    dtype,
    is_pointwise,
    is_tensor,
    is_view,
    shape,
    shape_argument,
)
from fxbatch.codegen.simplify import (
    Rule,
    apply_rules,
    clean,
    constant_value,
    is_random,
    same_form,
    slice_bounds,
)

aten = torch.ops.aten
RewriteStep = dict[Any, tuple[Rule, ...]] | Callable[[fx.Graph], bool]


def rewrite(graph: fx.Graph) -> fx.Graph:
    """All rewrites in order, in place, each followed by cleaning where it changed something."""
    for name in REWRITES:
        if apply_rewrite(graph, name):
            clean(graph)
    return graph


def apply_rewrite(graph: fx.Graph, name: str) -> bool:
    """One rewrite: each of its steps as often as it changes something. Returns whether anything changed."""
    changed = False
    for step in REWRITES[name]:
        while step(graph) if callable(step) else apply_rules(graph, step):
            changed = True
    return changed


_ROWS: Size = (1, 0)
_ONE: Size = (0, 1)
_TURNED = [1, 0]


def _reshape(graph: fx.Graph, node: fx.Node, dims: Shape) -> fx.Node:
    return add_call(graph, aten.reshape.default, (node, shape_argument(graph, dims)))


def _permute(graph: fx.Graph, node: fx.Node, order: list[int]) -> fx.Node:
    return add_call(graph, aten.permute.default, (node, order))


def _pairs(node: fx.Node) -> list[tuple[Any, Any]]:
    """The operands of an addition, both ways; none where a number or a factor is added."""
    plain = not node.kwargs and all(isinstance(x, fx.Node) for x in node.args)
    return [(node.args[1], node.args[0]), (node.args[0], node.args[1])] if plain else []


def _alone(node: fx.Node, *targets: object) -> bool:
    """Whether a node is a call of one of these that is read once."""
    return node.target in targets and len(node.users) == 1


# -- lookups: a look-up in a table is a selection of rows, which can be written into given memory.


def _select_rows(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    table, indices = node.args[:2]
    dims = shape(indices)
    if len(dims) == 1:
        return add_call(graph, aten.index_select.default, (table, 0, indices))
    factor, rest = 0, 1
    for a, b in dims:
        if factor and a:
            return None
        factor, rest = (factor * b, rest * b) if factor or not a else (rest * a, rest * b)
    flat = _reshape(graph, indices, ((factor, rest),))
    return _reshape(graph, add_call(graph, aten.index_select.default, (table, 0, flat)), shape(node))


def _sum_of_scattered(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The gradient of a table whose rows were selected, without a table per row of the batch."""
    scattered: Any = node.args[0]
    if scattered.target is not aten.scatter_add.default or list(node.args[1]) != [0] or len(node.args) > 2:
        return None
    zeros, dim, wide, grad = scattered.args
    if zeros.target not in (aten.new_zeros.default, aten.zeros.default) or dim != 1 or node.kwargs:
        return None
    if wide.target is not aten.expand.default or not dtype(grad).is_floating_point:
        return None
    tables, dims, index = shape(zeros), shape(grad), shape(wide.args[0])
    fixed = not any(a for a, _ in (*dims[1:], *tables[1:]))
    if len(dims) < 2 or dims != shape(wide) or dims[0] != _ROWS or not fixed:
        return None
    if tables[2:] != dims[2:] or index != (*dims[:2], *((0, 1),) * len(dims[2:])):
        return None
    (_, chosen), (_, rows) = dims[1], tables[1]
    width = math.prod(b for _, b in dims[2:])
    flat = _reshape(graph, grad, ((chosen, 0), (0, width)))
    places = _reshape(graph, wide.args[0], ((chosen, 0),))
    table = add_call(graph, aten.embedding_dense_backward.default, (flat, places, rows, -1, False))
    return _reshape(graph, table, tables[1:])


# -- batched products: a batch of products with one shared matrix is one product; rows come first.


def _times(a: Size, b: Size) -> Size:
    """A product of sizes of which one at least does not depend on n."""
    return (a[0] * b[1] + a[1] * b[0], a[1] * b[1])


def _shared_part(graph: fx.Graph, node: object) -> fx.Node | None:
    """A node with the content of one row, if all n rows of the given node are equal; else None."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    dims = shape(node)
    if not dims or dims[0] != _ROWS or any(a for a, _ in dims[1:]):
        return None
    source: Any = node.args[0]
    if node.target is aten.expand.default:
        of_row, part = shape(source), source
        if len(of_row) == len(dims):
            if of_row[0] != _ONE:
                return None
            of_row = of_row[1:]
            part = _reshape(graph, source, of_row)
        sizes = [b for _, b in dims[1:]]
        return part if of_row == dims[1:] else add_call(graph, aten.expand.default, (part, sizes))
    if node.target is aten.reshape.default:
        inner = _shared_part(graph, source)
        return None if inner is None else _reshape(graph, inner, dims[1:])
    if node.target is aten.permute.default and node.args[1][0] == 0:
        inner = _shared_part(graph, source)
        order: Any = node.args[1]
        return None if inner is None else _permute(graph, inner, [d - 1 for d in order[1:]])
    return None


def _shared_right(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a: Any = node.args[0]
    matrix = _shared_part(graph, node.args[1])
    if matrix is None:
        return None
    n, r, k = shape(a)
    product = add_call(graph, aten.mm.default, (_reshape(graph, a, (_times(n, r), k)), matrix))
    return _reshape(graph, product, shape(node))


def _shared_left(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    b: Any = node.args[1]
    matrix = _shared_part(graph, node.args[0])
    if matrix is None:
        return None
    n, k, m = shape(b)
    if m != _ONE:
        return None
    rows = _reshape(graph, b, (n, k))
    product = add_call(graph, aten.mm.default, (rows, _permute(graph, matrix, _TURNED)))
    return _reshape(graph, product, shape(node))


def _sum_of_outer_products(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Through a reshape that keeps the rows."""
    source: Any = node.args[0]
    rank = len(shape(source))
    over: Any = node.args[1]
    if node.kwargs or not over or [d % rank for d in over] != [0]:
        return None
    product = source.args[0] if source.target is aten.reshape.default else source
    if product.target is not aten.bmm.default or shape(source)[0] != _ROWS or shape(product)[0] != _ROWS:
        return None
    if len(source.users) > 1 or len(product.users) > 1:
        return None
    a, b = product.args
    (n, r, inner), (_, _, m) = shape(a), shape(b)
    if inner != _ONE:
        return None
    left = _permute(graph, _reshape(graph, a, (n, r)), _TURNED)
    total = add_call(graph, aten.mm.default, (left, _reshape(graph, b, (n, m))))
    return _reshape(graph, total, shape(node))


def _outer(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a: Any = node.args[0]
    return add_call(graph, aten.mul.Tensor, node.args) if shape(a)[2] == _ONE else None


def _dot(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a, b = node.args
    (n, r, k), (_, _, m) = shape(a), shape(b)
    if r != _ONE or m != _ONE or n != _ROWS:
        return None
    product = add_call(graph, aten.mul.Tensor, (_reshape(graph, a, (n, k)), _reshape(graph, b, (n, k))))
    return _reshape(graph, add_call(graph, aten.sum.dim_IntList, (product, [1])), shape(node))


def _rows_on_the_right(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a, b = node.args
    if b.target is not aten.permute.default or list(b.args[1]) != _TURNED:
        return None
    if shape(b)[1] != _ROWS or any(size[0] for size in shape(a)):
        return None
    product = add_call(graph, aten.mm.default, (b.args[0], _permute(graph, a, _TURNED)))
    return _permute(graph, product, _TURNED)


def _turn_pointwise(graph: fx.Graph) -> bool:
    """A pointwise function of turned matrices is a turned one of the matrices."""
    pointwise = [x.target for x in graph.nodes if is_pointwise(x) and is_tensor(x)]
    return apply_rules(graph, dict.fromkeys(pointwise, (_turn_after,)))


def _turn_after(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Of tensors [r, n] that all are turned ones, or numbers."""
    dims = shape(node)
    if node.kwargs or len(dims) != 2 or dims[1] != _ROWS or dims[0][0]:
        return None
    args: list[Any] = []
    for x in node.args:
        if isinstance(x, fx.Node):
            if x.target is not aten.permute.default or list(x.args[1]) != _TURNED or shape(x) != dims:
                return None
            x = x.args[0]
        elif not isinstance(x, (bool, int, float)):
            return None
        args.append(x)
    return _permute(graph, add_call(graph, node.target, tuple(args)), _TURNED)


# -- linear: a product and a bias are one kernel.


def _addmm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    for bias, product in _pairs(node):
        inner = product.args[0] if _alone(product, aten.reshape.default) else product
        if not _alone(inner, aten.mm.default) or dtype(bias) != dtype(inner) or shape(node) != shape(product):
            continue
        width = shape(inner)[1:]
        if shape(bias) == width == shape(product)[-1:]:
            new = add_call(graph, aten.addmm.default, (bias, *inner.args))
            return new if inner is product else add_call(graph, aten.reshape.default, (new, product.args[1]))
    return None


# -- slices: gradients of slices are put side by side, not padded with zeros and added.


@dataclass(frozen=True)
class Segment:
    """Part `start:end` of a concatenation: a node, or zeros where it is None."""

    start: int
    end: int
    node: fx.Node | None


def segments(node: fx.Node) -> tuple[int, list[Segment]] | None:
    """(dim, parts) of a concatenation along a dimension that doesn't depend on n."""
    pieces = concatenated(node)
    if pieces is None:
        return None
    return pieces[0], [Segment(a, b, None if constant_value(x) == 0.0 else x) for x, a, b in pieces[1]]


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
    wide = _reshape(graph, grad, one)
    return concatenate(graph, node, dim, [Segment(index, index + 1, wide)])


def concatenate(graph: fx.Graph, like: fx.Node, dim: int, parts: list[Segment]) -> fx.Node:
    """The concatenation of the parts along `dim`, zeros between them, in the form of `like`."""
    dims, form = shape(like), {"dtype": dtype(like), "device": device_of(like)}
    pieces: list[fx.Node] = []
    at = 0
    for part in [*parts, Segment(dims[dim][1], dims[dim][1], None)]:
        if part.start > at:
            gap = shape_argument(graph, (*dims[:dim], (0, part.start - at), *dims[dim + 1 :]))
            pieces.append(add_call(graph, aten.zeros.default, (gap,), form))
        if part.node is not None:
            pieces.append(part.node)
        at = part.end
    return pieces[0] if len(pieces) == 1 else add_call(graph, aten.cat.default, (pieces, dim))


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


# -- gates: the same pointwise function of adjacent slices is one kernel on the wide slice, forwards and backwards.


def _sliced(node: object) -> tuple[fx.Node, int, int, int] | None:
    """(source, dim, start, end) of a plain slice."""
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor:
        return None
    bounds = slice_bounds(node)
    return None if bounds is None else (node.args[0], *bounds)


def _widen_slices(graph: fx.Graph) -> bool:
    """Functions of slices with the same bounds in each source, adjacent to others of the same sources."""
    slices: dict[Any, list[tuple[int, int, fx.Node]]] = {}
    for node in graph.nodes:
        plain = is_pointwise(node) and is_tensor(node) and node.users and not node.kwargs
        if plain and (part := _same_slices(node)) is not None:
            sources, dim, start, end = part
            slices.setdefault((node.target, sources, dim), []).append((start, end, node))
    order = {node: i for i, node in enumerate(graph.nodes)}
    runs = [(target, dim, run) for (target, _, dim), parts in slices.items() for run in _adjacent(parts)]
    for target, dim, run in runs:
        _replace_run(graph, target, dim, run, order)
    return bool(runs)


def _same_slices(node: fx.Node) -> tuple[tuple[Any, ...], int, int, int] | None:
    """(sources and plain arguments, dim, start, end) of a function of slices with the same bounds."""
    bounds: list[tuple[int, int, int]] = []
    sources: list[Any] = []
    for x in node.args:
        if isinstance(x, (list, tuple)):
            return None
        part = _sliced(x)
        if isinstance(x, fx.Node):
            if part is None or shape(x) != shape(node):
                return None
            bounds.append(part[1:])
            sources.append(part[0])
        else:
            sources.append((type(x), x))
    if not bounds or any(b != bounds[0] for b in bounds):
        return None
    return tuple(sources), *bounds[0]


def _adjacent(parts: list[tuple[int, int, fx.Node]]) -> list[list[tuple[int, int, fx.Node]]]:
    """Maximal runs of two or more parts, each starting where the one before ends."""
    runs: list[list[tuple[int, int, fx.Node]]] = []
    for part in sorted(parts, key=lambda x: x[:2]):
        if runs and runs[-1][-1][1] == part[0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run for run in runs if len(run) > 1]


def _replace_run(
    graph: fx.Graph, target: Any, dim: int, run: list[tuple[int, int, fx.Node]], order: dict[fx.Node, int]
) -> None:
    first = min((part[2] for part in run), key=order.__getitem__)
    low, high = run[0][0], run[-1][1]
    with graph.inserting_before(first):
        args = first.args
        wide = [_wide_slice(graph, x.args[0], dim, low, high) if isinstance(x, fx.Node) else x for x in args]
        result = add_call(graph, target, tuple(wide))
        slices = [add_call(graph, aten.slice.Tensor, (result, dim, a - low, b - low)) for a, b, _ in run]
    for (_, _, node), view in zip(run, slices, strict=True):
        node.replace_all_uses_with(view)


def _wide_slice(graph: fx.Graph, source: fx.Node, dim: int, low: int, high: int) -> fx.Node:
    whole = (low, high) == (0, shape(source)[dim][1])
    return source if whole else add_call(graph, aten.slice.Tensor, (source, dim, low, high))


def _widen_pieces(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Neighbouring pieces of a concatenation that are the same function become one piece."""
    if not node.args[0]:
        return None
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape(node))
    pieces = list(node.args[0])
    done: list[fx.Node] = []
    at = 0
    while at < len(pieces):
        end = at + 1
        while end < len(pieces) and _wide_arguments(pieces[at : end + 1], dim) is not None:
            end += 1
        wide = _wide_arguments(pieces[at:end], dim) if end - at > 1 else None
        done.append(pieces[at] if wide is None else _wide_call(graph, pieces[at], wide, dim))
        at = end
    if len(done) == len(pieces):
        return None
    return done[0] if len(done) == 1 else add_call(graph, aten.cat.default, (done, dim))


def _wide_call(graph: fx.Graph, piece: fx.Node, arguments: list[Any], dim: int) -> fx.Node:
    args = []
    for argument in arguments:
        if isinstance(argument, list):
            argument = add_call(graph, aten.cat.default, (argument, dim))
        elif isinstance(argument, tuple):
            argument = _wide_slice(graph, argument[0], dim, *argument[1:])
        args.append(argument)
    return add_call(graph, piece.target, tuple(args), dict(piece.kwargs))


def _wide_arguments(pieces: list[fx.Node], dim: int) -> list[Any] | None:
    """For each argument of the wide call: (source, low, high), a list to concatenate, or a plain value.

    None where the pieces are no calls of one pointwise function, or where making them wide would copy.
    """
    first = pieces[0]
    if not is_pointwise(first) or is_random(first):
        return None
    if any(p.target is not first.target or p.kwargs != first.kwargs or len(p.users) > 1 for p in pieces):
        return None
    if len({len(p.args) for p in pieces}) > 1:
        return None
    sides = [_side([p.args[i] for p in pieces], pieces, dim) for i in range(len(first.args))]
    if any(side is _NEVER for side in sides) or not any(isinstance(side, tuple) for side in sides):
        return None
    return sides


_NEVER = object()


def _side(values: list[Any], pieces: list[fx.Node], dim: int) -> Any:
    if not any(isinstance(v, fx.Node) for v in values):
        plain = all(type(v) is type(values[0]) and v == values[0] for v in values)
        return values[0] if plain and not isinstance(values[0], (list, tuple)) else _NEVER
    if not all(isinstance(v, fx.Node) for v in values):
        return _NEVER
    if any(shape(v) != shape(p) for v, p in zip(values, pieces, strict=True)):
        return _NEVER
    parts = [_sliced(v) for v in values]
    tensors = [p for p in parts if p is not None]
    one_source = len(tensors) == len(parts) and all(p[:2] == (tensors[0][0], dim) for p in tensors)
    if one_source and all(a[3] == b[2] for a, b in itertools.pairwise(tensors)):
        return tensors[0][0], tensors[0][2], tensors[-1][3]
    alone = all(v.op == "call_function" and len(v.users) == 1 for v in values)
    return values if alone and not any(is_view(v) or is_random(v) for v in values) else _NEVER


# -- products: a product that is only added is one kernel with the addition.

_DERIVATIVES = (aten.tanh_backward.default, aten.sigmoid_backward.default)


def _addcmul(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    for product, rest in _pairs(node) if dtype(node).is_floating_point else ():
        operands = (rest, *product.args)
        if not _alone(product, aten.mul.Tensor) or not all(isinstance(x, fx.Node) for x in operands):
            continue
        same = all(dtype(x) == dtype(node) for x in operands)
        if same and shape(product) == shape(node) and shape(rest) == shape(node):
            return add_call(graph, aten.addcmul.default, operands)
    return None


def _addcmul_of_derivative(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A derivative is linear in the gradient that it takes: a factor of that may as well come last."""
    for derivative, rest in _pairs(node) if dtype(node).is_floating_point else ():
        product: Any = derivative.args[0] if _alone(derivative, *_DERIVATIVES) else derivative
        if product is derivative or not _alone(product, aten.mul.Tensor):
            continue
        operands = (rest, derivative, product, *product.args)
        if all(isinstance(x, fx.Node) and same_form(x, node) for x in operands):
            inner = add_call(graph, derivative.target, (product.args[0], *derivative.args[1:]))
            return add_call(graph, aten.addcmul.default, (rest, inner, product.args[1]))
    return None


def _two_products(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Through reshapes of the same kind on both sides."""
    if node.kwargs or not all(isinstance(x, fx.Node) and shape(x) == shape(node) for x in node.args):
        return None
    sides = [_product(x) for x in node.args]
    if sides[0] is None or sides[1] is None or shape(sides[0]) != shape(sides[1]):
        return None
    first, second = sorted(sides, key=lambda x: x.target is not aten.addmm.default)
    if dtype(first) != dtype(second) or first is second or first.kwargs or second.kwargs:
        return None
    if second.target is aten.mm.default:
        total = add_call(graph, aten.addmm.default, (first, *second.args))
    elif shape(first.args[0]) == shape(second.args[0]) and len(shape(first.args[0])) == 1:
        bias = add_call(graph, aten.add.Tensor, (first.args[0], second.args[0]))
        inner = add_call(graph, aten.addmm.default, (bias, *first.args[1:]))
        total = add_call(graph, aten.addmm.default, (inner, *second.args[1:]))
    else:
        return None
    if shape(total) == shape(node):
        return total
    sizes = next(x for x in node.args if x.target is aten.reshape.default).args[1]
    return add_call(graph, aten.reshape.default, (total, sizes))


def _product(node: fx.Node) -> fx.Node | None:
    if len(node.users) > 1:
        return None
    inner: Any = node.args[0] if node.target is aten.reshape.default else node
    return inner if _alone(inner, aten.mm.default, aten.addmm.default) else None


REWRITES: dict[str, tuple[RewriteStep, ...]] = {
    # selections of rows can be written into given memory
    "lookups": ({aten.embedding.default: (_select_rows,), aten.sum.dim_IntList: (_sum_of_scattered,)},),
    # before the next: what becomes a product of matrices may have a bias
    "batched_products": (
        {aten.sum.dim_IntList: (_sum_of_outer_products,)},
        {
            aten.bmm.default: (_shared_right, _shared_left, _outer, _dot),
            aten.mm.default: (_rows_on_the_right,),
        },
        _turn_pointwise,
    ),
    # products and biases become addmm, before anything looks at additions
    "linear": ({aten.add.Tensor: (_addmm,)},),
    # gradients of slices side by side, so that the next sees neighbours
    "slices": (
        {aten.slice_backward.default: (_slice_to_cat,), aten.select_backward.default: (_select_to_cat,)},
        {aten.add.Tensor: (_merge,)},
    ),
    # one kernel for neighbouring gates
    "gates": (_widen_slices, {aten.cat.default: (_widen_pieces,)}),
    # last: it hides additions and products from the others
    "products": ({aten.add.Tensor: (_two_products, _addcmul, _addcmul_of_derivative)},),
}
